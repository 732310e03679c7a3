"""Loading into the parameters of one rank, without Ray."""

from raywl.loading.load import load_into

__all__ = ["load_into"]
