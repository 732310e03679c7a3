"""Buffers between files and devices: a thread reads into one while a device still copies out of the other.

On a GPU the buffers are pinned and exactly as large as they must be, and copies run on a stream of the
thread's own. Where there is no GPU the same code runs with copies that are made at once.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from raywl.errors import CheckpointError
from raywl.node.numa import bind_memory, node_of_pci
from raywl.plan.copies import Copy
from raywl.readers.memory import ByteView, bytes_of, int_dtype, strided

__all__ = ["Buffer", "Carrier", "HostCarrier", "Stage", "place", "wait_for_devices"]

_log = logging.getLogger(__name__)

_NUM_BUFFERS = 2


def place(piece: Copy, raw: torch.Tensor, first: int, target: ByteView) -> None:
    """Copies one piece to its place.

    Args:
        piece: What goes where.
        raw: Bytes of the file, 1-d uint8, on the target's device or on the CPU.
        first: Byte of the file that byte 0 of `raw` is.
        target: Memory of the piece's target.

    Raises:
        CheckpointError: torch can't copy the one dtype into the other.
    """
    dtype = getattr(torch, piece.src_dtype) if piece.converts else int_dtype(piece.itemsize)
    source = strided(raw, piece.src_start - first, dtype, piece.shape, piece.src_strides)
    try:
        if piece.via:
            source = source.to(getattr(torch, piece.via))
        target.view_for(piece).copy_(source)
    except RuntimeError as error:
        raise CheckpointError(
            piece.file, piece.tensor, f"can't be copied into {piece.target} ({target.dtype}): {error}"
        ) from error


class Buffer:
    """Memory of the host that is read into, of one thread."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        """1-d uint8, a little longer than what is read into it."""
        self.memory = bytes_of(raw)
        self.busy: list[Any] = []
        """Events of devices that may still copy out of it."""

    def wait(self) -> None:
        """Returns once no device copies out of it."""
        for event in self.busy:
            event.synchronize()
        self.busy.clear()


class Carrier(Protocol):
    """Copies from a buffer to targets of one device."""

    def send(self, buffer: Buffer, nbytes: int, first: int, pieces: list[tuple[Copy, ByteView]]) -> None:
        """Starts the copies of some pieces; `buffer` stays busy until they are done.

        Args:
            buffer: Its first bytes are a file's.
            nbytes: How many.
            first: Byte of the file that its byte 0 is.
            pieces: What goes where.
        """

    def finish(self) -> None:
        """Returns once all of its copies are done."""


class HostCarrier:
    """Copies at once."""

    def send(self, buffer: Buffer, nbytes: int, first: int, pieces: list[tuple[Copy, ByteView]]) -> None:
        """As `Carrier.send`."""
        for piece, target in pieces:
            place(piece, buffer.raw, first, target)

    def finish(self) -> None:
        """Nothing is left to do."""


class CudaCarrier:
    """Copies on a stream of its own; what isn't a run of bytes is spread out by the GPU itself."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch: torch.Tensor | None = None

    def send(self, buffer: Buffer, nbytes: int, first: int, pieces: list[tuple[Copy, ByteView]]) -> None:
        """As `Carrier.send`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            runs = [(piece, target) for piece, target in pieces if piece.is_direct]
            for piece, target in runs:
                start = piece.src_start - first
                dst = target.raw[piece.dst_start : piece.dst_start + piece.nbytes]
                dst.copy_(buffer.raw[start : start + piece.nbytes], non_blocking=True)
            rest = [(piece, target) for piece, target in pieces if not piece.is_direct]
            if rest:
                # One for all, since a stream does one thing after the other.
                if self._scratch is None:
                    self._scratch = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
                self._scratch[:nbytes].copy_(buffer.raw[:nbytes], non_blocking=True)
                for piece, target in rest:
                    place(piece, self._scratch, first, target)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        buffer.busy.append(event)

    def finish(self) -> None:
        """As `Carrier.finish`."""
        self._stream.synchronize()


class Stage:
    """The buffers and carriers of one thread; made when they are first needed, and closed by that thread.

    Args:
        nbytes: Longest read, which is the size of each buffer.
    """

    def __init__(self, nbytes: int) -> None:
        # A tensor's last element may begin at the last byte that is read, if a file is laid out oddly.
        self._nbytes = nbytes + 64
        self._buffers: list[Buffer] = []
        self._registered: list[int] = []
        self._turn = 0
        self._carriers: dict[torch.device, Carrier] = {}

    def next_buffer(self, device: torch.device) -> Buffer:
        """The buffer whose turn it is, which may be busy.

        Args:
            device: The first buffer is made near to it.
        """
        if not self._buffers:
            self._buffers = [Buffer(self._new_memory(device)) for _ in range(_NUM_BUFFERS)]
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        return buffer

    def send(self, buffer: Buffer, nbytes: int, first: int, pieces: list[tuple[Copy, ByteView]]) -> None:
        """Starts all copies out of a buffer, whatever their devices; see `Carrier.send`."""
        by_device: dict[torch.device, list[tuple[Copy, ByteView]]] = {}
        for piece, target in pieces:
            by_device.setdefault(target.device, []).append((piece, target))
        for device, group in by_device.items():
            if device not in self._carriers:
                self._carriers[device] = _carrier_for(device, self._nbytes)
            self._carriers[device].send(buffer, nbytes, first, group)

    def close(self) -> None:
        """Waits for all copies, and frees the buffers."""
        try:
            for carrier in self._carriers.values():
                carrier.finish()
        finally:
            for buffer in self._buffers:
                buffer.wait()
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            self._registered.clear()
            self._buffers.clear()

    def _new_memory(self, device: torch.device) -> torch.Tensor:
        """Pinned memory of exactly the size that was asked for: torch's own rounds up to a power of two."""
        raw = torch.frombuffer(mmap.mmap(-1, self._nbytes), dtype=torch.uint8)
        if device.type != "cuda":
            return raw
        node = node_of_pci(_pci_address(device))
        if node is not None:
            bind_memory(raw.data_ptr(), self._nbytes, node)
        status = torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), self._nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) == 0:
            self._registered.append(raw.data_ptr())
        else:
            told = (self._nbytes, int(status), device)
            _log.warning("%d bytes can't be pinned (error %d): copies to %s are waited for", *told)
        return raw


def _carrier_for(device: torch.device, nbytes: int) -> Carrier:
    return CudaCarrier(device, nbytes) if device.type == "cuda" else HostCarrier()


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Returns once devices have done what the calling thread has queued: other threads have other streams."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _pci_address(device: torch.device) -> str:
    """As the system's files name it: `0000:3b:00.0`."""
    facts: Any = torch.cuda.get_device_properties(device)
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
