"""What every quant config is, and how the values of a config file are read."""

from __future__ import annotations

import abc
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from raywl.quant.layouts import TensorLayout

__all__ = ["QuantizationConfig", "layer_matches"]

_REQUIRED: Any = object()


class QuantizationConfig(abc.ABC):
    """What a checkpoint's quantisation says about its tensors: block and group sizes, packing, dtypes.

    Classes that users register need not inherit from it; they have `from_config` and `get_config_filenames`.
    """

    __slots__ = ()

    name: ClassVar[str]
    """The method's name, as configs have it."""

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The config that a JSON object describes.

        Raises:
            ValueError: A value is missing, or is one that it can't be.
        """

    @abc.abstractmethod
    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        """The tensors that stand for the weight of a linear layer, by the last part of their names.

        Args:
            layer: The layer's name, without `.weight`: some configs treat layers differently.

        Returns:
            Empty for a layer that isn't quantised in the checkpoint.
        """

    @staticmethod
    def get_config_filenames() -> list[str]:
        """What the names of files end in that hold such a config, apart from `config.json`."""
        return []

    def get_name(self) -> str:
        """The method's name."""
        return self.name


def layer_matches(layer: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns means a layer.

    A pattern is `re:` and a regular expression that the name begins with; a text with `*` or `?` that
    stands for the whole name; or the name of the layer, of a module around it, or the last part of its name.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], layer):
                return True
        elif "*" in pattern or "?" in pattern:
            if fnmatch.fnmatchcase(layer, pattern) or fnmatch.fnmatchcase(layer, f"{pattern}.*"):
                return True
        elif layer == pattern or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}"):
            return True
    return False


def take(method: str, config: Mapping[str, Any], *keys: str, default: Any = _REQUIRED) -> Any:
    """The value of the first key that there is; `None` counts as none, where there is a default."""
    for key in keys:
        if key in config and (config[key] is not None or default is _REQUIRED):
            return config[key]
    if default is _REQUIRED:
        raise ValueError(
            f"{method}: the quantization config has no {' or '.join(keys)}, but {sorted(config)}"
        )
    return default


def whole(method: str, key: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{method}: {key} must be a whole number of at least {least}, got {value!r}")
    return value


def size_of_group(method: str, value: Any) -> int:
    """A group's size, or -1 for all inputs."""
    return -1 if value == -1 and not isinstance(value, bool) else whole(method, "group_size", value)


def flag(method: str, key: str, value: Any) -> bool:
    """A bool, and no text that looks like one."""
    if not isinstance(value, bool):
        raise ValueError(f"{method}: {key} must be true or false, got {value!r}")
    return value


def block_shape(method: str, value: Any) -> tuple[int, int]:
    """Two sizes, `(outputs, inputs)`."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{method}: a block's size must be two numbers, (outputs, inputs), got {value!r}")
    rows, columns = (whole(method, "a block's size", size) for size in value)
    return rows, columns


def names(method: str, key: str, value: Any) -> tuple[str, ...]:
    """A list of names; `None` for an empty one."""
    if value is None:
        return ()
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{method}: {key} must be a list of names, got {value!r}")
    return tuple(value)


def one_of(method: str, key: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{method}: {key} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value
