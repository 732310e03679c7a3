"""Where a checkpoint comes from."""

from raywl.sources.base import RemoteFile, Source
from raywl.sources.cached import CachedSource
from raywl.sources.hub import HubPin
from raywl.sources.hub_source import HubSource
from raywl.sources.local import LocalSource
from raywl.sources.modelscope_pin import ModelScopePin
from raywl.sources.modelscope_source import ModelScopeSource
from raywl.sources.resolve import Pin, local_path, pin, resolve
from raywl.sources.store import StorePin, StoreSource, shown_url

__all__ = [
    "CachedSource",
    "HubPin",
    "HubSource",
    "LocalSource",
    "ModelScopePin",
    "ModelScopeSource",
    "Pin",
    "RemoteFile",
    "Source",
    "StorePin",
    "StoreSource",
    "local_path",
    "pin",
    "resolve",
    "shown_url",
]
