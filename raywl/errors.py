"""The errors that raywl raises.

    RaywlError
    ├── CheckpointError              damaged, incomplete or not fitting
    │   ├── CorruptFileError         (ValueError)         a file contradicts itself or its size
    │   ├── MissingFileError         (FileNotFoundError)  files that the index names are absent
    │   ├── MissingWeightsError      (ValueError)         parameters that nothing sets
    │   └── ShapeMismatchError       (ValueError, AssertionError)
    ├── SourceError                  (OSError)            the place that a checkpoint comes from
    │   ├── AuthError                (PermissionError)
    │   ├── NotFoundError            (FileNotFoundError)
    │   └── OfflineError             (ConnectionError)
    ├── LockError                    (OSError)
    ├── CapacityError                (RuntimeError)       too little of a resource, with the numbers
    └── ClusterError                 (RuntimeError)
        ├── NodeLostError
        ├── LeaseLostError
        └── StagingTimeout           (TimeoutError)

Each class keeps what it was given as attributes, and pickles with all of them: `except` works the
same for an error that was raised in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

__all__ = [
    "AuthError",
    "CapacityError",
    "CheckpointError",
    "ClusterError",
    "CorruptFileError",
    "LeaseLostError",
    "LockError",
    "MissingFileError",
    "MissingWeightsError",
    "NodeLostError",
    "NotFoundError",
    "OfflineError",
    "RaywlError",
    "ShapeMismatchError",
    "SourceError",
    "StagingTimeout",
]

_SHOWN = 12


def some_of(names: Sequence[str], limit: int = _SHOWN) -> str:
    """The first `limit` names and how many more there are, for messages."""
    shown = ", ".join(map(str, names[:limit]))
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def _rebuild(cls: type[RaywlError], args: tuple[Any, ...], state: dict[str, Any]) -> RaywlError:
    # OSError's own __reduce__ loses constructor arguments, so the object is filled in by hand. The first
    # `__new__` of the bases isn't always the one that Python lets make a class with OSError among them.
    make = OSError.__new__ if issubclass(cls, OSError) else Exception.__new__
    error: RaywlError = make(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class RaywlError(Exception):
    """Root of all errors that raywl raises on purpose."""

    where: str | None = None
    """The rank and node that raised it (`rank 1 on node 10.0.0.2`), set by the cluster layer."""
    partly_loaded: bool = False
    """Whether a model's parameters were written to before it was raised."""

    def at(self, where: str) -> Self:
        """Note the rank and node that it happened on; returns the error itself."""
        self.where = where
        return self

    def _message(self) -> str:
        return ": ".join(str(arg) for arg in self.args if arg is not None)

    def __str__(self) -> str:
        message = self._message()
        if self.partly_loaded:
            message += " (the model is partly loaded)"
        return message if self.where is None else f"[{self.where}] {message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class CheckpointError(RaywlError):
    """A checkpoint is damaged, incomplete, or not what was asked for."""

    def __init__(self, path: str | None, tensor: str | None, reason: str) -> None:
        super().__init__(path, tensor, reason)
        self.path, self.tensor, self.reason = path, tensor, reason

    def _message(self) -> str:
        parts = [self.path, None if self.tensor is None else f"tensor {self.tensor!r}", self.reason]
        return ": ".join(part for part in parts if part is not None)


