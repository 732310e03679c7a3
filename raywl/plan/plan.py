"""The plan of one rank's load, as data that can be shown, saved and used again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from raywl.errors import CapacityError, CheckpointError, NotFoundError
from raywl.plan.copies import Copy
from raywl.plan.fills import Fill, number_from, number_to
from raywl.plan.reads import Read, schedule
from raywl.types import ParallelContext

__all__ = ["LoadPlan", "TargetInfo"]

_FORMAT = 3
"""The only one that is read: a plan is quickly made anew, and the earlier ones didn't tell strides."""


class TargetInfo(NamedTuple):
    """What a plan expects of a parameter."""

    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    """Local shape on the rank."""
    strides: tuple[int, ...]
    """In elements: copies go to bytes, which are other elements where strides differ."""


@dataclass(frozen=True)
class LoadPlan:
    """Which bytes of which files one rank reads, and where they go."""

    identity: str
    """The checkpoint that it was made for."""
    context: ParallelContext
    """The rank that it was made for."""
    files: tuple[str, ...]
    """The checkpoint's files, in order."""
    copies: tuple[Copy, ...]
    """One for each tensor or part of a tensor that ends in a parameter."""
    targets: Mapping[str, TargetInfo]
    """The parameters that are written, by name."""
    fills: tuple[Fill, ...] = ()
    """Constants that loaders put into parameters, to be made before all copies."""
    unplanned: tuple[str, ...] = ()
    """Why the plan alone doesn't make the model: values that loaders computed while they ran."""

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """The reads in the order of files and offsets."""
        return tuple(schedule(self.copies, {name: index for index, name in enumerate(self.files)}))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are asked of the source."""
        return sum(read.end - read.start for read in self.reads)

    @cached_property
    def nbytes_kept(self) -> int:
        """Bytes that end in parameters."""
        return sum(copy.nbytes for copy in self.copies)

    @cached_property
    def nbytes_by_file(self) -> dict[str, int]:
        """Of `nbytes`, by file; files that aren't read are left out."""
        found: dict[str, int] = {}
        for read in self.reads:
            found[read.file] = found.get(read.file, 0) + read.end - read.start
        return found

    def __hash__(self) -> int:
        return hash((self.identity, self.context, self.copies))

    def summary(self) -> dict[str, Any]:
        """The totals, as JSON values."""
        return {
            "identity": self.identity,
            "context": self.context.to_dict(),
            "num_reads": len(self.reads),
            "num_direct_reads": sum(read.direct for read in self.reads),
            "num_copies": len(self.copies),
            "num_fills": len(self.fills),
            "num_targets": len(self.targets),
            "nbytes": self.nbytes,
            "nbytes_kept": self.nbytes_kept,
            "nbytes_by_file": self.nbytes_by_file,
            "unplanned": list(self.unplanned),
        }

    def explain(self) -> str:
        """The plan in words: totals, then each file's bytes, then each parameter's."""
        direct = sum(read.direct for read in self.reads)
        lines = [
            f"rank {self.context.rank} of {self.context.world_size}: {len(self.reads)} reads, "
            f"{self.nbytes} bytes asked, {self.nbytes_kept} kept; "
            f"{direct} reads go straight into parameters, {len(self.reads) - direct} through scratch",
        ]
        lines += [f"  {name}: {nbytes} bytes" for name, nbytes in self.nbytes_by_file.items()]
        for copy in self.copies:
            via = "direct" if copy.is_direct else "strided"
            if copy.converts:
                dtypes = [copy.src_dtype, copy.via, copy.dst_dtype]
                via += f", {' to '.join(dtype for dtype in dtypes if dtype)}"
            lines.append(
                f"  {copy.target} <- {copy.tensor} {list(copy.shape)} at byte {copy.src_start} ({via})"
            )
        lines += [f"  {fill.target} <- {fill.value} {list(fill.shape)} (constant)" for fill in self.fills]
        lines += [f"  not planned: {reason}" for reason in self.unplanned]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, in one step: `path` is as it was, or the whole plan.

        Raises:
            CapacityError: The disk is full.
            OSError: The folder isn't there, or can't be written to.
        """
        body = {
            "raywl_plan": _FORMAT,
            "identity": self.identity,
            "context": self.context.to_dict(),
            "files": self.files,
            "copies": self.copies,
            "fills": [(*fill[:-1], number_to(fill.value)) for fill in self.fills],
            "targets": dict(self.targets),
            "unplanned": self.unplanned,
        }
        text = json.dumps(body).encode()
        folder = os.path.dirname(os.path.abspath(path))
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".plan-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException as error:
            os.unlink(temporary)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(folder).free
                raise CapacityError(
                    "disk space", len(text), free, f"{os.fspath(path)} can't be written", unit="bytes"
                ) from error
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LoadPlan:
        """Reads a saved plan.

        Raises:
            CheckpointError: It isn't a plan, or is of another format version.
        """
        try:
            with open(path) as file:
                body = json.load(file)
        except FileNotFoundError:
            raise NotFoundError(os.fspath(path), "there is no such plan", local=True) from None
        except ValueError as error:
            raise CheckpointError(os.fspath(path), None, f"is not a saved plan: {error}") from error
        except OSError as error:
            raise CheckpointError(os.fspath(path), None, f"can't be read: {error.strerror}") from error
        try:
            if body["raywl_plan"] != _FORMAT:
                reason = f"plan of format {body['raywl_plan']}, expected {_FORMAT}: make it anew"
                raise CheckpointError(os.fspath(path), None, reason)
            return cls(
                identity=str(body["identity"]),
                context=ParallelContext(**body["context"]),
                files=tuple(body["files"]),
                copies=tuple(map(_copy_from, body["copies"])),
                fills=tuple(map(_fill_from, body.get("fills", ()))),
                targets={
                    name: TargetInfo(str(dtype), tuple(shape), tuple(strides))
                    for name, (dtype, shape, strides) in body["targets"].items()
                },
                unplanned=tuple(body["unplanned"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(os.fspath(path), None, f"is not a saved plan: {error!r}") from error


def _copy_from(row: Sequence[Any]) -> Copy:
    tensor, file, target, src_start, dst_start, shape, src_strides, dst_strides, *dtypes = row
    src_dtype, dst_dtype, via = (*map(str, dtypes), "")[:3]
    return Copy(
        tensor, file, target, int(src_start), int(dst_start), tuple(map(int, shape)),
        tuple(map(int, src_strides)), tuple(map(int, dst_strides)), src_dtype, dst_dtype, via,
    )  # fmt: skip


def _fill_from(row: Sequence[Any]) -> Fill:
    target, dst_start, shape, dst_strides, dst_dtype, value = row
    return Fill(
        str(target),
        int(dst_start),
        tuple(map(int, shape)),
        tuple(map(int, dst_strides)),
        str(dst_dtype),
        number_from(value),
    )
