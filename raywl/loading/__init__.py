"""Loading into the parameters of one rank, without Ray."""

from raywl.loading.load import load_into
from raywl.loading.reload import ReloadReport, check_reload, reload_into

__all__ = ["ReloadReport", "check_reload", "load_into", "reload_into"]
