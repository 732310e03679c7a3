"""A shared table beside a private one: how fast rows are gathered, and how much memory a node holds.

Two ranks of a local Ray share one table. One after the other gathers the same random rows from the shared
table, and by `torch.embedding` from a tensor of its own, on one thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raywl.types import ParallelContext, current_context

if TYPE_CHECKING:
    from raywl.actors.tables import SharedTable

__all__ = ["TableBenchmark"]

_NUM_READERS = 2
_NUM_BATCHES = 64


@dataclass(slots=True)
class TableBenchmark:
    """A benchmark: what to run, and what was measured so far."""

    num_bytes: int
    """Of the table."""
    row_bytes: int = 1024
    """Rows are bf16."""
    batch: int = 8192
    """Rows in one gather."""
    runs: list[dict[str, float]] = field(default_factory=list)
    """Rows per second of each repetition and process."""
    memory: dict[str, int] = field(default_factory=dict)

    def run(self, num_repetitions: int, say: Callable[[str], None]) -> None:
        """Shares a table and reads it.

        Args:
            num_repetitions: At least 1.
            say: Called with a line about each.

        Raises:
            CapacityError: The object store is too small for the table.
            ClusterError: The two ways brought different rows.
        """
        import torch
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="raywl-bench-") as folder:
            shape = (max(1, self.num_bytes // self.row_bytes), self.row_bytes // 2)
            # Bits of numbers below 1, none of them NaN, so that rows can be compared.
            bits = torch.randint(0, 0x3F80, shape, dtype=torch.int16)
            save_file({"table": bits.view(torch.bfloat16)}, f"{folder}/table.safetensors")
            del bits
            save_file({"weight": torch.zeros(1)}, f"{folder}/model.safetensors")
            self._share(folder, num_repetitions, say)

    def _share(self, folder: str, num_repetitions: int, say: Callable[[str], None]) -> None:
        import raywl

        readers = raywl.launch(
            f"{folder}/model.safetensors", _small_model, tp_size=_NUM_READERS, init_distributed=False
        )
        with readers, raywl.share_table(f"{folder}/table.safetensors", "table", placement="plasma") as table:
            stores = set().union(*readers.run(_map, table))
            self.memory = {"table_bytes": table.nbytes, "pss_bytes": _pss_of(stores)}
            readers.run(_copy, self.batch)
            for repetition in range(num_repetitions):
                for rank in range(_NUM_READERS):
                    found = readers.run(_measure, rank)[rank]
                    self.runs.append(found)
                    say(
                        f"{repetition + 1}/{num_repetitions} gather {found['gather']:,.0f} rows/s, "
                        f"embedding {found['embedding']:,.0f}"
                    )

    def to_dict(self) -> dict[str, Any]:
        """Medians and their ratio, as JSON values."""
        medians = {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}
        return {
            "table_bytes": self.memory["table_bytes"],
            "row_bytes": self.row_bytes,
            "batch": self.batch,
            "num_processes": _NUM_READERS,
            "rows_per_s": medians,
            "spread": {
                name: [min(run[name] for run in self.runs), max(run[name] for run in self.runs)]
                for name in medians
            },
            "ratio_to_embedding": medians["gather"] / medians["embedding"],
            "pss_bytes": self.memory["pss_bytes"],
            "copies": self.memory["pss_bytes"] / self.memory["table_bytes"],
        }


def _small_model(context: ParallelContext) -> Any:
    """What the processes have beside the table."""
    import torch

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(1))
    return model


def _map(model: Any, table: SharedTable) -> set[str]:
    """Looks at every page; returns the object stores that this process maps."""
    model.table = table
    for index in range(table.num_chunks):
        table.chunk(index).reshape(-1)[::4096].max()
    return {store for store, _ in _stores("self")}


def _copy(model: Any, batch: int) -> None:
    """Makes the private tensor, and compares."""
    import torch

    rows = model.table.shape[0]
    model.own = model.table.gather(torch.arange(rows))
    random = torch.Generator().manual_seed(os.getpid())
    model.ids = torch.randint(0, rows, (_NUM_BATCHES, batch), generator=random)
    if not torch.equal(model.table.gather(model.ids[0]), model.own[model.ids[0]]):
        raise RuntimeError("the shared table and its copy have different rows")


def _measure(model: Any, rank: int) -> dict[str, float] | None:
    """Rows per second of both ways; `None` on the ranks whose turn it isn't."""
    import torch

    context = current_context()
    if context is None or context.tp_rank != rank:
        return None
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    for ids in model.ids:
        model.table.gather(ids)
    gathered_s = time.perf_counter()
    for ids in model.ids:
        torch.embedding(model.own, ids)
    ended_s = time.perf_counter()
    return {
        "gather": model.ids.numel() / (gathered_s - started_s),
        "embedding": model.ids.numel() / (ended_s - gathered_s),
    }


def _pss_of(stores: set[str]) -> int:
    """These stores' memory, each page once: its shares, summed over all processes that can be seen."""
    total = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        # It may have ended, or be another user's.
        with contextlib.suppress(OSError):
            total += sum(nbytes for store, nbytes in _stores(pid) if store in stores)
    return total


def _stores(pid: str) -> Iterator[tuple[str, int]]:
    """A process's mappings of object stores: device and inode, and bytes of its share in them."""
    with open(f"/proc/{pid}/smaps") as file:
        text = file.read()
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        head = mapping.partition("\n")[0].split()
        found = re.search(r"(?m)^Pss:\s+(\d+) kB", mapping)
        if found and len(head) > 5 and "plasma" in head[5]:
            yield f"{head[3]} {head[4]}", int(found[1]) << 10
