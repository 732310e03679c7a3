"""Facts of this node: its memory, its file systems, and what of a checkpoint is in its page cache."""
