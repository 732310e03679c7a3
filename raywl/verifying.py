"""Checks of a checkpoint that was opened before."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from raywl.checkpoint import Manifest, TensorEntry
from raywl.errors import RaywlError

__all__ = ["VerifyReport", "verify"]

_BLOCK_BYTES = 8 << 20
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


@dataclass(slots=True)
class VerifyReport:
    """What a check found."""

    problems: list[str] = field(default_factory=list)
    """One sentence each; empty when all is well."""
    files_checked: int = 0
    bytes_checked: int = 0
    """Bytes of data that were read (0 unless deep)."""
    deep: bool = False
    sha256: dict[str, str] = field(default_factory=dict)
    """Hash of each file that was read in full."""
    compared: list[str] = field(default_factory=list)
    """Files whose hash was known and compared."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {"ok": self.ok, **asdict(self)}


def verify(manifest: Manifest, *, deep: bool) -> VerifyReport:
    """Reads headers, sizes and index again and compares; `deep` reads and hashes every byte."""
    report = VerifyReport(deep=deep)
    try:
        again = Manifest.read(manifest.source, [glob.escape(file.name) for file in manifest.files])
    except RaywlError as error:
        report.problems.append(str(error))
        return report
    before, after = _by_file(manifest), _by_file(again)
    for file in manifest.files:
        report.files_checked += 1
        entries, now = before.get(file.name, {}), after.get(file.name, {})
        if entries != now:
            changed = sorted(
                name for name in entries.keys() | now.keys() if entries.get(name) != now.get(name)
            )
            report.problems.append(
                f"{manifest.path(file.name)}: header changed since it was opened: {len(changed)} tensors, "
                f"for example {changed[0]}"
            )
        elif deep:
            _verify_bytes(manifest.path(file.name), file.name, file.size, report)
    return report


def _by_file(manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        found.setdefault(entry.file, {})[name] = entry
    return found


def _verify_bytes(path: str, name: str, size: int, report: VerifyReport) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
    except OSError as error:
        report.problems.append(f"{path}: can't be read at byte {done}: {error.strerror}")
        return
    report.bytes_checked += done
    report.sha256[name] = digest.hexdigest()
    if done != size:
        report.problems.append(f"{path}: expected {size} bytes, read {done}")
    # The hub's cache names a large file's blob by its SHA-256, and links to it.
    blob = os.path.basename(os.path.realpath(path))
    if _SHA256.match(blob):
        report.compared.append(name)
        if blob != report.sha256[name]:
            report.problems.append(f"{path}: its SHA-256 is {report.sha256[name]}, expected {blob}")
