"""Where a checkpoint comes from."""

from raywl.sources.base import Source
from raywl.sources.hub import HubPin, HubSource
from raywl.sources.local import LocalSource
from raywl.sources.resolve import pin, resolve

__all__ = ["HubPin", "HubSource", "LocalSource", "Source", "pin", "resolve"]
