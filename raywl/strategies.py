"""How files are read."""

from __future__ import annotations

__all__ = ["STRATEGIES", "check_strategy"]

STRATEGIES = ("auto", "buffered", "direct", "mmap", "prefetch")
"""All of them bring the same bytes.

`buffered` is parallel `preadv` through the page cache. `direct` reads past the page cache (`O_DIRECT`),
where the file system has that. `mmap` copies out of a mapping, on file systems of this machine only.
`prefetch` is `buffered`, while other threads fill the page cache ahead of it. `auto` looks at the file
system, at what is in the page cache, at the memory that is left, at what other ranks of the node want, and,
before large loads, at the disk, and says what it chose and why.
"""


def check_strategy(strategy: str | None) -> None:
    """Raises `ValueError`, with the list, for a word that is no strategy."""
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
