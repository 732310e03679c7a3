"""What a checkpoint is: its index, headers, files and their checks. Reads no tensor data."""

from raywl.checkpoint.header import TensorEntry
from raywl.checkpoint.manifest import FileEntry, Manifest

__all__ = ["FileEntry", "Manifest", "TensorEntry"]
