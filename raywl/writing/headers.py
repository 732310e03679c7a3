"""The header of a safetensors file that is to be written."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Protocol

from raywl.checkpoint.header import MAX_HEADER_BYTES
from raywl.errors import CheckpointError

__all__ = ["METADATA", "RESERVED", "header_bytes"]

METADATA = {"format": "pt"}
"""The metadata of the files, as other writers have it and some readers want it."""

RESERVED = "__metadata__"
"""The one name that a file keeps for itself."""

_ALIGNMENT = 8


class Described(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> str:
        """The format's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""


def header_bytes(
    tensors: Mapping[str, Described], path: str, metadata: Mapping[str, str] = METADATA
) -> bytes:
    """What stands before the data.

    Args:
        tensors: In the order of their data.
        path: The file, for messages.
        metadata: Texts for its readers.

    Raises:
        CheckpointError: It would be longer than the format allows, or a tensor's name isn't allowed there.
    """
    if RESERVED in tensors:
        raise CheckpointError(path, RESERVED, "no tensor of a safetensors file can have this name")
    header: dict[str, object] = {RESERVED: metadata}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        reason = f"{len(tensors)} tensors take a header of {len(raw)} bytes: too long"
        raise CheckpointError(path, None, reason)
    return struct.pack("<Q", len(raw)) + raw
