"""Errors on their way from a rank or a node to the caller."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from raywl.errors import ClusterError, NodeLostError, RaywlError

__all__ = ["Place", "UsageError", "as_raywl_error", "most_telling", "usage_as_value_error"]

_LOADING = ("load_into", "check_reload", "reload_into")


class UsageError(ClusterError, ValueError):
    """Arguments that only a rank could find impossible: a cut that doesn't divide, an unknown style.

    Callers get the plain `ValueError` that `load_into` raises in their own process.
    """


@contextlib.contextmanager
def usage_as_value_error() -> Iterator[None]:
    """Lets a rank's complaint about arguments reach the caller as a `ValueError`."""
    try:
        yield
    except UsageError as error:
        told = ValueError(str(error))
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where something runs, for messages."""

    node: str
    """What the node is called: its address, and its id where several share one."""
    rank: int | None = None

    def __str__(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} on node {self.node}"


def as_raywl_error(error: BaseException, place: Place, doing: str) -> RaywlError:
    """The error to send to the caller: raywl's own as it is, any other as a `ClusterError`; with its place.

    The causes and the remote traceback travel as notes, since neither pickles.

    Args:
        error: What was raised.
        place: Where.
        doing: What raised it: `model_factory`.
    """
    if isinstance(error, RaywlError):
        told = error if error.where is not None else error.at(str(place))
        cause = error.__cause__
        if cause is not None:
            told.add_note(f"caused by {type(cause).__name__}: {cause}")
        return told
    kind = UsageError if doing in _LOADING and isinstance(error, ValueError) else ClusterError
    told = kind(f"{doing} raised {type(error).__name__}: {error}", node=place.node, rank=place.rank).at(
        str(place)
    )
    told.add_note(f"The traceback on {place}:\n" + "".join(traceback.format_exception(error)).rstrip("\n"))
    return told


def most_telling(failures: Mapping[int, RaywlError]) -> RaywlError:
    """Of the failures of several ranks, the one that is the cause rather than a consequence.

    A rank that dies takes its peers' collectives with it, so a lost rank comes before the errors of
    the ranks that waited for it; and an error that raywl itself raised says more than either.
    """
    ranked = sorted(failures.items(), key=lambda item: (_weight(item[1]), item[0]))
    chosen = ranked[0][1]
    others = [str(error) for _, error in ranked[1:]]
    for other in _few(others):
        chosen.add_note(f"also: {other}")
    return chosen


def _weight(error: RaywlError) -> int:
    if not isinstance(error, ClusterError):
        return 0
    return 1 if isinstance(error, NodeLostError) else 2


def _few(texts: Iterable[str]) -> list[str]:
    return [text if len(text) <= 300 else text[:300] + " ..." for text in list(texts)[:3]]
