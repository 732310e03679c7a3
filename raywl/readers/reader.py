"""One load's reading: chooses how, says so, and reads."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

from raywl.checkpoint import Manifest
from raywl.pace import disk_pace
from raywl.plan import Read
from raywl.readers.choose import WARM, Choice, Facts, choose, num_threads_for
from raywl.readers.execute import execute, num_cores
from raywl.readers.facts import gather
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView
from raywl.readers.prefetching import prefetching
from raywl.readers.ways import Buffered, make_way
from raywl.timeline import Timeline

__all__ = ["Reader"]

_log = logging.getLogger(__name__)


class Reader:
    """Reads ranges of a checkpoint's files into memory, by a strategy.

    The life of one: reads before `reading` go by the strategy that was asked for, else through the page
    cache; `reading` chooses for what is read inside its block.

    Args:
        manifest: The checkpoint.
        files: Its open files.
        strategy: What was asked for; `None` and `"auto"` leave it to what is found.
        num_local_ranks: Ranks on this node that load at the same time.
        timeline: Takes what each read took.
    """

    word = "files"
    """What reports count its bytes by."""
    is_streamed = False
    """Whether bytes come when it is their turn, and only at a price before that."""

    def __init__(
        self,
        manifest: Manifest,
        files: OpenFiles,
        strategy: str | None,
        *,
        num_local_ranks: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        self.manifest, self.files = manifest, files
        self.num_threads = num_threads_for(num_cores(), num_local_ranks, warm=False)
        self.facts: Facts | None = None
        """What the choice rests on, once it was made."""
        self._asked, self._num_local_ranks = strategy, num_local_ranks
        self._timeline = timeline
        self._way: Buffered = make_way(strategy, files)
        self._choice: Choice | None = None
        self._pace = disk_pace(num_local_ranks)

    @property
    def notes(self) -> list[str]:
        """What was chosen, and why; what couldn't be done."""
        chosen = [] if self._choice is None or self._quiet else [self._choice.note]
        return [*chosen, *self._way.notes]

    @property
    def limit_bytes_per_s(self) -> float | None:
        """What the disk gave in a probe; `None` where there was none."""
        probe = None if self.facts is None else self.facts.probe
        return None if probe is None else max(probe.buffered_bytes_per_s, probe.direct_bytes_per_s or 0.0)

    @property
    def _quiet(self) -> bool:
        # What was asked for and done is no news.
        assert self._choice is not None
        return self._asked == self._choice.strategy != "prefetch" and not self._choice.random

    @contextlib.contextmanager
    def reading(self, reads: Sequence[Read], stacklevel: int = 3) -> Iterator[None]:
        """Chooses how the block's reads are made, and fills the page cache meanwhile if that is chosen.

        Args:
            reads: What the block reads, by file and offset.
            stacklevel: Of a warning about what goes against what was asked for.
        """
        if not reads:
            yield
            return
        self.facts = gather(self.manifest, self.files, reads, self._num_local_ranks, self._asked)
        choice = self._choice = choose(self.facts, self._asked)
        _log.info("%s", choice.note)
        for warning in choice.warnings:
            warnings.warn(warning, stacklevel=stacklevel)
        warm = (self.facts.resident or 0.0) >= WARM
        if warm:
            # The disk gives nothing then.
            self._pace = None
        self.num_threads = num_threads_for(num_cores(), self._num_local_ranks, warm)
        if choice.strategy != self._asked:
            self._way = make_way(choice.strategy, self.files)
        if choice.random:
            self.files.expect_random()
        with contextlib.ExitStack() as stack:
            stack.callback(self._way.close)
            # Reading ahead of reads that have to wait would only go round their pace.
            if choice.strategy == "prefetch" and self._pace is None:
                stack.enter_context(prefetching(self.manifest, reads))
            yield

    def execute(
        self,
        reads: Sequence[Read],
        targets: Mapping[str, ByteView],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Makes reads; see `raywl.readers.execute`."""
        execute(
            reads,
            self.files,
            targets,
            num_threads=self.num_threads,
            on_bytes=on_bytes,
            way=self._way,
            timeline=self._timeline,
            pace=self._pace,
        )
