"""Where ranks go: whether a group fits a cluster, and which rank gets which place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Shortfall", "rank_order", "shortfall"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a cluster lacks for a group."""

    resource: str
    """Ray's name: `CPU`, `GPU`, ..."""
    needed: float
    available: float
    reason: str


def shortfall(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], count: int
) -> Shortfall | None:
    """What `nodes` lack to hold `count` bundles, each whole on one node; `None` if they fit.

    Args:
        nodes: Resources of each node.
        bundle: Resources of one rank, by the same names.
        count: Ranks.
    """
    for resource, amount in bundle.items():
        needed = amount * count
        available = sum(node.get(resource, 0.0) for node in nodes)
        if needed > available + 1e-6:
            each = f"{count} ranks take {amount:g} each"
            return Shortfall(resource, needed, available, f"{each}, and {len(nodes)} nodes have that in all")
    places = sum(_places(node, bundle) for node in nodes)
    if places >= count:
        return None
    resource = max(bundle, key=lambda name: bundle[name])
    return Shortfall(
        resource,
        bundle[resource] * count,
        bundle[resource] * places,
        f"each rank takes {_told(bundle)} on one node; {len(nodes)} nodes have room for {places} of {count}",
    )


def rank_order(places: Sequence[str]) -> list[int]:
    """For each rank, which place it gets, so that neighbouring ranks are on the same node where possible.

    Args:
        places: Node id of each place.

    Returns:
        Indexes into `places`, in rank order: nodes with more places first (they hold whole groups of
        neighbours), and within a node in the places' own order.
    """
    size: dict[str, int] = {}
    for node in places:
        size[node] = size.get(node, 0) + 1
    first = {node: index for index, node in reversed(list(enumerate(places)))}
    return sorted(range(len(places)), key=lambda i: (-size[places[i]], first[places[i]], i))


def _places(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    return min(int((node.get(name, 0.0) + 1e-6) // amount) for name, amount in bundle.items() if amount > 0)


def _told(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
