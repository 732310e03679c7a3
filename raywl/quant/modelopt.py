"""ModelOpt: fp8 with a scale for a matrix, an output or a block; 4-bit floats in groups; or all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raywl.quant.base import QuantizationConfig, layer_matches, names, one_of, take, whole
from raywl.quant.layouts import TensorLayout, channels, groups, packed, per_tensor

__all__ = ["ModelOptConfig", "ModelOptMixedConfig"]

_FP8 = "float8_e4m3fn"
_BLOCK = 128
_MIXED = "MIXED_PRECISION"


def _fp8(_: int) -> dict[str, TensorLayout]:
    return {"weight": TensorLayout(_FP8), "weight_scale": per_tensor(), "input_scale": per_tensor()}


def _fp8_channels(_: int) -> dict[str, TensorLayout]:
    return {"weight": TensorLayout(_FP8), "weight_scale": channels("float32")}


def _fp8_blocks(_: int) -> dict[str, TensorLayout]:
    # (outputs / 128, 1, inputs / 128, 1)
    scale = TensorLayout("float32", 0, 2, block_shape=(_BLOCK, _BLOCK))
    return {"weight": TensorLayout(_FP8), "weight_scale": scale}


def _nvfp4(group_size: int) -> dict[str, TensorLayout]:
    return {
        "weight": packed("uint8", 2, group_size),
        "weight_scale": groups(_FP8, group_size),
        "weight_scale_2": per_tensor(),
        "input_scale": per_tensor(),
    }


def _mxfp8(group_size: int) -> dict[str, TensorLayout]:
    return {"weight": TensorLayout(_FP8), "weight_scale": groups("uint8", group_size)}


_ALGORITHMS: dict[str, tuple[Callable[[int], dict[str, TensorLayout]], int]] = {
    "FP8": (_fp8, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (_fp8_channels, 0),
    "FP8_PB_WO": (_fp8_blocks, 0),
    "NVFP4": (_nvfp4, 16),
    "MXFP8": (_mxfp8, 32),
}
"""Algorithm to the tensors that it makes, given the group size, and the usual group size."""


@dataclass(frozen=True, slots=True)
class ModelOptConfig(QuantizationConfig):
    """One algorithm for all layers."""

    name: ClassVar[str] = "modelopt"

    quant_algo: str = "FP8"
    group_size: int = 0
    """Inputs that share a scale; 0 where there are no groups."""
    kv_cache_quant_algo: str | None = None
    exclude_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOptConfig:
        inner = _inner(cls.name, config)
        algorithm = _algorithm(cls.name, take(cls.name, inner, "quant_algo"))
        return cls(
            quant_algo=algorithm,
            group_size=_group_size(cls.name, algorithm, inner),
            kv_cache_quant_algo=_kv_cache(cls.name, inner),
            exclude_modules=_excluded(cls.name, inner),
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if layer_matches(layer, self.exclude_modules):
            return {}
        return _ALGORITHMS[self.quant_algo][0](self.group_size)


@dataclass(frozen=True, slots=True)
class ModelOptMixedConfig(QuantizationConfig):
    """An algorithm for each layer that is quantised."""

    name: ClassVar[str] = "modelopt_mixed"

    quantized_layers: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)
    """Name of a layer, or of a module around it, to algorithm and group size."""
    kv_cache_quant_algo: str | None = None
    exclude_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOptMixedConfig:
        inner = _inner(cls.name, config)
        one_of(cls.name, "quant_algo", take(cls.name, inner, "quant_algo", default=_MIXED), (_MIXED,))
        layers = take(cls.name, inner, "quantized_layers")
        if not isinstance(layers, Mapping):
            raise ValueError(f"{cls.name}: quantized_layers must map layers to values, got {layers!r}")
        found = {}
        for layer, values in layers.items():
            algorithm = _algorithm(f"{cls.name}: {layer}", take(f"{cls.name}: {layer}", values, "quant_algo"))
            found[layer] = algorithm, _group_size(f"{cls.name}: {layer}", algorithm, values)
        return cls(found, _kv_cache(cls.name, inner), _excluded(cls.name, inner))

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if layer_matches(layer, self.exclude_modules):
            return {}
        around = [name for name in self.quantized_layers if layer == name or layer.startswith(f"{name}.")]
        if not around:
            return {}
        algorithm, size = self.quantized_layers[max(around, key=len)]
        return _ALGORITHMS[algorithm][0](size)


def _inner(method: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`hf_quant_config.json` has the values one level down, `config.json` at the top."""
    inner = config.get("quantization", config)
    if not isinstance(inner, Mapping):
        raise ValueError(f"{method}: quantization must be an object, got {inner!r}")
    return inner


def _algorithm(method: str, value: Any) -> str:
    algorithm: str = one_of(method, "quant_algo", str(value).upper(), tuple(_ALGORITHMS))
    return algorithm


def _group_size(method: str, algorithm: str, config: Mapping[str, Any]) -> int:
    usual = _ALGORITHMS[algorithm][1]
    return whole(method, "group_size", take(method, config, "group_size", default=usual)) if usual else 0


def _kv_cache(method: str, config: Mapping[str, Any]) -> str | None:
    found = take(method, config, "kv_cache_quant_algo", default=None)
    return None if found is None else str(found)


def _excluded(method: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    return names(method, "exclude_modules", take(method, config, "exclude_modules", "ignore", default=None))
