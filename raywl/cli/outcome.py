"""From an error to an exit code, and to the fields that `--json` prints."""

from __future__ import annotations

from typing import Any

from raywl.errors import (
    CapacityError,
    CheckpointError,
    ClusterError,
    LockError,
    NotFoundError,
    SourceError,
)

__all__ = [
    "BUG",
    "CHECKPOINT",
    "CLUSTER",
    "DONE",
    "INTERRUPTED",
    "SOURCE",
    "USAGE",
    "UsageError",
    "error_fields",
    "exit_code",
]

DONE = 0
BUG = 1
USAGE = 2
CHECKPOINT = 3
SOURCE = 4
CLUSTER = 5
INTERRUPTED = 130


class UsageError(ValueError):
    """The command was called with arguments that mean nothing or can't be followed."""


def exit_code(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    # Order matters: several of raywl's errors are built-in ones too, a damaged file a ValueError.
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    if isinstance(error, NotFoundError) and error.local:
        return CHECKPOINT
    if isinstance(error, SourceError):
        return SOURCE
    if isinstance(error, LockError | CapacityError | ClusterError):
        return CLUSTER
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ValueError):
        return USAGE
    return BUG


def error_fields(error: BaseException) -> dict[str, Any]:
    """`class`, `message`, `exit_code`, and whatever else the error carries, as JSON values."""
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    fields = {"class": type(error).__name__, "message": message, "exit_code": exit_code(error)}
    carried = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {**{name: _json_value(value) for name, value in carried.items()}, **fields}


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json_value(item) for name, item in value.items()}
    return str(value)
