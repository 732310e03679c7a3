"""GPTQ and AWQ: groups of inputs that share a scale and a zero point, values packed into 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from raywl.quant.base import (
    QuantizationConfig,
    flag,
    layer_matches,
    names,
    one_of,
    size_of_group,
    take,
    whole,
)
from raywl.quant.layouts import TensorLayout

__all__ = ["AWQConfig", "GPTQConfig"]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class GPTQConfig(QuantizationConfig):
    """`qweight` `(inputs * bits / 32, outputs)`, `qzeros`, `scales` and `g_idx`."""

    name: ClassVar[str] = "gptq"

    weight_bits: int = 4
    group_size: int = 128
    """Inputs that share a scale; -1: all of them."""
    desc_act: bool = False
    """Whether inputs are assigned to groups by `g_idx`, in any order, instead of side by side."""
    lm_head_quantized: bool = False
    dynamic: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=(), hash=False)
    """Regular expressions of layers' names: `-:` isn't quantised, `+:` or none has other values."""
    modules_in_block_to_quantize: tuple[str, ...] = ()
    """The only modules that are quantised; all when empty."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPTQConfig:
        dynamic = take(cls.name, config, "dynamic", default={})
        if not isinstance(dynamic, Mapping):
            raise ValueError(f"{cls.name}: dynamic must map patterns to values, got {dynamic!r}")
        inside = take(cls.name, config, "modules_in_block_to_quantize", default=())
        flat = [name for part in inside for name in ([part] if isinstance(part, str) else part)]
        return cls(
            weight_bits=_bits(cls.name, take(cls.name, config, "bits")),
            group_size=size_of_group(cls.name, take(cls.name, config, "group_size")),
            desc_act=flag(cls.name, "desc_act", take(cls.name, config, "desc_act", default=False)),
            lm_head_quantized=flag(cls.name, "lm_head", take(cls.name, config, "lm_head", default=False)),
            dynamic=tuple((str(pattern), values or {}) for pattern, values in dynamic.items()),
            modules_in_block_to_quantize=names(cls.name, "modules_in_block_to_quantize", flat),
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]

    @property
    def pack_factor(self) -> Fraction:
        """Values in a 32-bit word."""
        return Fraction(_WORD_BITS, self.weight_bits)

    def of_layer(self, layer: str) -> GPTQConfig | None:
        """The values for one layer, `None` if it isn't quantised."""
        if layer.split(".")[-1] == "lm_head" and not self.lm_head_quantized:
            return None
        inside = self.modules_in_block_to_quantize
        if layer and inside and not layer_matches(layer, inside):
            return None
        for pattern, values in self.dynamic:
            if pattern.startswith("-:"):
                if re.match(pattern[2:], layer):
                    return None
            elif re.match(pattern.removeprefix("+:"), layer):
                return replace(
                    self,
                    weight_bits=_bits(self.name, values.get("bits", self.weight_bits)),
                    group_size=size_of_group(self.name, values.get("group_size", self.group_size)),
                    desc_act=flag(self.name, "desc_act", values.get("desc_act", self.desc_act)),
                )
        return self

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        own = self.of_layer(layer)
        if own is None:
            return {}
        factor = own.pack_factor
        whole_inputs = own.desc_act or own.group_size == -1
        # With act-order any input may belong to any group: every rank keeps the scales of all of them.
        size = None if whole_inputs else own.group_size
        along = None if whole_inputs else 0
        return {
            "qweight": TensorLayout("int32", 1, 0, packed_dim=0, packed_factor=factor, group_size=size),
            "qzeros": TensorLayout("int32", 1, along, packed_dim=1, packed_factor=factor, group_size=size),
            "scales": TensorLayout("float16", 1, along, group_size=size),
            "g_idx": TensorLayout("int32", None, 0),
        }


@dataclass(frozen=True, slots=True)
class AWQConfig(QuantizationConfig):
    """`qweight` `(inputs, outputs * bits / 32)`, `qzeros` and `scales`."""

    name: ClassVar[str] = "awq"

    weight_bits: int = 4
    group_size: int = 128
    """Inputs that share a scale; -1: all of them."""
    zero_point: bool = True
    modules_to_not_convert: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AWQConfig:
        version = str(take(cls.name, config, "version", default="gemm")).lower()
        one_of(cls.name, "version", version, ("gemm",))
        bits = _bits(cls.name, take(cls.name, config, "w_bit", "bits"))
        if _WORD_BITS % bits:
            raise ValueError(f"{cls.name}: values of {bits} bits don't fill words of {_WORD_BITS}")
        zero_point = take(cls.name, config, "zero_point", default=True)
        ignored = take(cls.name, config, "modules_to_not_convert", default=None)
        return cls(
            weight_bits=bits,
            group_size=size_of_group(cls.name, take(cls.name, config, "q_group_size", "group_size")),
            zero_point=flag(cls.name, "zero_point", zero_point),
            modules_to_not_convert=names(cls.name, "modules_to_not_convert", ignored),
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quant_config.json", "quantize_config.json"]

    @property
    def pack_factor(self) -> int:
        """Values in a 32-bit word."""
        return _WORD_BITS // self.weight_bits

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if layer.split(".")[-1] == "lm_head" or layer_matches(layer, self.modules_to_not_convert):
            return {}
        size, along = (None, None) if self.group_size == -1 else (self.group_size, 0)
        factor = self.pack_factor
        found = {
            "qweight": TensorLayout("int32", 1, 0, packed_dim=1, packed_factor=factor),
            "scales": TensorLayout("float16", 1, along, group_size=size),
        }
        if self.zero_point:
            found["qzeros"] = TensorLayout(
                "int32", 1, along, packed_dim=1, packed_factor=factor, group_size=size
            )
        return found


def _bits(method: str, value: object) -> int:
    bits = whole(method, "bits", value)
    if bits > 8:
        raise ValueError(f"{method}: bits must be at most 8, got {bits}")
    return bits
