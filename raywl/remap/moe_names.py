"""Expert weights of models that keep them one level deeper, and the mapping that such a model gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["get_moe_expert_mapping", "maybe_remap_moe_expert_param_name", "remap_moe_expert_weights"]

T = TypeVar("T")

_EXPERTS = ".experts."
_ROUTED = ".experts.routed_experts."
_SUFFIXES = tuple(
    f"{prefix}_{kind}"
    for prefix in ("w13", "w2")
    for kind in (
        "weight",
        "weight_scale",
        "weight_scale_inv",
        "input_scale",
        "bias",
        "scale",
        "g_idx",
        "qweight",
        "qzeros",
        "weight_shape",
    )
)


def maybe_remap_moe_expert_param_name(name: str, params_dict: Collection[str]) -> str:
    """The name of an expert weight with `routed_experts.` put in, where the model has it so.

    Args:
        name: A name of the checkpoint; one with `.experts.` that has, or ends in, `w13_*` or `w2_*`.
        params_dict: The model's parameters by name.

    Returns:
        The model's name; any other name unchanged.
    """
    if _EXPERTS not in name or _ROUTED in name:
        return name
    new = name.replace(_EXPERTS, _ROUTED, 1)
    if new in params_dict and (name.endswith(_SUFFIXES) or any(f".{suffix}" in name for suffix in _SUFFIXES)):
        return new
    return name


def remap_moe_expert_weights(
    weights: Iterable[tuple[str, T]], params_dict: Mapping[str, Any]
) -> Iterator[tuple[str, T]]:
    """The weights under the names of `maybe_remap_moe_expert_param_name`, one by one.

    Args:
        weights: `(name in the checkpoint, weight)`.
        params_dict: The model's parameters by name.
    """
    for name, weight in weights:
        yield maybe_remap_moe_expert_param_name(name, params_dict), weight


def get_moe_expert_mapping(model: torch.nn.Module) -> list[tuple[str, str, int, str]]:
    """How expert weights reach the parameters of a model, as its first module with `get_expert_mapping` says.

    Args:
        model: The model; modules are asked in the order of `named_modules()`.

    Returns:
        `(param_name, weight_name, expert_id, shard_id)`, as `make_expert_params_mapping` gives.

    Raises:
        ValueError: No module has it.
    """
    for _, module in model.named_modules():
        get_expert_mapping = getattr(module, "get_expert_mapping", None)
        if get_expert_mapping is not None:
            mapping: list[tuple[str, str, int, str]] = get_expert_mapping()
            return mapping
    raise ValueError(f"no module of {type(model).__name__} has get_expert_mapping")
