"""Memory near to a device: which node of the machine that is, and binding memory to it."""

from __future__ import annotations

import ctypes
import os
import platform

__all__ = ["bind_memory", "node_of_pci", "num_nodes"]

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
"""Memory of another node is better than none."""
_MAX_NODES = 1024


def num_nodes(sys_path: str = "/sys") -> int:
    """Memory nodes of this machine; 1 where that can't be told."""
    try:
        names = os.listdir(os.path.join(sys_path, "devices/system/node"))
    except OSError:
        return 1
    return max(1, sum(name.startswith("node") and name[4:].isdecimal() for name in names))


def node_of_pci(address: str, sys_path: str = "/sys") -> int | None:
    """The memory node that a PCI device is attached to.

    Args:
        address: The device's, as in `0000:3b:00.0`.
        sys_path: Where the kernel's files about devices are.

    Returns:
        `None` where there is only one node, or the kernel doesn't tell.
    """
    if num_nodes(sys_path) < 2:
        return None
    try:
        with open(os.path.join(sys_path, "bus/pci/devices", address, "numa_node")) as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind_memory(address: int, nbytes: int, node: int) -> bool:
    """Asks the kernel to take the pages of a range, once they are touched, from one memory node.

    Args:
        address: First byte, on a page.
        nbytes: Length.
        node: The node.

    Returns:
        Whether the kernel took it; without it memory comes from wherever it is.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    words[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel looks at one bit less than it is told.
    length, num_bits = ctypes.c_ulong(nbytes), ctypes.c_ulong(_MAX_NODES + 1)
    asked = (ctypes.c_void_p(address), length, _PREFERRED, words, num_bits)
    return bool(libc.syscall(ctypes.c_long(number), *asked, 0) == 0)
