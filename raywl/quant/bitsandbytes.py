"""bitsandbytes: 4-bit values in flat blocks, or 8-bit ones with a scale for each output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raywl.quant.base import QuantizationConfig, flag, layer_matches, names, take
from raywl.quant.layouts import TensorLayout, channels

__all__ = ["BitsAndBytesConfig"]

_FLAT = TensorLayout("uint8", None, None)


@dataclass(frozen=True, slots=True)
class BitsAndBytesConfig(QuantizationConfig):
    """Quantised while loading, unless the checkpoint has its own config.

    In 4 bits a matrix is one flat run of bytes, in blocks of 64 values that may cross rows: it can't be cut
    by rows or columns, and each rank gets all of it.
    """

    name: ClassVar[str] = "bitsandbytes"

    load_in_8bit: bool = False
    load_in_4bit: bool = True
    is_prequantized: bool = False
    """Whether the checkpoint holds quantised weights."""
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_quant_storage: str = "uint8"
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of blocks are quantised, too."""
    llm_int8_skip_modules: tuple[str, ...] = ()
    block_size: ClassVar[int] = 64
    """Values of a block, in 4 bits."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BitsAndBytesConfig:
        def one(key: str, default: bool) -> bool:
            return flag(cls.name, key, take(cls.name, config, key, default=default))

        in_8bit = one("load_in_8bit", False)
        in_4bit = one("load_in_4bit", not in_8bit)
        if in_8bit == in_4bit:
            raise ValueError(
                f"{cls.name}: one of load_in_8bit and load_in_4bit must be true, got {in_8bit} twice"
            )
        skipped = take(cls.name, config, "llm_int8_skip_modules", default=None)
        return cls(
            load_in_8bit=in_8bit,
            load_in_4bit=in_4bit,
            is_prequantized=bool(config),
            bnb_4bit_quant_type=str(take(cls.name, config, "bnb_4bit_quant_type", default="fp4")),
            bnb_4bit_quant_storage=str(take(cls.name, config, "bnb_4bit_quant_storage", default="uint8")),
            bnb_4bit_use_double_quant=one("bnb_4bit_use_double_quant", False),
            llm_int8_skip_modules=names(cls.name, "llm_int8_skip_modules", skipped),
        )

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        if not self.is_prequantized or layer_matches(layer, self.llm_int8_skip_modules):
            return {}
        if self.load_in_8bit:
            return {"weight": TensorLayout("int8"), "SCB": channels("float32")}
        scale = "uint8" if self.bnb_4bit_use_double_quant else "float32"
        return {
            "weight": TensorLayout(self.bnb_4bit_quant_storage, None, None),
            "weight.absmax": TensorLayout(scale, None, None),
            "weight.quant_map": TensorLayout("float32", None, None),
            f"weight.quant_state.bitsandbytes__{self.bnb_4bit_quant_type}": _FLAT,
        }
