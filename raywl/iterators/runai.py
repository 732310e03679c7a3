"""Weights through the Run:ai model streamer; some files can go to the CPU, read by one rank for several."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.errors import CapacityError, ClusterError, some_of
from raywl.iterators.files import FileWork, as_paths, plan_files
from raywl.iterators.libraries import (
    check_same_files,
    give_out,
    load_library,
    read_with,
    shown_files,
    unreadable,
)
from raywl.iterators.reading import read_lazily
from raywl.iterators.tally import Tally
from raywl.iterators.together import Ranks, check_same, resolve_group, together

__all__ = ["READABLE", "runai_safetensors_weights_iterator"]

_PACKAGE = "runai-model-streamer"

Weights = Generator[tuple[str, torch.Tensor], None, None]

READABLE = frozenset(
    "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64 F4".split()
)
"""The dtypes that the library reads as the format means them."""

_CPU_FILES = "RUNAI_CPU_WEIGHT_FILES"
"""Base names, with commas between, of the files to be read to the CPU; after `RAYWL_` or `VLLM_`."""
_CPU_LIMIT = "RUNAI_CPU_MEMORY_LIMIT"
"""Bytes that the library may take for them; likewise. By default what the file takes: it is held anyway."""

_LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
_DEFAULT_LIMIT = 40_000_000_000
_NO_LIMIT = -1
_MIN_BUFFERS = 4
_LIBRARY = "runai_model_streamer", _PACKAGE, "runai"
_environment = threading.Lock()


def runai_safetensors_weights_iterator(
    hf_weights_files: Iterable[str | PathLike[str]],
    use_tqdm_on_load: bool,
    is_distributed: bool = False,
    cpu_weights_group: Any = None,
    is_shared_cpu_weight: Callable[[str], bool] | None = None,
    process_group: Any = ...,
) -> Weights:
    """Iterates over the weights of safetensors files, read by `runai-model-streamer`.

    One file is held at a time; files come in natural order, the tensors of a file by name. Files that
    `RAYWL_RUNAI_CPU_WEIGHT_FILES` (or `VLLM_RUNAI_CPU_WEIGHT_FILES`) names come after all others, on the CPU,
    under the memory limit of `RAYWL_RUNAI_CPU_MEMORY_LIMIT`.

    When one of several ranks fails, stops early or dies, the others get an error at once, with its text.

    Args:
        hf_weights_files: Safetensors files.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress.
        is_distributed: Tensors come on the current GPU where there is one, and the ranks of `process_group`
            read each file once between them, where the library can do that.
        cpu_weights_group: Ranks of which the first alone reads the files for the CPU. The others get its
            tensors by broadcast, or as `meta` tensors where they are shared.
        is_shared_cpu_weight: Whether a tensor, by its name, is shared by other means; the same on all ranks.
        process_group: The ranks that read together; by default those of the world group, where there is one.

    Raises:
        ImportError: The library isn't installed.
        ValueError: An address in place of a path; a memory limit that is no number; a group that this process
            isn't in.
        CapacityError: A tensor is larger than the library's memory limit.
        CheckpointError: A file is damaged, or the library can't read it.
        ClusterError: Another rank has failed, or the ranks disagree on files or shared tensors.
    """
    files = as_paths(hf_weights_files)
    if addresses := [path for path in files if "://" in path]:
        raise ValueError(
            f"hf_weights_files are paths of this machine, not addresses ({some_of(addresses)}): "
            "raywl.load_into and raywl.open_checkpoint take those"
        )
    if is_shared_cpu_weight is not None and not callable(is_shared_cpu_weight):
        raise TypeError(f"is_shared_cpu_weight must be callable, not {type(is_shared_cpu_weight).__name__}")
    group = resolve_group(process_group) if is_distributed else None
    if group is None and cpu_weights_group is None:
        # Else found when the other ranks can be told.
        load_library(*_LIBRARY)
    job = _Job(files, use_tqdm_on_load, is_distributed, group, cpu_weights_group, is_shared_cpu_weight)
    return _run(job)


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for."""

    files: list[str]
    use_tqdm_on_load: bool
    to_gpu: bool
    group: Any
    cpu_group: Any
    is_shared: Callable[[str], bool] | None


