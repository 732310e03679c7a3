"""What only the iterators over safetensors files do: strategies, prefetch, and how they read."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from raywl import weight_utils
from raywl.checkpoint.dtypes import TORCH_NAMES
from raywl.errors import CorruptFileError
from raywl.iterators import safetensors as module
from raywl.node import page_cache
from raywl.types import ParallelContext
from tests.iterators.checkpoints import collect, experts, make, many_files, row, write
from tests.iterators.registry import WAYS

WAIT_S = 30.0


@pytest.mark.parametrize("strategy", ["auto", "buffered", "mmap", "Lazy", "", 3, ["lazy"]], ids=str)
def test_an_unknown_strategy(strategy):
    """MUST DIFFER: an error with the list, at once; it used to be taken for lazy. (C54)"""
    with pytest.raises(ValueError, match="lazy, eager, prefetch, torchao"):
        weight_utils.safetensors_weights_iterator([], False, strategy)


@pytest.mark.parametrize("name", ["safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_numbers_that_make_no_prefetch(name, value):
    """Whatever the strategy, since the default one may turn out to prefetch."""
    with pytest.raises(ValueError, match=name):
        weight_utils.safetensors_weights_iterator([], False, **{name: value})


@pytest.mark.parametrize("max_workers", [0, -4, 2.0])
def test_numbers_that_make_no_pool(max_workers):
    for iterator in (
        weight_utils.multi_thread_safetensors_weights_iterator,
        weight_utils.multi_thread_pt_weights_iterator,
    ):
        with pytest.raises(ValueError, match="max_workers"):
            iterator([], False, max_workers=max_workers)


@pytest.fixture
def prefetches(monkeypatch):
    """The prefetches that were started."""
    started = []
    real = module.prefetch_all_checkpoints

    def start(*args):
        started.append(real(*args))
        return started[-1]

    monkeypatch.setattr(module, "prefetch_all_checkpoints", start)
    return started


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "virtiofs", "fuse.s3fs", "ceph", "gpfs", "beegfs", "9p"]
)
def test_prefetch_by_itself_on_network_file_systems(kind, prefetches, tmp_path, monkeypatch):
    """Where it fits into 90 % of memory; else a warning has both sizes. (C50)"""
    paths = write(many_files(2), tmp_path, "safetensors")
    monkeypatch.setattr(module, "fs_type", lambda files: kind)
    list(weight_utils.safetensors_weights_iterator(paths, False))
    assert len(prefetches) == 1
    list(weight_utils.safetensors_weights_iterator(paths, False, "lazy"))
    list(weight_utils.safetensors_weights_iterator(paths, False, "eager"))
    assert len(prefetches) == 1
    size = sum(map(os.path.getsize, paths))
    for available, on in ((-(-size * 10 // 9), True), (size * 10 // 9 - 1, False)):
        prefetches.clear()
        monkeypatch.setattr(module, "available_ram_bytes", lambda available=available: available)
        if on:
            list(weight_utils.safetensors_weights_iterator(paths, False))
        else:
            with pytest.warns(UserWarning, match=f"90 % of memory.*{kind}|{kind}.*90 % of memory"):
                list(weight_utils.safetensors_weights_iterator(paths, False))
        assert len(prefetches) == on


def test_no_prefetch_by_itself_on_others(prefetches, tmp_path, monkeypatch):
    paths = write(many_files(2), tmp_path, "safetensors")
    for kind in ("ext4", "xfs", "tmpfs", "overlay", ""):
        monkeypatch.setattr(module, "fs_type", lambda files, kind=kind: kind)
        list(weight_utils.safetensors_weights_iterator(paths, False))
    assert not prefetches


def test_prefetch_that_was_asked_for(prefetches, tmp_path, monkeypatch):
    """Files that nobody has read yet come to the page cache; also over 90 % of memory, with a warning."""
    paths = sorted(write(many_files(3, 100_000), tmp_path, "safetensors"))
    for path in paths:
        page_cache.drop(path)
    weights = weight_utils.safetensors_weights_iterator(paths, False, "prefetch")
    next(weights)
    (running,) = prefetches
    assert running.join(WAIT_S)
    assert page_cache.resident_fraction(paths[-1]) in (None, 1.0)
    assert running.result.bytes_read == sum(map(os.path.getsize, paths))
    weights.close()
    monkeypatch.setattr(module, "available_ram_bytes", lambda: 1000)
    with pytest.warns(UserWarning, match="90 %"):
        list(weight_utils.safetensors_weights_iterator(paths, False, "prefetch"))
    assert len(prefetches) == 2


def test_nothing_is_prefetched_of_damaged_files(prefetches, tmp_path):
    """C80: an incomplete download is told before minutes are spent on it."""
    paths = write(many_files(3), tmp_path, "safetensors")
    os.truncate(paths[0], os.path.getsize(paths[0]) - 1)
    with pytest.raises(CorruptFileError, match="short by 1"):
        next(weight_utils.safetensors_weights_iterator(paths, False, "prefetch"))
    assert prefetches == []


def test_prefetch_ends_with_its_consumer(prefetches, tmp_path, monkeypatch):
    """Closed half-way, it reads no more than the block that it is at."""
    paths = write(many_files(6, 100_000), tmp_path, "safetensors")
    real, going, gate = os.preadv, threading.Event(), threading.Event()

    def preadv(*args):
        if "prefetch" in threading.current_thread().name:
            going.set()
            assert gate.wait(WAIT_S)
        return real(*args)

    weights = weight_utils.safetensors_weights_iterator(
        paths, False, "prefetch", safetensors_prefetch_num_threads=1, safetensors_prefetch_block_size=1000
    )
    monkeypatch.setattr(os, "preadv", preadv)
    next(weights)
    assert going.wait(WAIT_S)
    (running,) = prefetches
    closer = threading.Thread(target=weights.close)
    closer.start()
    assert running._stop.wait(WAIT_S)
    gate.set()
    closer.join(WAIT_S)
    assert not running.is_running
    assert running.result.stopped
    assert running.result.bytes_read <= 2000


def test_ranks_of_a_node_share_the_prefetch(prefetches, tmp_path):
    """MUST DIFFER: by local rank, so that together they read each file once."""
    paths = write(many_files(5), tmp_path, "safetensors")
    for rank in range(2):
        with ParallelContext(tp_rank=rank + 2, tp_size=4, local_rank=rank, local_size=2):
            weights = weight_utils.safetensors_weights_iterator(paths, False, "prefetch")
            next(weights)
            assert prefetches[-1].join(WAIT_S)
            weights.close()
    assert sum(one.result.bytes_read for one in prefetches) == sum(map(os.path.getsize, paths))
    assert all(one.result.bytes_read for one in prefetches)


@pytest.fixture
def reads(monkeypatch):
    """`(path, start, end)` of each read."""
    made = []
    real = os.preadv

    def preadv(fd, buffers, offset):
        num_bytes = real(fd, buffers, offset)
        made.append((os.readlink(f"/proc/self/fd/{fd}"), offset, offset + num_bytes))
        return num_bytes

    monkeypatch.setattr(os, "preadv", preadv)
    return made


def test_experts_of_others_are_not_read(reads, tmp_path):
    """Lazy and by threads; eager reads whole files, once."""
    files = {"m": {f"experts.{i}.w1.weight": make("U8", 50_000, seed=i) for i in range(8)}}
    (path,) = write(files, tmp_path, "safetensors")
    for iterate in (
        lambda: weight_utils.safetensors_weights_iterator([path], False, "lazy", {3, 4}),
        lambda: weight_utils.multi_thread_safetensors_weights_iterator([path], False, 2, {3, 4}),
    ):
        reads.clear()
        assert len(list(iterate())) == 2
        assert sum(end - start for _, start, end in reads) == 100_000
    reads.clear()
    assert len(list(weight_utils.safetensors_weights_iterator([path], False, "eager", {3, 4}))) == 2
    assert sum(end - start for _, start, end in reads) == 400_000
    # A file with nothing to give out isn't read at all.
    reads.clear()
    assert list(weight_utils.safetensors_weights_iterator([path], False, "eager", {9})) == []
    assert reads == []


def test_lazy_reads_as_it_is_asked(reads, tmp_path):
    """No tensor is read long before it is given out; small neighbours come by one read."""
    files = {
        "m": {f"{i}": make("U8", 17 << 20, seed=0) for i in range(3)}
        | {f"s{i}": make("U8", 100) for i in range(50)}
    }
    (path,) = write(files, tmp_path, "safetensors")
    weights = weight_utils.safetensors_weights_iterator([path], False, "lazy")
    for number in range(3):
        next(weights)
        assert sum(end - start for _, start, end in reads) == (number + 1) * (17 << 20)
    reads.clear()
    assert len(list(weights)) == 50
    assert len(reads) == 1


def test_a_tensor_as_large_as_a_mapping_of_its_own(tmp_path):
    """It may lie on huge pages; its bytes are the same."""
    given = {"a": torch.arange(9 << 20, dtype=torch.int32), "b": torch.ones(3)}
    save_file(given, tmp_path / "m.safetensors")
    for strategy in ("lazy", "eager"):
        found = dict(weight_utils.safetensors_weights_iterator([tmp_path / "m.safetensors"], False, strategy))
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_eager_reads_in_the_order_of_bytes(reads, tmp_path):
    """C83: the order of bytes for speed, the order of names for everybody."""
    names = [f"t{i}" for i in (5, 3, 9, 1, 7)]
    files = {"m": {name: make("U8", 100_000, seed=name) for name in names}}
    (path,) = write(files, tmp_path, "safetensors")
    given = [name for name, _ in weight_utils.safetensors_weights_iterator([path], False, "eager")]
    assert given == sorted(names)
    assert len(reads) == 1
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == given


DTYPES = [dtype for dtype in TORCH_NAMES if dtype not in ("F4", "BOOL")]
LIBRARY = [way for way in WAYS if way.kind == "safetensors" and way.needs is None]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8),
            st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
            max_size=8,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_law_all_ways_give_what_the_library_gives(files, tmp_path_factory):
    """For any names, dtypes, shapes, and any spread over files."""
    folder = tmp_path_factory.mktemp("law")
    made = {
        # Each name is in one file only.
        f"m-{i}": {f"{i}{name}": make(dtype, *shape) for name, (dtype, shape) in tensors.items()}
        for i, tensors in enumerate(files)
    }
    paths = write(made, folder, "safetensors")
    expected = []
    for path in sorted(paths):
        with safe_open(path, "pt") as file:
            expected += [row(name, file.get_tensor(name)) for name in sorted(file.keys())]
    for way in LIBRARY:
        if not way.id.startswith("np-cache"):
            assert collect(way(paths)) == expected


def test_slices_and_tensors(tmp_path):
    """Whatever `safe_open` gives; a tensor is given back as it is."""
    given = {
        "a": torch.randn(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "e8": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
    }
    save_file(given, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        for name, tensor in given.items():
            assert row(name, weight_utils.convert_pyslice_to_tensor(file.get_slice(name))) == row(
                name, tensor
            )
    assert weight_utils.convert_pyslice_to_tensor(given["a"]) is given["a"]


def test_what_is_no_slice(tmp_path):
    """F4 can't be sliced by the library; other frameworks' arrays aren't tensors."""
    path = tmp_path / "m.safetensors"
    save_file(
        {"f4": torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "a": torch.ones(2)}, path
    )
    with safe_open(path, "pt") as file, pytest.raises(ValueError, match=r"F4.*get_tensor"):
        weight_utils.convert_pyslice_to_tensor(file.get_slice("f4"))
    with safe_open(path, "np") as file, pytest.raises(TypeError, match="framework"):
        weight_utils.convert_pyslice_to_tensor(file.get_slice("a"))
    for wrong in (3, [1.0], "a", None):
        with pytest.raises(TypeError, match="slice"):
            weight_utils.convert_pyslice_to_tensor(wrong)


def test_a_lone_experts_files(tmp_path):
    """A file that has nothing for this rank is passed over by every strategy."""
    files = experts() | {"model-9": {"x.experts.1.w1.weight": make("F32", 3)}}
    paths = write(files, tmp_path, "safetensors")
    for way in WAYS:
        if way.has_experts and way.kind == "safetensors":
            names = [name for name, _ in way(paths, local_expert_ids=[0])]
            assert "x.experts.1.w1.weight" not in names
            assert "layers.1.mlp.experts.0.w1.weight" in names
