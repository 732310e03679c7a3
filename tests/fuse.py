"""A small read-only FUSE file system over a folder, whose reads can be made to fail.

It speaks the kernel's own protocol (include/uapi/linux/fuse.h, version 7.31), so that it needs `/dev/fuse`
and the right to mount, and no library. The server is a process of its own: a reader that waits in a page
fault holds the interpreter's lock, and could never be answered by its own process.

Faults are a JSON file in the folder behind, `faults.json`, read at each read:
    {"eio": {"name": first failing byte}, "size": {"name": size that is told},
     "eintr": {"name": of each number of reads all but the last are interrupted}}
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["FuseMount", "why_not"]

FS_TYPE = "fuse.raywltest"
_FAULTS = "faults.json"
_READS = "reads.jsonl"
_MAX_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOSUID_NODEV_READONLY = 2 | 4 | 1
_MNT_DETACH = 2


def why_not() -> str | None:
    """Why no FUSE file system can be mounted here, or `None`."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"/dev/fuse can't be opened: {error.strerror}"
    os.close(device)
    return None if os.geteuid() == 0 else "only root may mount"


class FuseMount:
    """A mount and its server, until the block ends."""

    def __init__(self, behind: Path, path: Path) -> None:
        self.behind, self.path = behind, path
        """The folder whose files are seen, and where they are seen."""
        behind.mkdir()
        path.mkdir()

    def fail(self, **faults: Any) -> None:
        """What goes wrong from now on; nothing without arguments."""
        temporary = self.behind / f"{_FAULTS}.tmp"
        temporary.write_text(json.dumps(faults))
        temporary.rename(self.behind / _FAULTS)

    def reads(self) -> list[tuple[str, int, int]]:
        """`(name, offset, bytes)` of every read that the kernel has asked for."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.behind / _READS).read_text().splitlines()
            return [tuple(json.loads(line)) for line in lines]
        return []

    def __enter__(self) -> FuseMount:
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self.behind), str(self.path)], stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != "mounted\n":
            raise RuntimeError("the FUSE server didn't mount")
        return self

    def __exit__(self, *exc: object) -> None:
        _LIBC.umount2(os.fsencode(self.path), _MNT_DETACH)
        self._server.kill()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()


class _Error(Exception):
    """Answers a request with an error number."""


class _Server:
    def __init__(self, device: int, behind: str) -> None:
        self._device, self._behind = device, behind
        self._names = {1: ""}
        self._nodes = {"": 1}
        self._num_reads = 0
        self._log = open(os.path.join(behind, _READS), "a", buffering=1)  # noqa: SIM115 (for as long as it runs)

    def serve(self) -> None:
        """Answers until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, _MAX_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            opcode, unique, node = struct.unpack_from("=4xIQQ", request)
            handler = getattr(self, f"_do_{opcode}", None)
            if opcode in (2, 36, 42):  # forget, interrupt, batch forget: no answer
                continue
            try:
                body = self._no_such() if handler is None else handler(node, request[40:])
                status = 0
            except _Error as error:
                body, status = b"", -error.args[0]
            except OSError as error:
                body, status = b"", -(error.errno or errno.EIO)
            with contextlib.suppress(OSError):
                os.write(self._device, struct.pack("=IiQ", 16 + len(body), status, unique) + body)

    def _no_such(self) -> bytes:
        raise _Error(errno.ENOSYS)

    def _faults(self) -> dict[str, Any]:
        try:
            with open(os.path.join(self._behind, _FAULTS)) as file:
                return json.load(file)
        except FileNotFoundError:
            return {}

    def _path(self, node: int) -> str:
        return os.path.join(self._behind, self._names[node])

    def _attr(self, node: int) -> bytes:
        info = os.stat(self._path(node))
        size = self._faults().get("size", {}).get(self._names[node], info.st_size)
        is_folder = stat.S_ISDIR(info.st_mode)
        times = [int(info.st_atime), int(info.st_mtime), int(info.st_ctime)]
        parts = [info.st_mtime_ns % 10**9 if i == 1 else 0 for i in range(3)]
        mode = stat.S_IFDIR | 0o755 if is_folder else stat.S_IFREG | 0o644
        return struct.pack(
            "=QQQQQQIIIIIIIIII",
            *(node, size, -(-size // 512), *times),
            *(*parts, mode, 1, 0, 0, 0, 4096, 0),
        )

    def _do_26(self, node: int, body: bytes) -> bytes:  # init
        major, _, readahead, _ = struct.unpack_from("=IIII", body)
        return struct.pack("=IIIIHHIIHHI28x", major, 31, readahead, 0, 16, 12, _MAX_BYTES, 1, 256, 0, 0)

    def _do_1(self, node: int, body: bytes) -> bytes:  # lookup
        name = body.rstrip(b"\0").decode()
        if not os.path.exists(os.path.join(self._behind, name)):
            raise _Error(errno.ENOENT)
        child = self._nodes.setdefault(name, len(self._nodes) + 1)
        self._names[child] = name
        return struct.pack("=QQQQII", child, 0, 0, 0, 0, 0) + self._attr(child)

    def _do_3(self, node: int, body: bytes) -> bytes:  # getattr
        return struct.pack("=QII", 0, 0, 0) + self._attr(node)

    def _do_14(self, node: int, body: bytes) -> bytes:  # open
        return struct.pack("=QII", os.open(self._path(node), os.O_RDONLY), 0, 0)

    def _do_15(self, node: int, body: bytes) -> bytes:  # read
        handle, offset, size = struct.unpack_from("=QQI", body)
        name, faults = self._names[node], self._faults()
        self._log.write(json.dumps([name, offset, size]) + "\n")
        self._num_reads += 1
        if self._num_reads % faults.get("eintr", {}).get(name, 1):
            raise _Error(errno.EINTR)
        first_bad = faults.get("eio", {}).get(name)
        if first_bad is not None and offset + size > first_bad:
            raise _Error(errno.EIO)
        end = min(offset + size, faults.get("size", {}).get(name, offset + size))
        return os.pread(handle, max(0, end - offset), offset)

    def _do_18(self, node: int, body: bytes) -> bytes:  # release
        os.close(struct.unpack_from("=Q", body)[0])
        return b""

    def _do_27(self, node: int, body: bytes) -> bytes:  # opendir
        return struct.pack("=QII", 0, 0, 0)

    def _do_28(self, node: int, body: bytes) -> bytes:  # readdir
        _, offset, size = struct.unpack_from("=QQI", body)
        out = b""
        for index, name in enumerate(sorted(os.listdir(self._behind))[offset:], offset + 1):
            raw = name.encode()
            entry = struct.pack("=QQII", 2, index, len(raw), 8) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    _do_25 = _do_29 = _do_34 = _nothing  # flush, releasedir, access

    def _do_17(self, node: int, body: bytes) -> bytes:  # statfs
        return struct.pack("=QQQQQIIII24x", 1000, 1000, 1000, 1000, 1000, 4096, 255, 4096, 0)


def _main(behind: str, path: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    name, kind = b"raywltest", FS_TYPE.encode()
    if _LIBC.mount(name, os.fsencode(path), kind, _NOSUID_NODEV_READONLY, options.encode()):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    _Server(device, behind).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
