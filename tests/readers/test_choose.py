"""Which strategy is chosen for which facts, and that the facts are found."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.node import page_cache
from raywl.readers import facts as facts_module
from raywl.readers.choose import Facts, Probe, choose, needs_memory, needs_probe, num_threads_for
from raywl.readers.facts import gather
from raywl.readers.files import OpenFiles
from raywl.strategies import STRATEGIES

from .conftest import mounted

GIB = 1 << 30
COLD = {"resident": 0.0, "available_bytes": 100 * GIB}


def chosen(asked: str | None = None, **values) -> tuple[str, str]:
    """The strategy, and the reasons in one line."""
    known = {"fs_type": "ext4", "wanted_bytes": 2 * GIB, "resident": None, **values}
    choice = choose(Facts(**known), asked)
    return choice.strategy, "; ".join(choice.reasons)


@pytest.mark.parametrize(
    ("facts", "strategy", "why"),
    [
        ({"wanted_bytes": 1000}, "buffered", "only 1000 B to read"),
        ({"resident": 1.0}, "buffered", "100% of 2.0 GiB in the page cache"),
        ({"resident": 0.97, "strided_bytes": 2 * GIB}, "mmap", "most of it is strided"),
        ({"resident": 0.5, "strided_bytes": 2 * GIB, "available_bytes": 4 * GIB}, "buffered", "50% of"),
        ({**COLD, "available_bytes": GIB}, "direct", "2.0 GiB to read, 1.0 GiB of memory available"),
        (
            {**COLD, "available_bytes": GIB, "shared_bytes": GIB, "num_local_ranks": 4},
            "buffered",
            "1.0 GiB of it are for 3 other ranks of this node too",
        ),
        ({**COLD, "probe": Probe(1e9, 1.1e9)}, "buffered", "1.0 GiB/s past it"),
        ({**COLD, "probe": Probe(1e9, 2e9)}, "direct", "a probe read"),
        ({**COLD, "probe": Probe(1e9, None)}, "buffered", "past it nothing"),
        ({"available_bytes": GIB}, "direct", "what of it is in the page cache can't be seen"),
        ({"fs_type": "nfs4", "available_bytes": 3 * GIB}, "prefetch", "prefetch on nfs4"),
        ({"fs_type": "nfs4", "available_bytes": 2 * GIB}, "buffered", "no prefetch on nfs4: more than 90 %"),
        ({"fs_type": "", "resident": 1.0, "strided_bytes": 2 * GIB}, "buffered", "an unknown file system"),
        ({"fs_type": "cifs", **COLD, "available_bytes": GIB}, "buffered", "on cifs"),
    ],
)
def test_what_is_chosen(facts, strategy, why):
    found, reasons = chosen(**facts)
    assert found == strategy
    assert why in reasons


@pytest.mark.parametrize("asked", STRATEGIES[1:])
def test_what_is_asked_for_is_done(asked):
    assert chosen(asked, available_bytes=GIB, resident=1.0)[0] == asked


@pytest.mark.parametrize("asked", [None, "buffered", "prefetch"])
def test_holes_end_reading_ahead(asked):
    """A plan that leaves out much between its reads; whoever chose to read through the page cache."""
    sparse = Facts("ext4", 2 * GIB, unwanted_bytes=GIB, **COLD)
    choice = choose(sparse, asked)
    assert choice.random
    assert "1.0 GiB between the reads aren't wanted" in choice.note
    assert not choose(Facts("ext4", 2 * GIB, unwanted_bytes=1 << 20, **COLD), asked).random
    assert not choose(Facts("nfs4", 2 * GIB, unwanted_bytes=GIB, **COLD), asked).random


facts = st.builds(
    Facts,
    fs_type=st.sampled_from(["ext4", "nfs4", "", "cifs", "tmpfs"]),
    wanted_bytes=st.integers(1, 8 * GIB),
    strided_bytes=st.integers(0, 8 * GIB),
    shared_bytes=st.sampled_from([0, GIB]),
    unwanted_bytes=st.integers(0, 8 * GIB),
    num_local_ranks=st.integers(1, 8),
    resident=st.none() | st.floats(0, 1),
)


@given(facts, st.integers(0, 8 * GIB), st.none() | st.sampled_from(STRATEGIES))
def test_there_is_always_a_choice(known, available_bytes, asked):
    """With only the facts that were asked for; never one that a file system can't take."""
    import dataclasses

    if needs_memory(known, asked):
        known = dataclasses.replace(known, available_bytes=available_bytes)
    if needs_probe(known, asked):
        known = dataclasses.replace(known, probe=Probe(1e9, 2e9))
    choice = choose(known, asked)
    assert choice.strategy in STRATEGIES[1:]
    assert choice.reasons
    if asked in (None, "auto") and choice.strategy in ("mmap", "direct"):
        assert known.fs_type in ("ext4", "tmpfs")


@pytest.mark.parametrize(
    ("cores", "ranks", "warm", "threads"),
    [
        (2, 1, True, 2),
        (2, 1, False, 4),
        (2, 4, True, 1),
        (2, 4, False, 2),
        (64, 1, True, 8),
        (64, 8, False, 2),
    ],
)
def test_threads(cores, ranks, warm, threads):
    assert num_threads_for(cores, ranks, warm) == threads


