"""One file of `torch.save` as one safetensors file, under the name that users of vLLM's utilities know."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator

from raywl.checkpoint import Manifest
from raywl.disk import sync_folder
from raywl.sources.local import LocalSource
from raywl.sources.selection import TORCH
from raywl.writing.files import (
    check_dtypes,
    check_file,
    check_records,
    distinct_views,
    read_headers,
    reading,
    write_file,
)

__all__ = ["convert_bin_to_safetensor_file", "replacing"]

_MAX_GROWTH = 0.01
"""How much larger the output may be than the input, as a part of the latter."""


def convert_bin_to_safetensor_file(
    pt_filename: str | os.PathLike[str], sf_filename: str | os.PathLike[str]
) -> None:
    """Writes the tensors of a file of `torch.save` as a safetensors file, and compares them bit by bit.

    A dict under the key `state_dict` is taken in place of the one that it is in; entries that are no tensors
    are left out with a warning. Of tensors that are the same view of a storage the first name is kept; every
    other view is written in full. No code of the file is run. The output appears under its name when it was
    checked, or not at all; one tensor is in memory at a time.

    Args:
        pt_filename: The file to read, a zip archive or one from before torch 1.6.
        sf_filename: The file to write; its folder is made, and a file that is there is replaced.

    Raises:
        RuntimeError: The output isn't what was written, or is more than 1 % larger than the input, as views
            were written in full.
        NotFoundError: There is no such file to read.
        CorruptFileError: It is damaged.
        CheckpointError: It needs code to be run, or has a tensor that safetensors can't hold.
        ValueError: It is a folder, or a safetensors file.
        OSError: The output can't be written.
    """
    source = LocalSource.open(os.fsdecode(pt_filename))
    if source.only is None:
        raise ValueError(f"{pt_filename!r} is a folder; `raywl convert` takes such ones")
    manifest = Manifest.read(source)
    if manifest.format != TORCH.name:
        raise ValueError(f"{pt_filename!r} is a {manifest.format} file already")
    if manifest.notes:
        warnings.warn("; ".join(manifest.notes), stacklevel=2)
    check_dtypes(manifest)
    headers = read_headers(manifest)
    check_records(manifest, headers)
    names, _ = distinct_views(manifest, headers)
    target = os.path.abspath(os.fsdecode(sf_filename))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with replacing(target) as temporary, reading(manifest) as reader:
        write_file(reader, names, temporary)
        check_file(reader, names, temporary)
        before, after = manifest.files[0].size, os.path.getsize(temporary)
        if after > before * (1 + _MAX_GROWTH):
            raise RuntimeError(
                f"{target}: {after} bytes are more than 1 % over the {before} of {source.path(source.only)}, "
                "where tensors share bytes that are written in full here (`raywl convert` allows that)"
            )


@contextlib.contextmanager
def replacing(target: str) -> Iterator[str]:
    """A path beside `target`, which what is written there replaces when the block ends well."""
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(folder)
