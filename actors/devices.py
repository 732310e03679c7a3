"""Which device, how many threads and which network interface a rank's process uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

__all__ = ["cuda_index", "interface_of", "num_threads"]


def cuda_index(assigned: Sequence[str], visible: str | None) -> int | None:
    """The index, among the devices that this process sees, of the GPU that Ray gave it.

    Ray usually narrows `CUDA_VISIBLE_DEVICES` to the assigned GPU, whose index is then 0, but leaves
    it alone under `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`.

    Args:
        assigned: Ray's ids of the rank's GPUs: numbers, or UUIDs of GPUs or MIG slices.
        visible: `CUDA_VISIBLE_DEVICES` of the process, `None` where it is unset.

    Returns:
        The index, or `None` for a rank without GPU: it must leave CUDA alone.

    Raises:
        ValueError: The assigned GPU isn't among the visible ones.
    """
    if not assigned:
        return None
    own = assigned[0]
    if visible is None:
        if own.isdecimal():
            return int(own)
        raise ValueError(
            f"Ray gave this rank the GPU {own}, and CUDA_VISIBLE_DEVICES is not set to say which one it is"
        )
    listed = [name.strip() for name in visible.split(",") if name.strip()]
    for index, name in enumerate(listed):
        # CUDA takes any unambiguous beginning of a UUID.
        if name == own or (not name.isdecimal() and (own.startswith(name) or name.startswith(own))):
            return index
    raise ValueError(f"Ray gave this rank the GPU {own}, which is not in CUDA_VISIBLE_DEVICES={visible!r}")


def num_threads(num_cores: int, local_size: int) -> int:
    """Threads for one of `local_size` ranks that share a node of `num_cores`; Ray by itself gives one."""
    return max(1, num_cores // local_size)


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def interface_of(address: str) -> str | None:
    """The network interface of this node that has `address`, or `None`.

    gloo otherwise takes the one that the host's name resolves to, which is often the loopback.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family in (socket.AF_INET, socket.AF_INET6) and a.address == address for a in addresses):
            return name
    return None
