"""A hub on 127.0.0.1 for the configs of repositories."""

from tests.sources.conftest import client, hub

__all__ = ["client", "hub"]
