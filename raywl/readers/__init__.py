"""Executes plans: ranges of files into memory."""

from raywl.readers.execute import choose_num_threads, execute
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView

__all__ = ["ByteView", "OpenFiles", "choose_num_threads", "execute"]
