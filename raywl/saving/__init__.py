"""A model's weights from its ranks back into one checkpoint."""

from raywl.saving.save import SaveReport, save_sharded

__all__ = ["SaveReport", "save_sharded"]
