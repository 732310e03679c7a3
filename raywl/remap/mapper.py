"""Rules that turn a checkpoint's names into a model's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

from raywl.errors import some_of

__all__ = ["AppliedRule", "WeightsMapper"]

T = TypeVar("T")
Rules = Mapping[str, str | None]
Replace = Callable[[str], str | None]


class AppliedRule(NamedTuple):
    """What one rule did to a name."""

    kind: str
    """`"regex"`, `"substr"`, `"prefix"` or `"suffix"`."""
    text: str
    """What the rule looks for."""
    before: str
    """The name that it was given."""
    after: str | None
    """What it made of it; `None` where it drops the name."""


@dataclass(frozen=True)
class WeightsMapper:
    """Renames weights by regular expressions, then substrings, then prefixes, then suffixes.

    Each rule of a kind is tried in the order given, and all that match apply. The value `None` drops
    the names that the rule matches. `a | b` has the rules of both; where both have one for the same
    text, `b` wins. The rules are taken up on first use: what is put into the dicts later isn't seen, and a
    rule that is no regular expression, or replaces by groups that it lacks, is a `ValueError` then.
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
    def _rules(self) -> list[tuple[str, str, str | None, Replace]]:
        # Partial functions and no closures, so that a mapper that was used can still be pickled.
        rules: list[tuple[str, str, str | None, Replace]] = []
        for text, new in self.orig_to_new_regex.items():
            rules.append(("regex", text, new, partial(_replace_regex, _compiled(text, new or ""), new or "")))
        for text, new in self.orig_to_new_substr.items():
            rules.append(("substr", text, new, partial(_replace_substr, text, new or "")))
        for text, new in self.orig_to_new_prefix.items():
            rules.append(("prefix", text, new, partial(_replace_prefix, text, new or "")))
        for text, new in self.orig_to_new_suffix.items():
            rules.append(("suffix", text, new, partial(_replace_suffix, text, new or "")))
        return rules

    def map_name(self, name: str) -> str | None:
        """The model's name for a checkpoint's, or `None` when a rule drops it."""
        for _, _, new, replace in self._rules:
            if (after := replace(name)) is not None:
                if new is None:
                    return None
                name = after
        return name

    _map_name = map_name

    def explain(self, name: str) -> tuple[AppliedRule, ...]:
        """The rules that `map_name` applies to a checkpoint's name, in their order.

        Args:
            name: A name of the checkpoint.

        Returns:
            Each rule with the name before and after it; the last one's `after` is the model's name. Empty
            when no rule matches and the name stays as it is.
        """
        applied = []
        for kind, text, new, replace in self._rules:
            if (after := replace(name)) is not None:
                applied.append(AppliedRule(kind, text, name, None if new is None else after))
                if new is None:
                    break
                name = after
        return tuple(applied)

    def apply(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The pairs under their new names, without those that are dropped."""
        for name, weight in weights:
            if (new := self.map_name(name)) is not None:
                yield new, weight

    def apply_list(self, names: Iterable[str]) -> list[str]:
        """The new names, without those that are dropped."""
        return [new for name in names if (new := self.map_name(name)) is not None]

    def apply_dict(self, values: Mapping[str, T]) -> dict[str, T]:
        """The mapping under its new names, without those that are dropped.

        Names that become one, of which only the last is kept, are a warning.
        """
        renamed: dict[str, T] = {}
        came_from: dict[str, str] = {}
        lost = []
        for name, value in values.items():
            if (new := self.map_name(name)) is not None:
                if new in renamed:
                    lost.append(f"{came_from[new]} and {name} become {new}")
                renamed[new], came_from[new] = value, name
        if lost:
            warnings.warn(f"{len(lost)} names are lost to others: {some_of(lost, 4)}", stacklevel=2)
        return renamed


def _compiled(text: str, new: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
        # Compiles the replacement, too, which otherwise fails at the first name that matches.
        pattern.sub(new, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"rule {text!r} to {new!r}: {error}") from error
    return pattern


# Each gives the new name, or `None` where the rule doesn't match.


def _replace_regex(pattern: re.Pattern[str], new: str, name: str) -> str | None:
    after, times = pattern.subn(new, name)
    return after if times else None


def _replace_substr(text: str, new: str, name: str) -> str | None:
    return name.replace(text, new, 1) if text in name else None


def _replace_prefix(text: str, new: str, name: str) -> str | None:
    return new + name.removeprefix(text) if name.startswith(text) else None


def _replace_suffix(text: str, new: str, name: str) -> str | None:
    return name.removesuffix(text) + new if name.endswith(text) else None
