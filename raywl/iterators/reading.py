"""raywl's own reader, for one file of an iterator's list. Nothing is mapped into memory: a file that is cut
while it is read is an error, not the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from raywl.iterators.files import FileWork, open_files
from raywl.iterators.tally import Tally
from raywl.node.prefetch import local_rank_and_size
from raywl.plan import Read
from raywl.readers import ByteView, OpenFiles, choose_num_threads, execute
from raywl.readers.whole import batches_of, read_whole, reads_of

__all__ = ["read_file", "read_lazily"]


def read_lazily(work: FileWork, tally: Tally) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads a file's tensors one after the other, small neighbours together.

    Raises:
        CheckpointError: The file can't be read, or isn't the one that was planned with any more.
    """
    if not work.names:
        return
    tally.starts(work)
    threads = choose_num_threads(local_rank_and_size()[1])
    with open_files([work]) as files:
        for batch in batches_of(work.names, work.entries):
            reads = reads_of(batch, work.entries)
            tensors = read_whole(batch, work.entries, reads, _executor(files, threads))
            files.check_unchanged()
            for name in batch:
                tally.add(work.entries[name].nbytes)
                # Popped, so that what the consumer drops is free at once.
                yield name, tensors.pop(name)


def read_file(
    work: FileWork,
    *,
    num_threads: int,
    discarded: Collection[str] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads all tensors of one file that are to be given out, in the order of the file.

    Args:
        work: The file.
        num_threads: Reads under way at once.
        discarded: Tensors to be read, too, and thrown away.
        on_bytes: Called after each read; what it raises ends the reading.

    Raises:
        CheckpointError: The file can't be read, or isn't the one that was planned with any more.
    """
    with open_files([work]) as files:
        reads = reads_of(work.names, work.entries, discarded)
        executor = _executor(files, num_threads, on_bytes)
        tensors = read_whole(work.names, work.entries, reads, executor)
        files.check_unchanged()
    return tensors


def _executor(
    files: OpenFiles, num_threads: int, on_bytes: Callable[[int], None] | None = None
) -> Callable[[Sequence[Read], Mapping[str, ByteView]], None]:
    def run(reads: Sequence[Read], targets: Mapping[str, ByteView]) -> None:
        execute(reads, files, targets, num_threads=num_threads, on_bytes=on_bytes)

    return run
