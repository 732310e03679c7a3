"""A parameter's life after it was loaded: post-processed, moved, retired and reloaded, at one address.

Captured graphs and kernels hold addresses, so whatever happens to a parameter happens in its own storage
whenever that can be done. All state is the parameter's own attributes, but for two modes that belong to
the running context: `weights_already_processed()` and `direct_reload()`.
"""

from __future__ import annotations

from raywl.parameters.attributes import set_weight_attrs
from raywl.parameters.derived import refill_derived
from raywl.parameters.kernels import (
    get_live_param,
    kernel_parameters,
    move_parameter,
    retire_parameter,
    set_kernel_parameter,
)
from raywl.parameters.modes import (
    are_weights_already_processed,
    direct_reload,
    weights_already_processed,
)
from raywl.parameters.replace import replace_parameter
from raywl.parameters.storage import copy_weight_, storage_view

__all__ = [
    "are_weights_already_processed",
    "copy_weight_",
    "direct_reload",
    "get_live_param",
    "kernel_parameters",
    "move_parameter",
    "refill_derived",
    "replace_parameter",
    "retire_parameter",
    "set_kernel_parameter",
    "set_weight_attrs",
    "storage_view",
    "weights_already_processed",
]
