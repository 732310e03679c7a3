"""What an iterator has read: counted, shown where that was asked for, and remembered for the page cache."""

from __future__ import annotations

import logging
import os
import sys

from raywl.iterators.files import HasNames
from raywl.node.page_cache import record_checkpoint_files
from raywl.node.prefetch import local_rank_and_size
from raywl.progress import Progress, make_progress
from raywl.types import current_context

__all__ = ["Tally", "is_local_rank_0"]

_log = logging.getLogger(__name__)


def is_local_rank_0() -> bool:
    """Whether this process shows progress for those of its node.

    By the entered context, else `LOCAL_RANK`, else the rank in the default group of `torch.distributed`.
    """
    if current_context() is None and "LOCAL_WORLD_SIZE" not in os.environ:
        if "LOCAL_RANK" in os.environ:
            return os.environ["LOCAL_RANK"].strip() in ("", "0")
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return bool(distributed.get_rank() == 0)
    return local_rank_and_size()[0] == 0


class Tally:
    """Counts the bytes of tensors that were read from a checkpoint's files.

    Files that were begun are recorded, so that `release_checkpoint_page_cache` finds them.
    """

    def __init__(self, total_bytes: int, use_tqdm_on_load: bool | Progress, phase: str = "read") -> None:
        """
        Args:
            total_bytes: What will be read.
            use_tqdm_on_load: Whether the process of local rank 0 shows progress; or what it reports to.
            phase: What it is called there.
        """
        progress = make_progress(use_tqdm_on_load)
        self._progress = progress if is_local_rank_0() else None
        self._total_bytes, self._phase = total_bytes, phase
        self.bytes_read = 0
        """So far."""

    def starts(self, work: HasNames | str) -> None:
        """A file, or what is at a path, is about to be read."""
        record_checkpoint_files([work if isinstance(work, str) else work.path])

    def add(self, num_bytes: int) -> None:
        """Tensors of that many bytes were read. To be called by the thread that iterates."""
        self.bytes_read += num_bytes
        if self._progress is not None:
            self._progress(self.bytes_read, self._total_bytes, self._phase)
