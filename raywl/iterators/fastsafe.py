"""Weights through fastsafetensors: from storage to the GPU and not by way of the CPU, where that works."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from raywl.errors import RaywlError
from raywl.iterators.files import as_paths, plan_files
from raywl.iterators.libraries import give_out, load_library, read_with, unreadable
from raywl.iterators.reading import read_lazily
from raywl.iterators.tally import Tally

__all__ = ["READABLE", "fastsafetensors_weights_iterator"]

_PACKAGE = "fastsafetensors"

Weights = Generator[tuple[str, torch.Tensor], None, None]

READABLE = frozenset("BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64 F4".split())
"""The dtypes that the library reads as the format means them."""


def fastsafetensors_weights_iterator(
    hf_weights_files: Iterable[str | PathLike[str]], use_tqdm_on_load: bool
) -> Weights:
    """Iterates over the weights of safetensors files, read by `fastsafetensors`.

    The tensors are on the current GPU where there is one, else on the CPU. One file is held at a time; files
    come in natural order, the tensors of a file by name. Each rank reads for itself.

    GPU-direct reads are used where there is a GPU and no other rank, whose GPU they would touch as well.
    Where they fail before the first tensor was given out, everything is read without them, with a warning.

    Args:
        hf_weights_files: Safetensors files.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress.

    Raises:
        ImportError: The library isn't installed.
        CheckpointError: A file is damaged, or the library can't read it.
    """
    files = as_paths(hf_weights_files)
    library = load_library("fastsafetensors", _PACKAGE, "fastsafetensors")
    return _run(files, use_tqdm_on_load, library)


def _run(files: list[str], use_tqdm_on_load: bool, library: Any) -> Weights:
    works = plan_files(files)
    own = unreadable(_PACKAGE, works, READABLE)
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
    with contextlib.closing(_Loader(library)) as loader:
        for work in works:
            if work.path in own:
                for name, tensor in read_lazily(work, tally):
                    yield name, tensor.to(loader.device)
            elif work.names:
                tally.starts(work)
                tensors = read_with(_PACKAGE, work, lambda work=work: loader.read(work.path))  # type: ignore[misc]
                # From here on a failure goes up: what was given out can't be taken back.
                loader.may_fall_back = False
                yield from give_out(work, tensors, tally, buffer_bytes=work.file.size)


class _Loader:
    """The library's loader, with GPU-direct reads until they fail."""

    def __init__(self, library: Any) -> None:
        on_gpu = torch.cuda.is_available()
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        self.device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        self.may_fall_back = True
        self._library = library
        self._loader: Any = None
        self._direct = on_gpu and alone

    def read(self, path: str) -> dict[str, torch.Tensor]:
        """All tensors of a file, in one buffer of the library."""
        if not self._direct:
            return self._read(path)
        try:
            return self._read(path)
        except (RaywlError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self.may_fall_back:
                raise
            warnings.warn(
                f"GPU-direct reads don't work here, and weights are read without them: {error}", stacklevel=2
            )
        self.close()
        self._direct = False
        return self._read(path)

    def _read(self, path: str) -> dict[str, torch.Tensor]:
        if self._loader is None:
            self._loader = self._library.SafeTensorsFileLoader(
                self._library.SingleGroup(), self.device, nogds=not self._direct
            )
        loader: Any = self._loader
        loader.reset()
        loader.add_filenames({0: [path]})
        with contextlib.closing(loader.copy_files_to_device()) as buffer:
            # Tensors keep the buffer alive after it is closed.
            return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    def close(self) -> None:
        """Lets go of the library's loader."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
