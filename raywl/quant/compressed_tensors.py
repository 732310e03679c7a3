"""compressed-tensors: groups of layers, each with its own number of bits, strategy and storage format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raywl.quant.base import (
    QuantizationConfig,
    block_shape,
    flag,
    layer_matches,
    names,
    one_of,
    size_of_group,
    take,
    whole,
)
from raywl.quant.layouts import TensorLayout, blocks, channels, groups, packed, per_tensor

__all__ = ["CompressedTensorsConfig", "WeightScheme"]

_METHOD = "compressed-tensors"
_WORD_BITS = 32
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of a group of layers are quantised."""

    targets: tuple[str, ...]
    """Names or `re:` expressions of layers, or names of classes, which stand for all layers."""
    format: str
    num_bits: int = 8
    is_float: bool = False
    strategy: str = "tensor"
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    """`(outputs, inputs)` of a block."""
    symmetric: bool = True
    """Whether there are no zero points."""
    actorder: str | None = None
    """`"group"`: inputs are assigned to groups by `weight_g_idx`."""
    has_input_scale: bool = False

    def layouts(self) -> dict[str, TensorLayout]:
        """The tensors of a layer.

        Raises:
            ValueError: A format whose tensors aren't known.
        """
        make = _FORMATS.get(self.format)
        if make is None:
            raise ValueError(
                f"{_METHOD}: the tensors of format {self.format!r} aren't known; those of "
                f"{', '.join(_FORMATS)} are"
            )
        return make(self)

    def scale(self, dtype: str | None) -> TensorLayout:
        """One element for as much of the matrix as the strategy says."""
        if self.strategy == "block" and self.block_structure is not None:
            return blocks(dtype, self.block_structure)
        if self.strategy in ("group", "tensor_group") and self.group_size not in (None, -1):
            assert self.group_size is not None
            if self.actorder == "group":
                # Any input may belong to any group: every rank keeps all of an output's scales.
                return TensorLayout(dtype, 0, None)
            return groups(dtype, self.group_size)
        return per_tensor(dtype) if self.strategy == "tensor" else channels(dtype)


@dataclass(frozen=True, slots=True)
class CompressedTensorsConfig(QuantizationConfig):
    """Which scheme a layer has is told by name; a name counts before a class."""

    name: ClassVar[str] = _METHOD

    schemes: tuple[WeightScheme, ...] = ()
    ignore: tuple[str, ...] = ()
    format: str = "dense"
    kv_cache_strategy: str | None = None
    """`"tensor"` or `"attn_head"`; `None`: the checkpoint has no scales of the KV cache."""
    total_num_heads: int | None = None
    """Attention heads of the model, over which scales of heads are cut."""
    total_num_kv_heads: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensorsConfig:
        form = str(take(_METHOD, config, "format", default="dense"))
        sparsity = take(_METHOD, config, "sparsity_config", default={})
        if take(_METHOD, sparsity, "format", default="dense") != "dense":
            raise ValueError(f"{_METHOD}: sparse weights of format {sparsity['format']!r} aren't known")
        kv_cache = take(_METHOD, config, "kv_cache_scheme", default=None)
        return cls(
            schemes=tuple(
                _scheme(key, group, form)
                for key, group in take(_METHOD, config, "config_groups", default={}).items()
            ),
            ignore=names(_METHOD, "ignore", take(_METHOD, config, "ignore", default=None)),
            format=form,
            kv_cache_strategy=None if kv_cache is None else str(kv_cache.get("strategy", "tensor")),
            total_num_heads=_heads(config, "total_num_heads"),
            total_num_kv_heads=_heads(config, "total_num_kv_heads"),
        )

    def scheme_of(self, layer: str = "") -> WeightScheme | None:
        """The scheme of a layer; `None` if it isn't quantised."""
        if layer_matches(layer, self.ignore):
            return None
        for is_class in (False, True):
            for scheme in self.schemes:
                targets = [target for target in scheme.targets if _is_class(target) == is_class]
                if targets and (is_class or layer_matches(layer, targets)):
                    return scheme
        return None

    def layouts(self, layer: str = "") -> dict[str, TensorLayout]:
        scheme = self.scheme_of(layer)
        return {} if scheme is None else scheme.layouts()

    def kv_cache_layouts(self) -> dict[str, TensorLayout]:
        """The scales of queries, keys and values of an attention layer: one, or one for each head."""
        if self.kv_cache_strategy is None:
            return {}
        if self.kv_cache_strategy == "attn_head":
            return dict.fromkeys(("q_scale", "k_scale", "v_scale"), channels(None))
        return dict.fromkeys(("k_scale", "v_scale"), per_tensor(None))


