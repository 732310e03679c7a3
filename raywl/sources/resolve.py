"""From what the user wrote to the source that it means."""

from __future__ import annotations

import os

from raywl.sources.base import Source
from raywl.sources.local import LocalSource

__all__ = ["resolve"]


def resolve(ref: str | os.PathLike[str], *, subfolder: str | None = None) -> Source:
    """The source that `ref` names: a folder, or one safetensors file, of this machine.

    Raises:
        NotFoundError: There is no such path.
        SourceError: It can't be read.
    """
    return LocalSource.open(os.fsdecode(ref), subfolder)
