"""Which chunk a node asks for next, and whom."""

from __future__ import annotations

import heapq
from collections import Counter

from raywl.coordination import NOBODY, Route

__all__ = ["ChunkQueue"]

_DUTY = -1
"""In place of a provider: what this node passes on."""


class ChunkQueue:
    """The chunks that a node is to get from others. Not safe for threads; the time comes from the caller.

    Chunks are asked for in the order of their numbers, as their sources fetch them, of providers in turn.
    What others are to get through this node comes first, and the last free slot is for that alone, so that
    two nodes never wait for each other with all their slots.
    """

    def __init__(self, num_slots: int) -> None:
        """Args:
        num_slots: How many chunks may be asked for at once.
        """
        self.num_slots = num_slots
        self.me = NOBODY
        """This node's index."""
        self._providers: dict[int, int] = {}
        """Chunk to whom it is asked of, of all that are lacking."""
        self._duties: set[int] = set()
        """Those that this node passes on for their source."""
        self._waiting: dict[int, _Line] = {_DUTY: _Line()}
        """Provider to its chunks; what isn't so any more is skipped when met."""
        self._turn: list[int] = []
        """Providers that have chunks waiting."""
        self._later: list[tuple[float, int]] = []
        self._under_way: dict[int, int] = {}
        self._busy: Counter[int] = Counter()
        """Provider to how many questions to it are under way."""
        self._since_s: dict[int, float] = {}
        """Chunk to when it was first asked for, of whom it is asked now."""

    def __len__(self) -> int:
        return len(self._providers)

    def add(self, route: Route) -> None:
        """A chunk comes, or comes now, by a route; nothing happens to a question under way."""
        provider = route.provider(self.me)
        self._duties.discard(route.chunk)
        if provider == NOBODY:
            self.drop(route.chunk)
            return
        if route.relay == self.me:
            self._duties.add(route.chunk)
        if self._providers.get(route.chunk) != provider:
            self._since_s.pop(route.chunk, None)
        self._providers[route.chunk] = provider
        self._push(route.chunk)

    def provider_of(self, chunk: int) -> int:
        """Whom it is asked of; `NOBODY` when it isn't asked for."""
        return self._providers.get(chunk, NOBODY)

    def drop(self, chunk: int) -> None:
        """It is here."""
        self._providers.pop(chunk, None)
        self._duties.discard(chunk)
        self._since_s.pop(chunk, None)

    def drop_all(self, has: int) -> None:
        """All of a set are here."""
        for chunk in [chunk for chunk in self._providers if has >> chunk & 1]:
            self.drop(chunk)

    def is_under_way(self, chunk: int) -> bool:
        """Whether it has been asked for and not answered."""
        return chunk in self._under_way

    def next(self, now_s: float) -> tuple[int, int] | None:
        """The next chunk to ask for and whom, `None` when there is nothing to ask now.

        `done` or `again` must follow.
        """
        while self._later and self._later[0][0] <= now_s:
            self._push(heapq.heappop(self._later)[1])
        num_free = self.num_slots - len(self._under_way)
        if num_free <= 0:
            return None
        most = max(2, -(-self.num_slots // max(1, len(self._turn))))
        duty = self._head(_DUTY)
        if duty is not None:
            if self._busy[self._providers[duty]] < most:
                return self._take(_DUTY, now_s)
            num_free -= 1
        for _ in range(len(self._turn) if num_free else 0):
            provider = self._turn.pop(0)
            if self._head(provider) is None:
                del self._waiting[provider]
                continue
            self._turn.append(provider)
            if self._busy[provider] < most:
                return self._take(provider, now_s)
        return None

    def done(self, chunk: int) -> None:
        """It came."""
        self._answered(chunk)
        self.drop(chunk)

    def again(self, chunk: int, now_s: float, pause_s: float) -> float:
        """It didn't come: it is asked for again after a pause.

        Returns:
            How long it has been asked for in vain, of whom it is asked now.
        """
        self._answered(chunk)
        if chunk not in self._providers:
            return 0.0
        heapq.heappush(self._later, (now_s + pause_s, chunk))
        return now_s - self._since_s.setdefault(chunk, now_s)

    def told(self, chunk: int) -> None:
        """The coordinator knows that it is asked for in vain: the time counts from now on."""
        self._since_s.pop(chunk, None)

    def wait_s(self, now_s: float, at_most_s: float) -> float:
        """How long until there may be something to ask, if nobody says anything meanwhile."""
        return max(0.0, min(at_most_s, self._later[0][0] - now_s)) if self._later else at_most_s

    def _push(self, chunk: int) -> None:
        provider = self._providers.get(chunk)
        if provider is None or chunk in self._under_way:
            return
        line = _DUTY if chunk in self._duties else provider
        if line not in self._waiting:
            self._waiting[line] = _Line()
            self._turn.append(line)
        self._waiting[line].push(chunk)

    def _head(self, line: int) -> int | None:
        """The first chunk of a line, if there is one."""
        waiting = self._waiting[line]
        while (chunk := waiting.first) is not None:
            wanted = chunk in self._duties if line == _DUTY else self._providers.get(chunk) == line
            if wanted and chunk in self._providers and chunk not in self._under_way:
                return chunk
            waiting.pop()
        return None

    def _take(self, line: int, now_s: float) -> tuple[int, int]:
        chunk = self._waiting[line].pop()
        provider = self._under_way[chunk] = self._providers[chunk]
        self._busy[provider] += 1
        self._since_s.setdefault(chunk, now_s)
        return chunk, provider

    def _answered(self, chunk: int) -> None:
        provider = self._under_way.pop(chunk, None)
        if provider is not None:
            self._busy[provider] -= 1


class _Line:
    """Chunks, lowest first, each once."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._known: set[int] = set()

    @property
    def first(self) -> int | None:
        return self._heap[0] if self._heap else None

    def push(self, chunk: int) -> None:
        if chunk not in self._known:
            self._known.add(chunk)
            heapq.heappush(self._heap, chunk)

    def pop(self) -> int:
        chunk = heapq.heappop(self._heap)
        self._known.discard(chunk)
        return chunk
