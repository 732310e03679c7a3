"""Expert parallelism by names: which experts a rank holds, and what their weights are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "compute_local_expert_ids",
    "determine_expert_map",
    "make_expert_params_mapping",
    "parse_expert_id",
    "should_skip_weight",
]

# Python refuses to read numbers of thousands of digits, which no expert has.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d{1,18})\.")
_HEAVY = (".weight", ".weight_packed", ".qweight")


def parse_expert_id(name: str) -> int | None:
    """The number in `.experts.<N>.`; `None` for dense weights, shared experts, and all experts in one."""
    found = _EXPERT.search(name)
    return None if found is None else int(found.group(1))


def _expert_ids(num_experts: int, ep_size: int, ep_rank: int, placement: str) -> Sequence[int]:
    if placement not in ("linear", "round_robin"):
        raise ValueError(f"unknown expert placement {placement!r}: expected 'linear' or 'round_robin'")
    if ep_size <= 1:
        return range(num_experts)
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank {ep_rank} is outside 0..{ep_size - 1}")
    if placement == "round_robin":
        return range(ep_rank, num_experts, ep_size)
    each, rest = divmod(num_experts, ep_size)
    start = ep_rank * each + min(ep_rank, rest)
    return range(start, start + each + (ep_rank < rest))


def compute_local_expert_ids(
    num_experts: int, ep_size: int, ep_rank: int, placement: str = "linear"
) -> set[int] | None:
    """The experts that one rank of `ep_size` holds.

    Args:
        num_experts: Experts of a layer, on all ranks.
        ep_size: Ranks that they are spread over.
        ep_rank: This one of them.
        placement: `"linear"`: contiguous blocks, a remainder going one each to the first ranks;
            `"round_robin"`: every `ep_size`-th, from `ep_rank` on.

    Returns:
        Their ids; `None`, meaning all, for `ep_size <= 1`.

    Raises:
        ValueError: Another placement, or a rank out of range.
    """
    ids = _expert_ids(num_experts, ep_size, ep_rank, placement)
    return None if ep_size <= 1 else set(ids)


def determine_expert_map(
    ep_size: int, ep_rank: int, num_experts: int, placement: str = "linear"
) -> tuple[int, torch.Tensor | None]:
    """How many experts one rank holds, and where.

    Args:
        ep_size: Ranks that the experts are spread over.
        ep_rank: This one of them.
        num_experts: Experts of a layer, on all ranks.
        placement: As for `compute_local_expert_ids`.

    Returns:
        Number of local experts, and `(num_experts,)` int32 that has each expert's place on this rank, -1
        for those of other ranks; `None` in its place when `ep_size <= 1`.

    Raises:
        ValueError: Another placement, or a rank out of range.
    """
    ids = _expert_ids(num_experts, ep_size, ep_rank, placement)
    if ep_size <= 1:
        return num_experts, None
    # Here and not above: names are planned where torch isn't wanted.
    import torch

    places = [-1] * num_experts
    for place, expert in enumerate(ids):
        places[expert] = place
    # On the CPU even where models are made, under `with torch.device("meta")`.
    return len(ids), torch.tensor(places, dtype=torch.int32, device="cpu")


def should_skip_weight(name: str, local_expert_ids: Collection[int] | None) -> bool:
    """Whether a tensor is a heavy one of an expert that isn't local.

    Scales, zero points, biases and shapes of all experts stay, since some kernels need every expert's.
    `None`: nothing is skipped.
    """
    if local_expert_ids is None or not name.endswith(_HEAVY):
        return False
    expert_id = parse_expert_id(name)
    return expert_id is not None and expert_id not in local_expert_ids


def make_expert_params_mapping(
    gate_name: str,
    down_name: str,
    up_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
) -> list[tuple[str, str, int, str]]:
    """How the names of a checkpoint with one tensor per expert reach `w13_*` and `w2_*` parameters.

    A name that contains `weight_name` belongs to the parameter called `name.replace(weight_name,
    param_name)`, whose loader is given `shard_id` and `expert_id`.

    Args:
        gate_name: What the checkpoint calls the gate (`"gate_proj"`, `"w1"`).
        down_name: What it calls down (`"down_proj"`, `"w2"`).
        up_name: What it calls up (`"up_proj"`, `"w3"`).
        num_experts: Experts in the checkpoint.
        num_redundant_experts: Copies that follow them, of expert 0, 1, ... in turn.

    Returns:
        `(param_name, weight_name, expert_id, shard_id)`, `shard_id` being `"w1"` for gate, `"w2"` for down
        and `"w3"` for up. A copy has its own `expert_id` and its original's `weight_name`.

    Raises:
        ValueError: No experts, or fewer than no copies.
    """
    if num_experts < 1 or num_redundant_experts < 0:
        raise ValueError(f"can't map {num_experts} experts and {num_redundant_experts} redundant ones")
    shards = (("w1", gate_name, "w13_"), ("w2", down_name, "w2_"), ("w3", up_name, "w13_"))
    return [
        (f"experts.{prefix}", f"experts.{expert_id % num_experts}.{called}.", expert_id, shard_id)
        for expert_id in range(num_experts + num_redundant_experts)
        for shard_id, called, prefix in shards
    ]
