"""Which class reads the config of which quantisation method; users add their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

from raywl.quant.bitsandbytes import BitsAndBytesConfig
from raywl.quant.compressed_tensors import CompressedTensorsConfig
from raywl.quant.fp8 import Fp8Config
from raywl.quant.gptq import AWQConfig, GPTQConfig
from raywl.quant.modelopt import ModelOptConfig, ModelOptMixedConfig
from raywl.quant.mxfp4 import Mxfp4Config

__all__ = ["get_quantization_config", "quantization_methods", "register_quantization_config"]

_Class = TypeVar("_Class", bound=type)

_classes: dict[str, Any] = {
    "awq": AWQConfig,
    "awq_marlin": AWQConfig,
    "bitsandbytes": BitsAndBytesConfig,
    "compressed-tensors": CompressedTensorsConfig,
    "fp8": Fp8Config,
    "gptq": GPTQConfig,
    "gptq_marlin": GPTQConfig,
    "modelopt": ModelOptConfig,
    "modelopt_fp4": ModelOptConfig,
    "modelopt_mixed": ModelOptMixedConfig,
    "modelopt_mxfp8": ModelOptConfig,
    "mxfp4": Mxfp4Config,
}


@overload
def register_quantization_config(name: str, cls: None = None) -> Callable[[_Class], _Class]: ...
@overload
def register_quantization_config(name: str, cls: _Class) -> _Class: ...
def register_quantization_config(name: str, cls: Any = None) -> Any:
    """Makes a class the reader of a method's configs; without `cls`, as a decorator of the class.

    Args:
        name: The method, as `quantization` of a model's config names it.
        cls: Has `from_config(dict)`, and `get_config_filenames()` for configs in files of their own. Where it
            also has `from_config_file(path)` or `from_config_dict_json(text)`, overrides may use them.

    Returns:
        The class.

    Raises:
        TypeError: `cls` is no class.
    """
    if cls is None:
        return lambda found: register_quantization_config(name, found)
    if not isinstance(cls, type):
        raise TypeError(f"the config of {name!r} must be a class, not {cls!r}")
    before = _classes.get(name)
    if before not in (None, cls):
        warnings.warn(f"{name!r} was read by {before!r}, and is by {cls!r} from now on", stacklevel=2)
    _classes[name] = cls
    return cls


def get_quantization_config(name: str) -> Any:
    """The class that reads a method's configs.

    Raises:
        ValueError: There is none.
    """
    if name not in _classes:
        raise ValueError(
            f"unknown quantization {name!r}; known are {', '.join(quantization_methods())} "
            "(register_quantization_config adds others)"
        )
    return _classes[name]


def quantization_methods() -> list[str]:
    """Names of all methods that there is a reader for."""
    return sorted(_classes)
