"""What all iterators have in common, and each of them is held to: `registry.WAYS`."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import pytest
import torch

from raywl.checkpoint.index import natural_sort_key
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.node import page_cache
from raywl.remap.experts import should_skip_weight
from raywl.types import ParallelContext
from tests.hostile.files import build, entry
from tests.iterators.checkpoints import (
    CHECKPOINTS,
    collect,
    experts,
    make,
    many_files,
    row,
    rows_of,
    write,
    written_before_1_6,
)
from tests.iterators.registry import WAYS, Way

WAIT_S = 30.0
READ_ONLY = CHECKPOINTS | {
    "12-files": lambda: many_files(12, 300_000),
    "40-files": lambda: many_files(40, 2000),
    "120-MiB": lambda: {f"m-{i}": {f"{part}{i}": make("U8", 1 << 20) for part in "abc"} for i in range(40)},
}


@pytest.fixture(params=WAYS, ids=lambda way: way.id)
def way(request) -> Way:
    if request.param.needs is not None:
        pytest.importorskip(request.param.needs)
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[Way, str], list[str]]:
    """Paths of a checkpoint that is written once for all ways of one kind, to be read only."""
    written: dict[tuple[str, str], list[str]] = {}

    def paths_of(way: Way, name: str) -> list[str]:
        key = (way.kind, name)
        if key not in written:
            files = READ_ONLY[name]()
            if way.kind == "legacy":
                files = written_before_1_6(files)
            written[key] = write(files, tmp_path_factory.mktemp("checkpoint"), way.kind)
        return written[key]

    return paths_of


def with_experts(way: Way) -> Way:
    if not way.has_experts:
        pytest.skip("takes no experts")
    return way


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_names_values_dtypes_and_order(way, name, checkpoint):
    """The same for all; what was given first is still the same at the end."""
    files = CHECKPOINTS[name]()
    if way.kind == "legacy":
        files = written_before_1_6(files)
    assert collect(way(checkpoint(way, name))) == rows_of(files)


def test_files_in_any_order_and_of_any_kind(way, tmp_path):
    """Paths as text or `Path`, in a list, a tuple or a generator."""
    files = many_files(3)
    paths = write(files, tmp_path, way.kind)
    for given in (paths[::-1], [Path(path) for path in paths], tuple(paths)):
        assert collect(way(list(given))) == rows_of(files)
    if not way.id.startswith("np-cache"):
        assert collect(way(path for path in paths)) == rows_of(files)


def test_nothing_given_nothing_read(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(way([])) == []


def test_one_path_is_no_list(way, tmp_path):
    """It would be taken for its letters; said when the iterator is made."""
    path = write(many_files(1), tmp_path, way.kind)[0]
    for wrong in (path, Path(path)):
        with pytest.raises(TypeError, match="list of paths"):
            way(wrong)


def test_it_is_a_generator(way, tmp_path):
    """It can be closed, also before it has begun; and reads nothing until it is asked."""
    weights = way([str(tmp_path / f"absent{way.suffix}")])
    assert isinstance(weights, Generator)
    weights.close()


@pytest.mark.parametrize(
    "ids",
    [[0, 2], set(), range(4), torch.tensor([1])],
    ids=["list", "set", "range", "tensor"],
)
def test_experts(way, ids, tmp_path):
    """Heavy tensors of other experts are left out, by any iterable of ids."""
    files = experts()
    paths = write(files, tmp_path, with_experts(way).kind)
    ids = list(ids)
    given = collect(way(paths, local_expert_ids=iter(ids)))
    own = {int(id_) for id_ in ids}
    assert given == [row for row in rows_of(files) if not should_skip_weight(row.name, own)]
    assert any(row.name.endswith("experts.1.w1.weight_scale") for row in given)


def test_what_is_no_expert_id(way, tmp_path):
    paths = write(experts(), tmp_path, with_experts(way).kind)
    with pytest.raises(ValueError, match="expert id"):
        way(paths, local_expert_ids=["1"])


def test_bytes_counted(way, tmp_path):
    """All iterators count the same bytes as read: those of the tensors."""
    files = many_files(4) | experts()
    total = sum(len(made.raw) for tensors in files.values() for made in tensors.values())
    paths = write(files, tmp_path, way.kind)
    seen: list[tuple[int, int, str]] = []
    list(way(paths, lambda *args: seen.append(args)))
    seen = [row for row in seen if row[2] == "read"]
    assert seen[-1] == (total, total, "read")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    if way.has_experts:
        seen.clear()
        given = collect(way(paths, lambda *args: seen.append(args), local_expert_ids=[1]))
        own = total if way.reads_whole_files else sum(len(row.raw) for row in given)
        assert seen[-1] == (own, own, "read")


def test_progress_is_shown_by_local_rank_0_if_asked(way, tmp_path, capsys):
    paths = write(many_files(2), tmp_path, way.kind)
    for context, asked, shown in (
        (ParallelContext(), True, True),
        (ParallelContext(), False, False),
        (ParallelContext(local_rank=1, local_size=2), True, False),
        (ParallelContext(tp_rank=1, tp_size=2), True, True),
    ):
        with context:
            list(way(paths, asked))
        assert ("100 %" in capsys.readouterr().err) is shown


def test_files_read_are_recorded(way, tmp_path):
    """So that the page cache can be given back, of those that were begun."""
    paths = write(many_files(3), tmp_path, way.kind)
    page_cache.release_checkpoint_page_cache()
    weights = way(paths)
    next(weights)
    begun = list(page_cache._recorded)
    list(weights)
    recorded = list(page_cache._recorded)
    page_cache.release_checkpoint_page_cache()
    assert 1 <= len(begun) < len(recorded)
    if not way.id.startswith("np-cache"):
        assert sorted(recorded) == sorted(map(os.path.realpath, paths))


def test_absent_files_are_named_first(way, tmp_path):
    """C01: before any tensor, all of them."""
    paths = write(many_files(3), tmp_path, way.kind)
    os.unlink(paths[0])
    os.unlink(paths[1])
    os.symlink(tmp_path / "nowhere", paths[1])
    with pytest.raises(MissingFileError, match="2 of 3") as caught:
        next(way(paths))
    assert sorted(caught.value.files) == sorted(paths[:2])


@pytest.mark.parametrize("what", ["short", "half", "long", "empty", "lfs", "garbage"])
def test_damage_is_found_first(way, what, tmp_path):
    """C80: in the last file, before the first tensor; the file is named."""
    *_, last = paths = sorted(write(many_files(3, 4000), tmp_path, way.kind))
    whole = Path(last).read_bytes()
    content = {
        "short": whole[:-1],
        "half": whole[: len(whole) // 2],
        "long": whole + b"x",
        "empty": b"",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        "garbage": b"\1" * 100,
    }[what]
    if what == "long" and way.kind == "torch":
        pytest.skip("zip archives may have a comment at their end")
    Path(last).write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        next(way(paths))
    assert caught.value.path == last
    assert last in str(caught.value)


def test_a_dtype_that_torch_lacks(way, tmp_path):
    """C76: F6 is an error that names tensor and file, before any tensor."""
    if way.kind != "safetensors":
        pytest.skip("torch writes no such file")
    paths = write(many_files(2), tmp_path, way.kind)
    bad = tmp_path / "zzz.safetensors"
    bad.write_bytes(build({"odd": entry("F6_E2M3", [4], [0, 3])}, bytes(3)))
    with pytest.raises(CheckpointError, match="F6_E2M3") as caught:
        next(way([*paths, str(bad)]))
    assert (caught.value.path, caught.value.tensor) == (str(bad), "odd")


def test_equal_doubles_come_once(way, tmp_path):
    """With one warning that names both files."""
    same, empty = make("BF16", 7, seed="same"), make("F32", 0)
    files = {
        "m-1": {"a": same, "b": make("F32", 2), "e": empty},
        "m-2": {"a": same, "c": make("F32", 3), "e": empty},
        "m-10": {"a": same},
    }
    paths = write(files, tmp_path, way.kind)
    with pytest.warns(UserWarning, match="m-1") as caught:
        given = collect(way(paths))
    assert [row.name for row in given] == ["a", "b", "e", "c"]
    about = [str(w.message) for w in caught if "several files" in str(w.message)]
    assert len(about) == 1
    assert "m-2" in about[0]


@pytest.mark.parametrize(
    "other",
    [make("BF16", 7, seed=1), make("BF16", 7, 1, seed=0), make("F16", 7, seed=0)],
    ids=lambda m: str(m[:2]),
)
def test_doubles_that_differ(way, other, tmp_path):
    """An error with both files and the tensor, before any tensor."""
    one = make("BF16", 7, seed=0)
    if other.raw != one.raw and other.shape != (7,):
        other = other._replace(raw=one.raw)
    paths = write({"m-1": {"0": make("F32", 1), "a": one}, "m-2": {"a": other}}, tmp_path, way.kind)
    with pytest.raises(CheckpointError) as caught:
        next(way(paths))
    assert caught.value.tensor == "a"
    assert all(path in str(caught.value) for path in paths)


def test_one_file_given_twice(way, tmp_path):
    (path,) = write(many_files(1), tmp_path, way.kind)
    with pytest.warns(UserWarning, match="given twice"):
        assert collect(way([path, path])) == rows_of(many_files(1))


def test_a_file_that_is_cut_before_it_is_read(way, tmp_path):
    """C52: an error that names the file, after the header was read."""
    files = {f"m-{i}": {f"{part}{i}": make("U8", 9000) for part in "ab"} for i in range(9)}
    paths = sorted(write(files, tmp_path, way.kind))
    if way.id.startswith("np-cache"):
        # What is read are the dumps.
        list(way(paths))
        cut = max(map(str, tmp_path.glob("np/*/*.npy")), key=natural_sort_key)
    else:
        cut = paths[-1]
    weights = way(paths)
    assert row(*next(weights)).raw == make("U8", 9000).raw
    os.truncate(cut, 4096)
    with pytest.raises(CheckpointError, match=re.escape(cut)):
        list(weights)


def test_a_file_that_is_replaced_before_it_is_read(way, tmp_path):
    """What was planned with one file isn't read from another."""
    if way.id.startswith("np-cache"):
        pytest.skip("reads its dump")
    *_, last = paths = sorted(write(many_files(9), tmp_path, way.kind))
    weights = way(paths)
    next(weights)
    other = write({"other": {f"m9.{part}": make("F32", 40, seed=1) for part in "abc"}}, tmp_path, way.kind)[0]
    os.replace(other, last)
    with pytest.raises(CheckpointError, match=re.escape(last)):
        list(weights)


