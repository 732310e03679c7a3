"""fp8: weights of 8-bit floats, with one scale for each block, or for the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raywl.quant.base import (
    QuantizationConfig,
    block_shape,
    layer_matches,
    names,
    one_of,
    take,
)
from raywl.quant.layouts import TensorLayout, blocks, per_tensor

__all__ = ["Fp8Config"]

_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class Fp8Config(QuantizationConfig):
    """`weight`, and `weight_scale_inv` of blocks or `weight_scale` of the whole matrix."""

    name: ClassVar[str] = "fp8"

    is_checkpoint_fp8_serialized: bool = False
    """Whether the checkpoint holds 8-bit weights; else they are quantised after loading."""
    activation_scheme: str = "dynamic"
    """`"static"`: the checkpoint has an `input_scale`."""
    weight_block_size: tuple[int, int] | None = None
    """`(outputs, inputs)` of a block; `None`: one scale for the whole matrix."""
    ignored_layers: tuple[str, ...] = ()
    weight_dtype: str = "float8_e4m3fn"
    scale_dtype: str | None = "float32"
    """`None`: powers of two, which checkpoints store as they like."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Fp8Config:
        method = str(take("fp8", config, "quant_method", default="fp8"))
        scheme = one_of(
            method,
            "activation_scheme",
            take(method, config, "activation_scheme", default="dynamic"),
            ("static", "dynamic"),
        )
        size = take(method, config, "weight_block_size", default=None)
        if size is not None and scheme != "dynamic":
            raise ValueError(f"{method}: blocks have a dynamic activation_scheme, got {scheme!r}")
        is_ue8m0 = take(method, config, "scale_fmt", default=None) == "ue8m0"
        fmt = one_of(method, "fmt", take(method, config, "fmt", default="e4m3"), tuple(_DTYPES))
        ignored = take(method, config, "ignored_layers", "modules_to_not_convert", default=None)
        return cls(
            is_checkpoint_fp8_serialized="fp8" in method,
            activation_scheme=scheme,
            weight_block_size=None if size is None else block_shape(method, size),
            ignored_layers=names(method, "ignored_layers", ignored),
            weight_dtype=_DTYPES[fmt],
            scale_dtype=None if is_ue8m0 else "float32",
        )

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if not self.is_checkpoint_fp8_serialized or layer_matches(layer, self.ignored_layers):
            return {}
        found = {"weight": TensorLayout(self.weight_dtype)}
        if self.weight_block_size is not None:
            return found | {"weight_scale_inv": blocks(self.scale_dtype, self.weight_block_size)}
        found["weight_scale"] = per_tensor(self.scale_dtype)
        if self.activation_scheme == "static":
            found["input_scale"] = per_tensor()
        return found