# Facts of real files.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten tensors of 1 MiB in two files."""
    path = tmp_path_factory.mktemp("facts")
    for number in (1, 2):
        tensors = {f"w{number}{i}": torch.full((512, 512), float(i)) for i in range(5)}
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


def found(folder, names=None, shards=None, ranks=1, asked=None, context=None):
    checkpoint = raywl.open_checkpoint(folder)
    plan = checkpoint.plan(context, shards, names)
    with OpenFiles(checkpoint) as files:
        return gather(checkpoint, files, plan.reads, ranks, asked)


def test_facts_of_a_whole_checkpoint(folder):
    known = found(folder)
    assert known.wanted_bytes == 10 << 20
    assert known.strided_bytes == known.shared_bytes == known.unwanted_bytes == 0
    assert known.fs_type


def test_facts_of_a_part(folder):
    """Tensors that are left out lie between those that are read."""
    known = found(folder, names=["w10", "w14", "w20", "w21"])
    assert known.wanted_bytes == 4 << 20
    assert known.unwanted_bytes == 3 << 20


@pytest.mark.parametrize(("dim", "ranks", "strided", "shared", "unwanted"), [
    (1, 2, 10 << 20, 5 << 20, 0),
    (1, 1, 10 << 20, 0, 0),
    (0, 2, 0, 0, 0),
    (0, 1, 0, 0, 4 << 20),
])  # fmt: skip
def test_facts_of_a_rank(folder, dim, ranks, strided, shared, unwanted):
    """Columns share their rows with other ranks; rows of other ranks aren't unwanted on this node."""
    context = raywl.ParallelContext(tp_rank=0, tp_size=2)
    known = found(folder, shards={"*": raywl.Shard(dim)}, ranks=ranks, context=context)
    # The last row of each column cut ends early.
    assert known.strided_bytes == pytest.approx(strided, rel=0.01)
    assert known.shared_bytes == pytest.approx(shared, rel=0.01)
    assert known.unwanted_bytes == unwanted


def test_whole_tensors_are_shared(folder):
    context = raywl.ParallelContext(tp_rank=0, tp_size=2)
    assert found(folder, ranks=2, context=context).shared_bytes == 10 << 20


def test_what_is_resident_is_sampled(folder, monkeypatch):
    monkeypatch.setattr(facts_module, "SMALL_BYTES", 0)
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        page_cache.drop(str(path))
    if page_cache.resident_bytes(str(paths[0])) != 0:
        pytest.skip("this file system keeps its pages")
    # Opening reads the headers, and the kernel a little more.
    assert found(folder).resident < 0.4
    paths[0].read_bytes()
    assert 0.4 < found(folder).resident < 0.8
    paths[1].read_bytes()
    assert found(folder).resident == 1


def test_a_probe_measures_both_ways(folder, monkeypatch):
    monkeypatch.setattr(facts_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(facts_module, "needs_probe", lambda *args: True)
    known = found(folder)
    assert known.probe.buffered_bytes_per_s > 0
    assert known.probe.direct_bytes_per_s is None or known.probe.direct_bytes_per_s > 0


def test_a_probe_tells_the_limit(folder, monkeypatch):
    """And the report says how near the load came."""
    monkeypatch.setattr(facts_module, "needs_probe", lambda *args: True)
    report = raywl.load_into(Model(), folder)
    assert report.limit_bytes_per_s > 0
    assert report.limit_ratio == pytest.approx(report.read_bytes_per_s / report.limit_bytes_per_s)
    assert raywl.load_into(Model(), folder, strategy="buffered").limit_ratio is not None
    monkeypatch.undo()
    assert raywl.load_into(Model(), folder).limit_ratio is None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in (1, 2):
            for i in range(5):
                self.register_parameter(f"w{number}{i}", nn.Parameter(torch.empty(512, 512)))


def test_the_choice_is_said_and_logged(folder, caplog):
    """In the report's notes, with every reason, and in the log."""
    with caplog.at_level("INFO", logger="raywl"):
        (note,) = raywl.load_into(Model(), folder).notes
    assert note.startswith("strategy buffered: on ")
    assert "10.0 MiB to read" in note
    assert note in caplog.text


def test_the_choice_goes_by_the_table_of_mounts(folder, tmp_path, monkeypatch):
    for fs_type, strategy in (("nfs4", "prefetch"), ("ext4", "buffered"), ("cifs", "buffered")):
        mounted(folder, fs_type, monkeypatch)
        (note,) = raywl.load_into(Model(), folder).notes
        assert note.startswith(f"strategy {strategy}: ")
        assert fs_type in note
    assert os.path.exists(folder)


def test_holes_are_advised_to_the_kernel(folder, monkeypatch):
    """Once for each file that is opened."""
    advised = []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (advised.append(args[3]), real(*args))[1])
    names = ["w10", "w14", "w20", "w24"]
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.empty(512, 512)))
    with pytest.warns(UserWarning, match="no place"):
        report = raywl.load_into(model, folder, strategy="buffered")
    assert advised == [os.POSIX_FADV_RANDOM] * 2
    assert any("aren't wanted" in note for note in report.notes)
    assert torch.equal(model.w14, torch.full((512, 512), 4.0))
