"""Where a checkpoint comes from."""

from raywl.sources.base import Source
from raywl.sources.local import LocalSource
from raywl.sources.resolve import resolve

__all__ = ["LocalSource", "Source", "resolve"]