def _run(job: _Job) -> Weights:
    with contextlib.ExitStack() as stack:
        # Left last: ranks leave word of what ends them before the library closes what the others wait at.
        streamer = stack.enter_context(_Streamer(job.to_gpu))
        readers = stack.enter_context(together(_all_or_none(job.group), "process_group"))
        sharers = stack.enter_context(together(job.cpu_group, "cpu_weights_group"))
        streamer.open(readers)
        plan = _plan(job, sharers)
        if readers is not None:
            check_same_files(readers.gather(shown_files(plan.others)))
        own = unreadable(_PACKAGE, plan.others + plan.cpu, READABLE)
        streamer.check_limits(plan, own)
        tally = Tally(sum(work.nbytes for work in plan.others + plan.cpu), job.use_tqdm_on_load)
        for work in plan.others:
            for ranks in (readers, sharers):
                if ranks is not None:
                    ranks.check()
            yield from _read(work, tally, streamer, own, streamer.device)
        if sharers is None or sharers.is_reader:
            for number, (name, tensor) in enumerate(_read_cpu(plan, tally, streamer, own)):
                if sharers is not None:
                    sharers.step(number)
                    if name not in plan.shared:
                        sharers.tensor_from_reader(tensor)
                yield name, tensor
        else:
            yield from _receive(plan, sharers)
        for ranks in (readers, sharers):
            if ranks is not None:
                # One that fails with its last tensor is still heard.
                ranks.gather("done")


