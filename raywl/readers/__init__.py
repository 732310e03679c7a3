"""Executes plans: ranges of files into memory."""

from raywl.readers.execute import READER_THREADS, choose_num_threads, execute
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView

__all__ = ["READER_THREADS", "ByteView", "OpenFiles", "choose_num_threads", "execute"]
