"""Opening a checkpoint, and what can be done with it without a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raywl.checkpoint import Manifest
from raywl.plan import LoadPlan, declare_plan
from raywl.sources import resolve
from raywl.types import ParallelContext
from raywl.verifying import VerifyReport, verify

if TYPE_CHECKING:
    import torch

    from raywl.progress import Progress

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint(Manifest):
    """A checkpoint that was opened: its files, tensors, sizes and identity, and what can be done with them.

    Immutable; pickles without the data. Made by `open_checkpoint`.
    """

    def iter_weights(
        self,
        names: Iterable[str] | None = None,
        strategy: str | None = None,
        local_expert_ids: Collection[int] | None = None,
        progress: bool | Progress | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads tensors one after the other, onto the CPU.

        Args:
            names: Only these; all by default.
            strategy: How files are read: `"auto"` (as `None`) or `"buffered"`.
            local_expert_ids: Leave out the heavy tensors of all other experts.
            progress: `True` for a bar on standard error, or a callable.

        Yields:
            `(name, tensor)` by file in natural order, then by name; the order is the same on every rank.

        Raises:
            ValueError: An unknown strategy.
            CheckpointError: A name that isn't there, or a file that changed since it was opened.
        """
        from raywl.readers.iterate import iter_weights

        return iter_weights(self, names, strategy, local_expert_ids, progress)

    def plan(
        self,
        parallel: ParallelContext | None = None,
        shards: Mapping[str, Any] | None = None,
        names: Iterable[str] | None = None,
    ) -> LoadPlan:
        """What a rank reads that keeps one parameter for each tensor, cut by `shards`.

        Args:
            parallel: The rank; a lone one by default.
            shards: Name patterns (`*`, `?`) to `Shard(dim)` or `Replicate()`; the rest is replicated.
            names: Only these tensors.

        Raises:
            CheckpointError: A name that isn't there.
            ShapeMismatchError: A tensor hasn't the dim that it is to be cut along.
        """
        return declare_plan(self, parallel or ParallelContext(), shards, names)

    def verify(self, deep: bool = False) -> VerifyReport:
        """Checks that the files are still what was opened; `deep` reads all bytes.

        Headers, sizes and the index are read again. `deep` also hashes each file, and compares with the
        hash that the hub's cache stores a file under.
        """
        return verify(self, deep=deep)


def open_checkpoint(
    ref: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    allow_patterns: Sequence[str] | None = None,
) -> Checkpoint:
    """Opens a checkpoint by reading its index and headers, never the data.

    Args:
        ref: A folder, or one safetensors file.
        subfolder: A folder inside of it.
        allow_patterns: Only weight files whose names match one of these.

    Raises:
        NotFoundError: There is no such path.
        MissingFileError: Files of the checkpoint are absent.
        CorruptFileError: A header or the index is damaged.
        CheckpointError: There are no weights, or files and index contradict each other.
    """
    source = resolve(ref, subfolder=subfolder)
    return Checkpoint.read(source, allow_patterns)
