"""Weights through instanttensor, straight onto NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from raywl.iterators.files import FileWork, as_expert_ids, as_paths, plan_files
from raywl.iterators.libraries import (
    check_same_files,
    give_out,
    load_library,
    read_with,
    shown_files,
    unreadable,
)
from raywl.iterators.reading import read_lazily
from raywl.iterators.tally import Tally
from raywl.iterators.together import Ranks, resolve_group, together
from raywl.remap.experts import should_skip_weight

__all__ = ["READABLE", "instanttensor_weights_iterator"]

_PACKAGE = "instanttensor"

Weights = Generator[tuple[str, torch.Tensor], None, None]

READABLE = frozenset(
    (
        "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 "
        "I32 U32 F32 C64 F64 I64 U64"
    ).split()
)
"""The dtypes that the library reads as the format means them; it takes a packed F4 for twice its size."""


def instanttensor_weights_iterator(
    hf_weights_files: Iterable[str | PathLike[str]],
    use_tqdm_on_load: bool,
    local_expert_ids: Iterable[int] | None = None,
) -> Weights:
    """Iterates over the weights of safetensors files, read by `instanttensor` onto the current GPU.

    One file is held at a time; files come in natural order, the tensors of a file by name. All ranks of the
    default process group read together, each file once, unless one of them leaves out experts of this
    checkpoint: then each reads for itself just what it wants. Ranks that read together get an error at once
    when one of them fails or stops between two files; inside a file they wait in NCCL, until its timeout.

    Args:
        hf_weights_files: Safetensors files.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress.
        local_expert_ids: The experts whose heavy tensors are given out; all with `None`.

    Raises:
        ValueError: There is no NVIDIA GPU.
        ImportError: The library isn't installed.
        CheckpointError: A file is damaged, or the library can't read it.
        ClusterError: Another rank has failed, or has other files.
    """
    files, ids = as_paths(hf_weights_files), as_expert_ids(local_expert_ids)
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ValueError("instanttensor reads onto NVIDIA GPUs, and there is none here")
    library = load_library("instanttensor", _PACKAGE, "instanttensor")
    return _run(files, use_tqdm_on_load, ids, library)


def _run(files: list[str], use_tqdm_on_load: bool, ids: frozenset[int] | None, library: Any) -> Weights:
    device = torch.device("cuda", torch.cuda.current_device())
    group = resolve_group(...)
    with together(group, "the default process group") as ranks:
        works = plan_files(files, ids)
        skips = _skips_experts(works, ids)
        if ranks is not None:
            told = ranks.gather({"files": shown_files(works), "skips": skips})
            skips = any(row["skips"] for row in told)
            if not skips:
                check_same_files([row["files"] for row in told])
        if ranks is not None and not skips:
            yield from _read_all(works, use_tqdm_on_load, _Reader(library, device, group, ranks))
            return
    # Each rank wants something else, and reads it without the others.
    yield from _read_all(works, use_tqdm_on_load, _Reader(library, device, None, None))


def _skips_experts(works: list[FileWork], ids: frozenset[int] | None) -> bool:
    """Whether ranks want different tensors: the same answer on each of them, whichever experts it has."""
    nobody: frozenset[int] = frozenset()
    return ids is not None and any(
        should_skip_weight(name, nobody) for work in works for name in work.entries
    )


def _read_all(works: list[FileWork], use_tqdm_on_load: bool, reader: _Reader) -> Weights:
    own = unreadable(_PACKAGE, works, READABLE, lambda work: work.metadata.get("format", "pt") == "pt")
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
    for work in works:
        if work.path in own:
            for name, tensor in read_lazily(work, tally):
                yield name, tensor.to(reader.device)
        elif work.names:
            tally.starts(work)
            tensors = read_with(_PACKAGE, work, lambda work=work: reader.read(work))  # type: ignore[misc]
            yield from give_out(work, tensors, tally)


class _Reader:
    """Reads one file after the other with the library, together with other ranks or alone."""

    def __init__(self, library: Any, device: torch.device, group: Any, ranks: Ranks | None) -> None:
        self.device = device
        self._library, self._group, self._ranks = library, group, ranks

    def read(self, work: FileWork) -> dict[str, torch.Tensor]:
        """The file's tensors, in memory of their own."""
        # A filter is for lone ranks only; ranks that read together leave out the same names afterwards.
        names = list(work.names) if self._group is None and work.left_out else None
        if self._ranks is not None:
            # Where one of them can't begin, none does: in the library they would wait for it.
            self._ranks.gather("begins")
        try:
            with self._library.safe_open(
                [work.path],
                framework="pt",
                device=self.device,
                process_group=self._group,
                copy=True,
                tensor_filter=names,
                tensor_name_match_mode="exact",
            ) as file:
                return {name: tensor for name, tensor in file.tensors() if name in work.entries}
        except RuntimeError as error:
            if self._ranks is None or isinstance(error, torch.OutOfMemoryError):
                raise
            self._ranks.check()
            if isinstance(error, dist.DistError):
                raise self._ranks.lost(error) from error
            raise
