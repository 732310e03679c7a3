"""What the running context says about the weights that it works on; threads and tasks have their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "are_weights_already_processed",
    "direct_reload",
    "is_direct_reload",
    "is_trial",
    "trial",
    "weights_already_processed",
]

_PROCESSED: ContextVar[int] = ContextVar("raywl_weights_already_processed", default=0)
_DIRECT: ContextVar[int] = ContextVar("raywl_direct_reload", default=0)
_TRIAL: ContextVar[int] = ContextVar("raywl_trial", default=0)


@contextmanager
def _within(depth: ContextVar[int]) -> Iterator[None]:
    # A count and no token: a generator may be closed in another context than it was entered in.
    depth.set(depth.get() + 1)
    try:
        yield
    finally:
        depth.set(depth.get() - 1)


@contextmanager
def weights_already_processed() -> Iterator[None]:
    """Says that weights are in their runtime format already, so that post-processing leaves them alone.

    Nests, and holds for this context alone, not for other threads.
    """
    with _within(_PROCESSED):
        yield


def are_weights_already_processed() -> bool:
    """Whether `weights_already_processed()` is active here."""
    return _PROCESSED.get() > 0


@contextmanager
def direct_reload() -> Iterator[None]:
    """Lets `replace_parameter` use the whole storage of the old parameter, not only the bytes it spans.

    For reloads that write the checkpoint's format into storages that hold the runtime format, where that
    is the smaller one. Other tensors over the same storage are overwritten. Nests, and holds for this
    context alone.
    """
    with _within(_DIRECT):
        yield


def is_direct_reload() -> bool:
    """Whether `direct_reload()` is active here."""
    return _DIRECT.get() > 0


@contextmanager
def trial() -> Iterator[None]:
    """Says that loaders run on stand-ins for the parameters: what they compute has no values."""
    with _within(_TRIAL):
        yield


def is_trial() -> bool:
    """Whether `trial()` is active here."""
    return _TRIAL.get() > 0
