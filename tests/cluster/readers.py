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
    """A process with copies of tables' handles, each by a key."""

    def __init__(self) -> None:
        self.tables: dict[str, SharedTable] = {}

    def pid(self) -> int:
        return os.getpid()

    def take(self, key: str, table: SharedTable) -> None:
        self.tables[key] = table

    def drop(self) -> None:
        self.tables.clear()

    def gather(self, key: str, ids: Any) -> np.ndarray:
        return raw_of(self.tables[key].gather(ids))

    def touch(self, key: str) -> int:
        """Maps the table and looks at every page of it; returns the bytes seen."""
        seen, table = 0, self.tables[key]
        for index in range(table.num_chunks):
            chunk = table.chunk(index)
            chunk.reshape(-1)[::4096].max()
            seen += chunk.nbytes
        return seen

    def write(self, key: str) -> list[str]:
        """Tries to write to every chunk; returns what came of it."""
        told, table = [], self.tables[key]
        for index in range(table.num_chunks):
            chunk = table.chunk(index)
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

    def close(self, key: str) -> None:
        self.tables[key].close()
