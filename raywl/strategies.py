"""How files are read."""

from __future__ import annotations

__all__ = ["STRATEGIES", "check_strategy"]

STRATEGIES = ("auto", "buffered", "prefetch")
"""`buffered` is parallel `preadv` through the page cache; `prefetch` the same, while other threads fill
the page cache ahead of it; `auto` takes the second for network file systems, the first elsewhere."""


def check_strategy(strategy: str | None) -> None:
    """Raises `ValueError`, with the list, for a word that is no strategy."""
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
