"""The mapped files behind lazy weights, and what became of their memory."""

from __future__ import annotations

import mmap
import sys
import weakref
from bisect import bisect_right, insort

import torch

from raywl.checkpoint import Manifest, TensorEntry
from raywl.loading.lazy_sources import source_behind
from raywl.plan.copies import span_of
from raywl.readers import OpenFiles
from raywl.readers.files import max_open_files
from raywl.readers.memory import bytes_of
from raywl.readers.ways import map_privately

__all__ = ["Mappings"]


class Mappings:
    """Private mappings of a checkpoint's files, where these may be mapped.

    Args:
        manifest: The checkpoint.
        files: Its open files.
    """

    def __init__(self, manifest: Manifest, files: OpenFiles) -> None:
        self._files = files
        self._sizes = {file.name: file.size for file in manifest.files}
        self._mappings: dict[str, mmap.mmap | None] = {}
        self._spans: list[tuple[int, int, str]] = []
        self._max_mappings = max_open_files()

    def of(self, entry: TensorEntry) -> mmap.mmap | None:
        """The mapping of a tensor's file; `None` for files of other machines and empty tensors."""
        if not entry.nbytes:
            return None
        if entry.file not in self._mappings:
            # A mapping holds a descriptor. It lives on for as long as a weight of it does.
            if len(self._mappings) >= self._max_mappings:
                self._mappings.pop(next(iter(self._mappings)))
            self._mappings[entry.file] = self._map(entry.file)
        return self._mappings[entry.file]

    def _map(self, file: str) -> mmap.mmap | None:
        if not self._files.is_local(file):
            return None
        with self._files.using(file) as fd:
            mapping = map_privately(fd, self._sizes[file])
        first = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        span = (first, first + self._sizes[file], file)
        insort(self._spans, span)
        weakref.finalize(mapping, self._spans.remove, span).atexit = False
        return mapping

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a plain tensor holds, in memory of its own; `None` if it is in memory of its own already."""
        if not self._mappings or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            # No weight was handed out, so that none can have stayed; or it can't be one.
            return None
        if not tensor.numel():
            return None
        source = source_behind(tensor)
        if source is not None:
            return source.read(tensor.detach()).clone()
        if not self._spans:
            return None
        address = tensor.untyped_storage().data_ptr()
        at = bisect_right(self._spans, (address, sys.maxsize)) - 1
        if at < 0 or address >= self._spans[at][1]:
            return None
        # Not by touching the mapping: the file may have been cut.
        first, _, file = self._spans[at]
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        raw = torch.empty(span_of(tuple(tensor.shape), strides, tensor.itemsize), dtype=torch.uint8)
        self._files.read_into(file, tensor.data_ptr() - first, [bytes_of(raw)])
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)

    def close(self) -> None:
        """Lets go of the mappings that no tensor uses any more."""
        self._mappings.clear()