class CorruptFileError(CheckpointError, ValueError):
    """A checkpoint file contradicts itself or its size; no tensor was read from it."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """Files that belong to a checkpoint are absent; `files` lists them."""

    def __init__(self, path: str, files: Sequence[str], reason: str) -> None:
        RaywlError.__init__(self, path, tuple(files), reason)
        self.path, self.files, self.reason = path, tuple(files), reason
        self.tensor = None

    def _message(self) -> str:
        return f"{self.path}: {self.reason}: {some_of(self.files)}"


class MissingWeightsError(CheckpointError, ValueError):
    """Parameters or buffers that the checkpoint leaves unset; `names` lists them."""

    def __init__(self, path: str | None, names: Sequence[str], reason: str) -> None:
        RaywlError.__init__(self, path, tuple(names), reason)
        self.path, self.names, self.reason = path, tuple(names), reason
        self.tensor = self.names[0] if self.names else None

    def _message(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        return f"{where}{self.reason}: {some_of(self.names)}"


class ShapeMismatchError(CheckpointError, ValueError, AssertionError):
    """A tensor's shape is not the one that its destination has."""

    def __init__(
        self, name: str | None, expected: Sequence[int], got: Sequence[int], reason: str = "shape differs"
    ) -> None:
        RaywlError.__init__(self, name, tuple(expected), tuple(got), reason)
        self.expected, self.got, self.reason = tuple(expected), tuple(got), reason
        self.path, self.tensor = None, name

    def _message(self) -> str:
        name = "" if self.tensor is None else f"{self.tensor}: "
        return f"{name}{self.reason}: expected {list(self.expected)}, got {list(self.got)}"


class SourceError(RaywlError, OSError):
    """The place that a checkpoint comes from refused, failed, or can't be reached."""

    def __init__(
        self, ref: str, reason: str, *, endpoint: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(ref, reason)
        self.ref, self.reason, self.endpoint, self.status = ref, reason, endpoint, status

    def _message(self) -> str:
        detail = [f"endpoint {self.endpoint}"] if self.endpoint else []
        detail += [f"status {self.status}"] if self.status is not None else []
        return f"{self.ref}: {self.reason}" + (f" ({', '.join(detail)})" if detail else "")


class AuthError(SourceError, PermissionError):
    """The source wants credentials that are missing, wrong, or not enough."""


class NotFoundError(SourceError, FileNotFoundError):
    """There is no such path, repository, revision, bucket or key."""

    def __init__(
        self,
        ref: str,
        reason: str,
        *,
        endpoint: str | None = None,
        status: int | None = None,
        local: bool = False,
    ) -> None:
        super().__init__(ref, reason, endpoint=endpoint, status=status)
        self.local = local
        """Whether it was looked for on this machine's disk alone."""


class OfflineError(SourceError, ConnectionError):
    """Working offline, and the cache doesn't hold what is needed."""


class LockError(RaywlError, OSError):
    """A lock can't be had: who holds it, since when, and the remedy are in the message."""

    def __init__(self, path: str, reason: str, *, holder: str | None = None) -> None:
        super().__init__(path, reason)
        self.path, self.reason, self.holder = path, reason, holder

    def _message(self) -> str:
        held = "" if self.holder is None else f" (held by {self.holder})"
        return f"{self.path}: {self.reason}{held}"


class CapacityError(RaywlError, RuntimeError):
    """Too little of a resource for what was asked; `needed` and `available` are in `unit`."""

    def __init__(
        self,
        resource: str,
        needed: float,
        available: float,
        reason: str,
        *,
        unit: str = "",
    ) -> None:
        super().__init__(resource, needed, available, reason)
        self.resource, self.needed, self.available = resource, needed, available
        self.reason, self.unit = reason, unit

    def _message(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"not enough {self.resource}: {self.needed:.15g}{unit} needed, "
            f"{self.available:.15g}{unit} available; {self.reason}"
        )


class ClusterError(RaywlError, RuntimeError):
    """Something on the Ray cluster failed; `node` and `rank` say where, when known."""

    def __init__(self, reason: str, *, node: str | None = None, rank: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node, self.rank = reason, node, rank

    def _message(self) -> str:
        # `where`, which is printed in front, names rank and node already.
        if self.where is not None:
            return self.reason
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        parts += [] if self.node is None else [f"node {self.node}"]
        return f"{self.reason} ({', '.join(parts)})" if parts else self.reason


class NodeLostError(ClusterError):
    """A node, or the process that worked there, died."""


class LeaseLostError(ClusterError):
    """A lease ran out or passed to another holder before its work was done."""


class StagingTimeout(ClusterError, TimeoutError):
    """A wait on other nodes passed its deadline."""