def test_under_a_default_device(way, tmp_path):
    """Models are made on `meta`; what is read is not."""
    files = many_files(2)
    with torch.device("meta"):
        held = list(way(write(files, tmp_path, way.kind)))
    assert collect(held) == rows_of(files)


def test_tensors_are_the_consumers_own(way, tmp_path):
    """C84: they need no gradient, and what is written to them reaches no file and no other tensor.

    C42: no memory is used twice. A consumer that is late, by a whole checkpoint, finds what was given out.
    """
    files = many_files(3)
    paths = write(files, tmp_path, way.kind)
    before = [Path(path).read_bytes() for path in paths]
    held = list(way(paths))
    for _, tensor in held:
        assert not tensor.requires_grad
        assert type(tensor) is torch.Tensor
        tensor.add_(1)
    assert [Path(path).read_bytes() for path in paths] == before
    assert collect(way(paths)) == rows_of(files)
    for name, tensor in held:
        (made,) = (tensors[name] for tensors in files.values() if name in tensors)
        assert torch.equal(tensor, made.tensor() + 1)


def held_open(folder: Path) -> set[str]:
    """Files of a folder that this process has open or mapped."""
    found = set(Path("/proc/self/maps").read_text().splitlines())
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {line for line in found if str(folder) in line}


def threads_but(before: list[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("after", [1, 4])
def test_a_consumer_that_stops_early(way, after, checkpoint):
    """Closing ends threads at once, closes files, and frees what was read ahead."""
    paths = checkpoint(way, "12-files")
    if way.id.startswith("np-cache"):
        list(way(paths))
    before = threading.enumerate()
    weights = way(paths)
    for _ in range(after):
        name, tensor = next(weights)
    start_s = time.monotonic()
    weights.close()
    assert time.monotonic() - start_s < WAIT_S / 3
    assert threads_but(before) == []
    value = row(name, tensor)
    alive = weakref.ref(tensor)
    del tensor, weights
    assert alive() is None
    assert held_open(Path(paths[0]).parent) == set()
    assert len(value.raw) == 1_200_000


def test_an_iterator_that_is_dropped(way, checkpoint):
    """As by a consumer that fails: what it holds goes with it."""
    paths = checkpoint(way, "12-files")
    before = threading.enumerate()
    weights = way(paths)
    next(weights)
    del weights
    assert threads_but(before) == []
    assert held_open(Path(paths[0]).parent) == set()


class Resident:
    """Counts files that were begun to be read, by the system calls for them, and not yet passed."""

    def __init__(self, paths: list[str], monkeypatch) -> None:
        self._paths = {os.path.realpath(path): path for path in paths}
        self.begun: set[str] = set()
        self.most = 0
        self._passed = 0
        self._changed = threading.Condition()
        real = os.preadv

        def preadv(fd: int, *args: object) -> int:
            path = os.readlink(f"/proc/self/fd/{fd}")
            # What goes to the page cache alone stays in no memory of this process.
            if path in self._paths and "prefetch" not in threading.current_thread().name:
                with self._changed:
                    self.begun.add(path)
                    self.most = max(self.most, self.now)
                    self._changed.notify_all()
            return real(fd, *args)

        monkeypatch.setattr(os, "preadv", preadv)

    @property
    def now(self) -> int:
        return len(self.begun) - self._passed

    def passed(self, number: int) -> None:
        """The consumer holds nothing of the first `number` files any more."""
        with self._changed:
            self._passed = number

    def wait_for(self, number: int) -> None:
        """Waits until so many files are in memory."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.now >= number, WAIT_S), (self.now, number)


def test_files_in_memory(way, checkpoint, monkeypatch):
    """Of 40 files, however slow the consumer, those that are being read, and as many ahead as promised."""
    paths = checkpoint(way, "40-files")
    if way.id.startswith("np-cache"):
        list(way(paths))
    reads = Resident(paths, monkeypatch)
    # The tensor that the consumer is at counts for those that read ahead.
    given, passed, last = [], 0, 0 if way.max_files > 1 else 2
    for number, (name, tensor) in enumerate(way(paths)):
        given.append(row(name, tensor))
        if number % 3 == last and number:
            passed += 1
            reads.passed(passed)
        if number % 3 == 1 and reads.begun:
            # Now everything is begun that may be.
            reads.wait_for(min(way.max_files, 40 - passed))
    assert given == rows_of(READ_ONLY["40-files"]())
    if way.is_mapped or way.id.startswith("np-cache"):
        assert not reads.begun
    elif reads.begun:
        assert reads.most == way.max_files


def test_memory(way, checkpoint):
    """40 files of 3 MiB: their sum is never in memory."""
    paths = checkpoint(way, "120-MiB")
    if way.id.startswith("np-cache"):
        list(way(paths))
    process = psutil.Process()
    most = before = process.memory_info().rss - process.memory_info().shared
    for _ in way(paths):
        info = process.memory_info()
        most = max(most, info.rss - info.shared)
    assert most - before < (way.max_files * 3 + 48) << 20


def test_warnings_name_the_caller_once(way, tmp_path):
    """A plain checkpoint gives no warning at all."""
    paths = write(many_files(3), tmp_path, way.kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(way(paths))
