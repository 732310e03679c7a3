"""Processes that read shared tables, and what they cost; Ray's workers import this module."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import torch

from raywl import SharedTable


def pss_of(pid: int) -> int:
    """Bytes of a process's memory, what it shares divided by who shares it."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        found = re.search(r"^Pss:\s+(\d+) kB", file.read(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, flat; unlike tensors of all dtypes, they can be sent and compared."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class Reader:
    """A process with a handle of a table."""

    def __init__(self, table: SharedTable | None = None) -> None:
        self.table = table

    def pid(self) -> int:
        return os.getpid()

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def take(self, table: SharedTable) -> None:
        self.table = table

    def gather(self, ids: Any) -> np.ndarray:
        assert self.table is not None
        return raw_of(self.table.gather(ids))

    def touch(self) -> int:
        """Maps the table and looks at every page of it; returns the bytes seen."""
        assert self.table is not None
        seen = 0
        for index in range(self.table.num_chunks):
            chunk = self.table.chunk(index)
            chunk.reshape(-1)[::4096].max()
            seen += chunk.nbytes
        return seen

    def write(self) -> list[str]:
        """Tries to write to every chunk; returns what came of it."""
        assert self.table is not None
        told = []
        for index in range(self.table.num_chunks):
            chunk = self.table.chunk(index)
            told.append(f"writeable={chunk.flags.writeable} owndata={chunk.flags.owndata}")
            try:
                chunk[:] = 0
            except ValueError as error:
                told.append(str(error))
            try:
                chunk.flags.writeable = True
            except ValueError as error:
                told.append(str(error))
        return told

    def close(self) -> None:
        assert self.table is not None
        self.table.close()
