"""Rules that turn a checkpoint's names into a model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

__all__ = ["WeightsMapper"]

T = TypeVar("T")
Rules = Mapping[str, str | None]


@dataclass(frozen=True)
class WeightsMapper:
    """Renames weights by regular expressions, then substrings, then prefixes, then suffixes.

    Each rule of a kind is tried in the order given, and all that match apply. The value `None` drops
    the names that the rule matches. `a | b` has the rules of both; where both have one for the same
    text, `b` wins.
    """

    orig_to_new_regex: Rules = field(default_factory=dict)
    """Regular expressions, each replaced wherever it matches."""
    orig_to_new_substr: Rules = field(default_factory=dict)
    """Texts, each replaced where it first stands."""
    orig_to_new_prefix: Rules = field(default_factory=dict)
    """Beginnings of names."""
    orig_to_new_suffix: Rules = field(default_factory=dict)
    """Ends of names."""

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return WeightsMapper(
            {**self.orig_to_new_regex, **other.orig_to_new_regex},
            {**self.orig_to_new_substr, **other.orig_to_new_substr},
            {**self.orig_to_new_prefix, **other.orig_to_new_prefix},
            {**self.orig_to_new_suffix, **other.orig_to_new_suffix},
        )

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str | None]]:
        return [(re.compile(text), new) for text, new in self.orig_to_new_regex.items()]

    def map_name(self, name: str) -> str | None:
        """The model's name for a checkpoint's, or `None` when a rule drops it."""
        for pattern, new in self._patterns:
            if pattern.search(name):
                if new is None:
                    return None
                name = pattern.sub(new, name)
        for text, new in self.orig_to_new_substr.items():
            if text in name:
                if new is None:
                    return None
                name = name.replace(text, new, 1)
        for text, new in self.orig_to_new_prefix.items():
            if name.startswith(text):
                if new is None:
                    return None
                name = new + name.removeprefix(text)
        for text, new in self.orig_to_new_suffix.items():
            if name.endswith(text):
                if new is None:
                    return None
                name = name.removesuffix(text) + new
        return name

    _map_name = map_name

    def apply(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The pairs under their new names, without those that are dropped."""
        for name, weight in weights:
            if (new := self.map_name(name)) is not None:
                yield new, weight

    def apply_list(self, names: Iterable[str]) -> list[str]:
        """The new names, without those that are dropped."""
        return [new for name in names if (new := self.map_name(name)) is not None]

    def apply_dict(self, values: Mapping[str, T]) -> dict[str, T]:
        """The mapping under its new names, without those that are dropped."""
        return dict(self.apply(values.items()))
