"""Executes plans: ranges of files into memory."""

from raywl.readers.execute import READER_THREADS, choose_num_threads, execute
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView
from raywl.readers.reader import Reader
from raywl.readers.streamed import open_reader

__all__ = [
    "READER_THREADS",
    "ByteView",
    "OpenFiles",
    "Reader",
    "choose_num_threads",
    "execute",
    "open_reader",
]