def _scheme(key: str, group: Mapping[str, Any], form: str) -> WeightScheme:
    where = f"{_METHOD}: {key}"
    weights = take(where, group, "weights", default={})
    inputs = take(where, group, "input_activations", default={})
    size = take(where, weights, "group_size", default=None)
    strategy = take(where, weights, "strategy", default="tensor" if size is None else "group")
    one_of(where, "strategy", strategy, _STRATEGIES)
    block = take(where, weights, "block_structure", default=None)
    if isinstance(block, str):
        # "128x128"
        block = [int(part) if part.isdecimal() else part for part in block.split("x")]
    if strategy == "block":
        block = block_shape(where, block)
    if strategy in ("group", "tensor_group") and size is None:
        raise ValueError(f"{where}: strategy {strategy!r} needs a group_size")
    kind = one_of(where, "type", take(where, weights, "type", default="int"), ("int", "float"))
    return WeightScheme(
        targets=names(where, "targets", take(where, group, "targets", default=("Linear",))),
        format=str(take(where, group, "format", default=form)) if weights else "dense",
        num_bits=whole(where, "num_bits", take(where, weights, "num_bits", default=8)),
        is_float=kind == "float",
        strategy=strategy,
        group_size=None if size is None else size_of_group(where, size),
        block_structure=block if strategy == "block" else None,
        symmetric=flag(where, "symmetric", take(where, weights, "symmetric", default=True)),
        actorder=_actorder(where, take(where, weights, "actorder", default=None)),
        has_input_scale=bool(inputs) and take(where, inputs, "dynamic", default=False) is False,
    )


def _actorder(where: str, value: Any) -> str | None:
    # Older configs say true for "group".
    value = {True: "group", False: None}.get(value, value) if isinstance(value, bool) else value
    found: str | None = one_of(where, "actorder", value, (None, "group", "weight", "static", "dynamic"))
    return "group" if found == "dynamic" else found


def _heads(config: Mapping[str, Any], key: str) -> int | None:
    value = take(_METHOD, config, key, default=None)
    return None if value is None else whole(_METHOD, key, value)


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()


def _packed(scheme: WeightScheme) -> dict[str, TensorLayout]:
    """`weight_packed` `(outputs, inputs / values in a word)`; zero points are packed along the outputs."""
    factor = _WORD_BITS // scheme.num_bits
    border = scheme.group_size if scheme.group_size not in (None, -1) else None
    scale = scheme.scale(None)
    found = {
        "weight_packed": packed("int32", factor, None if scheme.actorder == "group" else border),
        "weight_scale": scale,
        "weight_shape": TensorLayout("int64", None, None),
    }
    if not scheme.symmetric:
        found["weight_zero_point"] = TensorLayout(
            "int32",
            0,
            scale.input_dim,
            packed_dim=0,
            packed_factor=factor,
            group_size=scale.group_size,
        )
    if scheme.actorder == "group":
        found["weight_g_idx"] = TensorLayout("int32", None, 0)
    return found


def _whole(scheme: WeightScheme) -> dict[str, TensorLayout]:
    """`weight`, one element for each value."""
    dtype = "float8_e4m3fn" if scheme.is_float else "int8"
    found = {"weight": TensorLayout(dtype), "weight_scale": scheme.scale(None)}
    if not scheme.symmetric:
        found["weight_zero_point"] = scheme.scale("int8")
    if scheme.has_input_scale:
        found["input_scale"] = per_tensor(None)
    return found


def _nvfp4(scheme: WeightScheme) -> dict[str, TensorLayout]:
    size = scheme.group_size or 16
    found = {
        "weight_packed": packed("uint8", 2, size),
        "weight_scale": groups("float8_e4m3fn", size),
        "weight_global_scale": per_tensor(),
    }
    return found | ({"input_global_scale": per_tensor()} if scheme.has_input_scale else {})


def _mxfp4(scheme: WeightScheme) -> dict[str, TensorLayout]:
    size = scheme.group_size or 32
    return {"weight_packed": packed("uint8", 2, size), "weight_scale": groups("uint8", size)}


_FORMATS: dict[str, Callable[[WeightScheme], dict[str, TensorLayout]]] = {
    "dense": lambda _: {},
    "pack-quantized": _packed,
    "int-quantized": _whole,
    "float-quantized": _whole,
    "naive-quantized": _whole,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
