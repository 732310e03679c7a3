"""Opening a checkpoint, and what can be done with it without a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raywl.checkpoint import Manifest
from raywl.plan import LoadPlan, declare_plan
from raywl.sources import Pin, resolve
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
            strategy: How files are read: `"auto"` (as `None`), `"buffered"`, `"direct"`, `"mmap"` or
                `"prefetch"`; `raywl.strategies` says what they do.
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
        hash that the hub's cache stores a file under; a remote checkpoint is fetched for that.
        """
        return verify(self, deep=deep)


def open_checkpoint(
    ref: str | os.PathLike[str] | Pin,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    allow_patterns: str | Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool | None = None,
) -> Checkpoint:
    """Opens a checkpoint by reading its index and headers, never the data.

    Files are those of safetensors or, where there are none, of `torch.save`: `*.bin`, `*.pt` or `*.pth`,
    whose pickles are read without running any code. What of these is no tensor is left out with a warning.

    Of a remote checkpoint, too, only these are read, by requests for ranges. What is used of it is fetched
    then, into a cache, by one process for all that share it; `Checkpoint.fetch` does so at once.

    Args:
        ref: A folder or one weight file; or a repository of the hub, as `org/name`,
            `org/name@revision` or `hf://org/name@revision`; or one of ModelScope, as
            `ms://org/name@revision`; or the URL of a folder or file in a store that fsspec knows: `s3://`,
            `gs://`, `http(s)://`, `memory://`, `file://` ...; or what `raywl.sources.pin` made of one. What
            is there as a local path is always taken as one.
        revision: Branch, tag or commit of a repository; by default `main`, and `master` of ModelScope.
        subfolder: A folder inside of it.
        cache_dir: Where fetched files are kept: the hub's or ModelScope's cache folder, by default where its
            own client has it; or raywl's for stores, by default `RAYWL_CACHE`, or `raywl` in the user's
            cache folder.
        token: For the hub or ModelScope; by default the one that its own client finds.
        allow_patterns: Only weight files whose names match one of these.
        storage_options: A store's, as fsspec's file system for it takes them: keys, endpoint, headers ...
        offline: Whether to use what the cache holds and to ask nobody; by default as `RAYWL_OFFLINE` or, for
            repositories, `HF_HUB_OFFLINE` says.

    Raises:
        ValueError: A ref of an unknown kind, or options that mean nothing for it.
        NotFoundError: There is no such path, repository, revision, bucket or key.
        AuthError: The hub or store wants other credentials.
        OfflineError: Working offline, and the cache doesn't hold the checkpoint.
        SourceError: The hub or store can't be reached, or failed.
        MissingFileError: Files of the checkpoint are absent.
        CorruptFileError: A header or the index is damaged.
        CheckpointError: There are no weights, or files and index contradict each other.
    """
    source = resolve(
        ref,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=allow_patterns,
        storage_options=storage_options,
        offline=offline,
    )
    if isinstance(ref, Pin):
        allow_patterns = ref.allow_patterns
    checkpoint = Checkpoint.read(source, allow_patterns)
    if checkpoint.notes:
        warnings.warn("; ".join(checkpoint.notes), stacklevel=2)
    return checkpoint
