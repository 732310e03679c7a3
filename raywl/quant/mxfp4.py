"""mxfp4: 4-bit floats in blocks of 32 inputs with a common exponent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raywl.quant.base import QuantizationConfig, layer_matches, names, take
from raywl.quant.layouts import TensorLayout, groups

__all__ = ["Mxfp4Config"]

_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Config(QuantizationConfig):
    """`blocks` `(outputs, inputs / 32, 16)`, two values in a byte, and `scales` `(outputs, inputs / 32)`.

    Checkpoints name them after the matrix: `gate_up_proj_blocks`. Scales are exponent bytes (e8m0).
    """

    name: ClassVar[str] = "mxfp4"

    modules_to_not_convert: tuple[str, ...] = ()
    block_size: ClassVar[int] = _BLOCK_SIZE
    pack_factor: ClassVar[int] = 2
    """Values in a byte."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Mxfp4Config:
        ignored = take(cls.name, config, "modules_to_not_convert", "ignored_layers", default=None)
        return cls(names(cls.name, "modules_to_not_convert", ignored))

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if layer_matches(layer, self.modules_to_not_convert):
            return {}
        # One index of dim 1 is a block, in both.
        return {"blocks": groups("uint8", _BLOCK_SIZE), "scales": groups("uint8", _BLOCK_SIZE)}