def _read(
    work: FileWork,
    tally: Tally,
    streamer: _Streamer,
    own: frozenset[str],
    device: str,
    limit: int | None = None,
) -> Weights:
    """The tensors of one file, by the library where it can read them."""
    if work.path in own:
        for name, tensor in read_lazily(work, tally):
            yield name, tensor.to(device)
    elif work.names:
        tally.starts(work)
        tensors = read_with(_PACKAGE, work, lambda: streamer.read(work, device, limit))
        largest = max(entry.nbytes for entry in work.entries.values())
        # The library packs tensors into buffers, of a fraction of the file or as large as the largest.
        buffer_bytes = max(largest, work.file.size // _MIN_BUFFERS) if device == "cpu" else 0
        yield from give_out(work, tensors, tally, buffer_bytes=buffer_bytes)


def _read_cpu(plan: _Plan, tally: Tally, streamer: _Streamer, own: frozenset[str]) -> Weights:
    limit = _limit_of(*_spelled(_CPU_LIMIT), _NO_LIMIT)
    for work in plan.cpu:
        yield from _read(work, tally, streamer, own, "cpu", limit)


def _receive(plan: _Plan, sharers: Ranks) -> Weights:
    """What the reader reads, as the other ranks get it."""
    for number, (name, dtype, shape) in enumerate(plan.parts):
        sharers.step(number)
        device = "meta" if name in plan.shared else "cpu"
        tensor = torch.empty(torch_shape(dtype, tuple(shape)), dtype=torch_dtype(dtype), device=device)
        if name not in plan.shared:
            sharers.tensor_from_reader(tensor)
        yield name, tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is read, and how."""

    others: list[FileWork]
    """The files that each rank reads, or all read together."""
    cpu: list[FileWork]
    """Those for the CPU that are read here."""
    parts: list[list[Any]]
    """Name, dtype and shape of the tensors that one rank reads to the CPU for all, in their order."""
    shared: frozenset[str]
    """Those of them that come as `meta` tensors where they aren't read."""


def _plan(job: _Job, sharers: Ranks | None) -> _Plan:
    cpu_names = _cpu_names(job.files)
    for_cpu = [path for path in job.files if os.path.basename(path) in cpu_names]
    if sharers is not None:
        names = sorted(map(os.path.basename, for_cpu))
        check_same("files for the CPU", sharers.gather(names), lambda names: some_of(names) or "none")
    here = sharers is None or sharers.is_reader
    works = plan_files(job.files if here else [path for path in job.files if path not in for_cpu])
    others = [work for work in works if os.path.basename(work.path) not in cpu_names]
    cpu = [work for work in works if os.path.basename(work.path) in cpu_names]
    if sharers is None:
        return _Plan(others, cpu, [], frozenset())
    parts = sharers.from_reader(
        [
            [name, work.entries[name].dtype, list(work.entries[name].shape)]
            for work in cpu
            for name in work.names
        ]
    )
    if not here:
        # A tensor that is in files of both kinds comes from the one that the reader takes it from.
        taken = {name for name, _, _ in parts}
        others = [replace(work, names=tuple(n for n in work.names if n not in taken)) for work in others]
    is_shared = job.is_shared or (lambda name: False)
    shared = [name for name, _, _ in parts if is_shared(name)]
    _check_shared(sharers.gather(shared))
    return _Plan(others, cpu, parts, frozenset(shared))


def _check_shared(rows: list[list[str]]) -> None:
    """Raises `ClusterError` where the ranks don't mean the same tensors by shared ones."""
    for rank, names in enumerate(rows):
        for one, other, different in (
            (0, rank, sorted(set(rows[0]) - set(names))),
            (rank, 0, sorted(set(names) - set(rows[0]))),
        ):
            if different:
                raise ClusterError(
                    f"the ranks disagree on shared tensors: these are shared on rank {one}, and not on rank "
                    f"{other}: {some_of(different)}"
                )


def _spelled(name: str) -> tuple[str, str | None]:
    """The name that a setting has in the environment, and its value; raywl's spelling comes first."""
    for prefix in ("RAYWL_", "VLLM_"):
        if (value := os.environ.get(prefix + name)) is not None:
            return prefix + name, value
    return f"RAYWL_{name}", None


def _cpu_names(files: list[str]) -> frozenset[str]:
    """Base names of the files for the CPU, those that aren't among the files included."""
    setting, value = _spelled(_CPU_FILES)
    names = frozenset(name.strip() for name in (value or "").split(",") if name.strip())
    if absent := sorted(names - {os.path.basename(path) for path in files}):
        warnings.warn(f"{setting} names files that aren't there: {some_of(absent)}", stacklevel=4)
    return names


def _limit_of(setting: str, value: str | None, default: int) -> int:
    try:
        limit = default if value is None else int(value)
    except ValueError:
        limit = _NO_LIMIT - 1
    if limit < _NO_LIMIT:
        raise ValueError(f"{setting} must be a number of bytes, or -1 for no limit, not {value!r}")
    return limit


def _all_or_none(group: Any) -> Any:
    """The group, if it has all ranks of the world: the library shares reads between all of them or none."""
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return group
    warnings.warn(
        f"{_PACKAGE} shares reads between all {dist.get_world_size()} ranks only: each of the "
        f"{dist.get_world_size(group)} of process_group reads for itself",
        stacklevel=4,
    )
    return None


class _Streamer(contextlib.AbstractContextManager["_Streamer"]):
    """The library's streamer, one session for all files."""

    def __init__(self, to_gpu: bool) -> None:
        on_gpu = to_gpu and torch.cuda.is_available()
        self.device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        self._stack = contextlib.ExitStack()
        self._streamer: Any = None
        self._readers: Ranks | None = None

    def open(self, readers: Ranks | None) -> None:
        """Begins the session.

        Args:
            readers: The ranks that read files for the GPU together.
        """
        library = load_library(*_LIBRARY)
        self._streamer = self._stack.enter_context(library.SafetensorsStreamer())
        self._readers = readers

    def check_limits(self, plan: _Plan, own: frozenset[str]) -> None:
        """Raises `CapacityError`, with the numbers, where a tensor is larger than the library's limit."""
        for works, (setting, value), default in (
            (plan.others if self._readers is None else [], (_LIMIT, os.environ.get(_LIMIT)), _DEFAULT_LIMIT),
            (plan.cpu, _spelled(_CPU_LIMIT), _NO_LIMIT),
        ):
            limit = _limit_of(setting, value, default)
            for work in works:
                needed = max([work.file.data_start, *(entry.nbytes for entry in work.entries.values())])
                if 0 < limit < needed and work.path not in own:
                    raise CapacityError(
                        f"memory for {_PACKAGE}", needed, limit,
                        f"the largest tensor of {work.path} must fit into {setting}", unit="bytes",
                    )  # fmt: skip

    def read(self, work: FileWork, device: str, limit: int | None) -> dict[str, torch.Tensor]:
        """All tensors of one file.

        Args:
            work: The file.
            device: Where they go.
            limit: The library's memory limit; `None` for the one that it has anyway, and for reading the file
                together with other ranks where there are any.
        """
        shares = self._readers is not None and limit is None
        try:
            with _memory_limit(limit):
                self._streamer.stream_files([work.path], device=device, is_distributed=shares)
                return dict(self._streamer.get_tensors())
        except Exception as error:
            if self._readers is None or not shares:
                raise
            # Its frames hold the library's process group, whose connections close with the last reference to
            # it: while somebody keeps the error, the others would wait for this rank.
            traceback.clear_frames(error.__traceback__)
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            # The library's own errors are of another class: this is another rank that has gone.
            raise self._readers.lost(error) from error

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextlib.contextmanager
def _memory_limit(limit: int | None) -> Iterator[None]:
    """Gives the library a memory limit in the block, the one way it takes any: by the environment."""
    if limit is None:
        yield
        return
    with _environment:
        before = os.environ.get(_LIMIT)
        os.environ[_LIMIT] = str(limit)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_LIMIT, None)
            else:
                os.environ[_LIMIT] = before
