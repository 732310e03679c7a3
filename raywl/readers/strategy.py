"""How files are read."""

from __future__ import annotations

__all__ = ["STRATEGIES", "check_strategy"]

STRATEGIES = ("auto", "buffered")
"""`buffered` is parallel `preadv` through the page cache; `auto` chooses it."""


def check_strategy(strategy: str | None) -> None:
    """Raises `ValueError`, with the list, for a word that is no strategy."""
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
