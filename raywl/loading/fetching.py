"""Makes the files of a checkpoint local before they are read."""

from __future__ import annotations

from collections.abc import Iterable

from raywl.checkpoint import Manifest
from raywl.progress import Progress
from raywl.report import LoadReport

__all__ = ["make_local"]


def make_local(
    manifest: Manifest, files: Iterable[str], report: LoadReport, progress: Progress | None
) -> None:
    """Fetches what isn't there of some files of a remote checkpoint, and notes what that took.

    Args:
        manifest: The checkpoint.
        files: Names.
        report: Takes bytes and seconds; the phase before counts as planning.
        progress: Told how far it is.

    Raises:
        As `Manifest.fetch`.
    """
    names = list(files)
    if not names or not manifest.source.is_remote:
        return
    _add(report.phases, "plan", report.timeline.note_phase("plan"))
    nbytes = manifest.fetch(names, progress)
    _add(report.phases, "fetch", report.timeline.note_phase("fetch"))
    if nbytes:
        kind = manifest.source.kind
        report.bytes_by_source[kind] = report.bytes_by_source.get(kind, 0) + nbytes


def _add(seconds: dict[str, float], phase: str, more_s: float) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + more_s
