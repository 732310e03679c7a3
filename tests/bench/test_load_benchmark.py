"""The load benchmark measures what it says: contestants agree bit by bit, caches are as named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from raywl.bench import load as load_module
from raywl.bench import words
from raywl.bench.contestants import Work, make_contestant
from raywl.bench.load import LoadBenchmark
from raywl.bench.peers import PEERS, why_not
from raywl.bench.synthetic import make_checkpoint, make_layout
from raywl.checkpoint import Manifest
from raywl.node import page_cache
from raywl.node.prefetch import prefetch_checkpoint
from raywl.opening import open_checkpoint
from raywl.sources import resolve
from raywl.types import ParallelContext


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    return folder, make_checkpoint(folder, 3 << 20)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Scalars, zero-size tensors, narrow dtypes, an odd number of bytes in front of a float."""
    folder = tmp_path_factory.mktemp("odd")
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "half": torch.arange(12, dtype=torch.float16).reshape(6, 2),
        "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_synthetic_checkpoint_is_of_its_size(synthetic):
    folder, num_bytes = synthetic
    manifest = Manifest.read(resolve(folder))
    assert manifest.nbytes == num_bytes
    assert 3 << 20 <= num_bytes < 4 << 20
    assert len(manifest.files) == 2
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def peer(name):
    """A peer as a parameter; it takes part where it is installed."""
    absent = importlib.util.find_spec(PEERS[name].package) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{name} is not installed"))


CONTESTANTS = [
    *("raw-1", "raw-4", "load_into", "load_into-direct", "load_into-mmap", "reload_into", "safe_open"),
    *(peer(name) for name in PEERS if name != "transformers"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", CONTESTANTS)
@pytest.mark.parametrize("which", ["synthetic", "odd"])
def test_every_contestant_brings_the_same_bytes(name, which, request, tmp_path):
    made = request.getfixturevalue(which)
    folder = made[0] if which == "synthetic" else made
    if which == "odd" and name in PEERS:
        pytest.skip("odd dtypes and shapes are not what is compared with other libraries")
    work = Work(str(folder), folder=str(tmp_path))
    expected = make_contestant("safe_open")
    expected.prepare(work)
    before = expected.digest()
    expected.run()
    contestant = make_contestant(name)
    contestant.prepare(work)
    assert contestant.run() == sum(e.nbytes for e in work.manifest().tensors.values())
    assert contestant.digest() == expected.digest() != before


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_bring_their_slices(synthetic, rank):
    """Uneven cuts along both dims; the raw reader reads as many bytes as the rank keeps."""
    folder, _ = synthetic
    shards = {"model.layers.0.mlp.up_proj.weight": 0, "model.layers.0.mlp.down_proj.weight": 1}
    work = Work(str(folder), {}, ParallelContext(tp_rank=rank, tp_size=3), shards)
    digests, kept = [], []
    for name in ("load_into", "safe_open", "raw-2", "load_file"):
        contestant = make_contestant(name)
        contestant.prepare(work)
        kept.append(contestant.run())
        digests.append(contestant.digest())
    assert digests[0] == digests[1] == digests[3] is not None
    assert digests[2] is None
    assert kept[1] == kept[2] <= kept[0]


def test_an_unknown_contestant_is_refused():
    with pytest.raises(ValueError, match="raw-N"):
        make_contestant("fastest")


def test_a_raw_read_of_a_truncated_file_fails(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(1024)}, path)
    raw = make_contestant("raw-2")
    raw.prepare(Work(str(path)))
    os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(OSError, match="file ended"):
        raw.run()


def test_the_page_cache_is_seen_dropped_and_filled(synthetic):
    path = synthetic[0] / "model-00001-of-00002.safetensors"
    size = path.stat().st_size
    prefetch_checkpoint(path)
    assert page_cache.resident_bytes(path) >= size
    page_cache.drop(path)
    dropped = page_cache.resident_bytes(path)
    if dropped:
        pytest.skip("this file system keeps its pages")
    assert load_file(path)


def test_an_empty_file_has_no_pages(tmp_path):
    (tmp_path / "empty").touch()
    assert page_cache.resident_bytes(tmp_path / "empty") == 0


def a_benchmark(folder, **values) -> LoadBenchmark:
    manifest = Manifest.read(resolve(folder))
    return LoadBenchmark(manifest, str(folder), {}, contestants=("raw-2", "load_into"), **values)


def test_cold_ranks_in_processes_of_their_own(synthetic):
    """Two ranks: disk bytes are summed over both, and each byte comes from the disk about once."""
    folder, num_bytes = synthetic
    shards = {"model.embed_tokens.weight": 0}
    benchmark = a_benchmark(folder, cold=True, tp_size=2, shards=shards)
    lines = []
    benchmark.run(1, lines.append)
    found = json.loads(json.dumps(benchmark.to_dict()))
    assert len(lines) == 2
    assert found["identical"]
    assert found["cache"] == "cold"
    for of in found["contestants"].values():
        assert of["median_s"] > 0
        assert num_bytes < of["bytes_read"] < 2 * num_bytes
    if not found["notes"] and found["contestants"]["raw-2"]["disk_bytes"]:
        assert found["contestants"]["load_into"]["disk_bytes"] >= num_bytes


def test_different_bytes_are_seen(synthetic):
    benchmark = a_benchmark(synthetic[0], cold=False)
    run = {"seconds": 1.0, "bytes_read": 1, "disk_bytes": None}
    benchmark.runs = {
        "raw-2": [{**run, "digests": [None, "b"]}],
        "load_into": [{**run, "digests": ["a", "b"]}, {**run, "digests": ["a", "b"]}],
    }
    assert benchmark.identical
    benchmark.runs["load_into"].append({**run, "digests": ["a", "c"]})
    assert not benchmark.identical
    assert benchmark.to_dict()["identical"] is False


def test_a_contestant_that_dies_is_an_error(tmp_path, synthetic):
    benchmark = a_benchmark(synthetic[0], cold=False)
    benchmark.ref = str(tmp_path / "absent")
    with pytest.raises(RuntimeError, match="raw-2 ended with code 1: NotFoundError"):
        benchmark.run(1, lambda line: None)


def test_a_peer_that_fails_is_left_out(synthetic, monkeypatch):
    """With its words; the others go on."""
    monkeypatch.setattr(load_module, "PEERS", {*PEERS, "safe_open"})
    benchmark = a_benchmark(synthetic[0], cold=False)
    benchmark.contestants = ("raw-1", "safe_open")
    real = LoadBenchmark._order

    def order(self, name, rank):
        return real(self, name, rank) | ({"ref": "/absent"} if name == "safe_open" else {})

    monkeypatch.setattr(LoadBenchmark, "_order", order)
    lines = []
    benchmark.run(2, lines.append)
    found = benchmark.to_dict()
    assert set(found["contestants"]) == {"raw-1"}
    assert "NotFoundError" in found["left_out"]["safe_open"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("word", "tp_size", "why"),
    [
        ("load_file", 4, None),
        ("accelerate", 2, "has no part of a tensor"),
        ("dcp", 1, None),
        ("transformers", 1, "config.json"),
    ],
)
def test_why_a_peer_takes_no_part(odd, word, tp_size, why, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = why_not(word, open_checkpoint(odd), tp_size)
    assert found is None if why is None else why in found
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "is not installed" in why_not(word, open_checkpoint(odd), 1)


def test_words_and_peers_are_the_same():
    """The command line knows them without importing torch."""
    assert tuple(PEERS) == words.PEERS


@pytest.mark.parametrize("layout", words.LAYOUTS)
def test_layouts_can_be_opened(layout, tmp_path):
    num_bytes = make_layout(tmp_path / "made", layout, 1 << 20)
    checkpoint = open_checkpoint(tmp_path / "made")
    assert checkpoint.nbytes == num_bytes
    assert num_bytes >= 0.9 * (1 << 20)
    assert checkpoint.verify().notes == []
    counts = {"small": 256, "huge": 1, "files": 1000, "header": 10_000, "experts": 260}
    assert len(checkpoint.tensors) == counts.get(layout, len(checkpoint.tensors))
    with pytest.raises(ValueError, match="unknown layout"):
        make_layout(tmp_path / "other", "odd", 1)


def test_a_checkpoint_is_made_by_the_command(tmp_path):
    folder = tmp_path / "made"
    command = [sys.executable, "-m", "raywl", "bench", "make", str(folder), "--layout", "huge", "--json"]
    done = subprocess.run([*command, "--size", "1MB"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"folder": str(folder), "layout": "huge", "nbytes": 1_000_000}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "isn't empty" in done.stderr


def test_an_unknown_peer_is_refused(synthetic):
    command = [sys.executable, "-m", "raywl", "bench", "load", str(synthetic[0]), "--peers", "fastest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "expected all, or some of load_file, runai" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_peers_side_by_side(synthetic):
    """Each that is installed, once, from the command line; the others are named."""
    command = [sys.executable, "-m", "raywl", "bench", "load", str(synthetic[0]), "--repeat", "1", "--json"]
    done = subprocess.run(
        [*command, "--peers", "all", "--strategy", "mmap"], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"load_into-mmap", "load_file", "dcp"} <= set(found["contestants"])
    assert set(words.PEERS) == (set(found["contestants"]) & set(words.PEERS)) | set(found["left_out"])
    assert found["identical"]
    assert all(of["peak_bytes"] is not None for of in found["contestants"].values())


def test_the_command(synthetic):
    """All contestants, once each, from the command line."""
    folder, num_bytes = synthetic
    command = [sys.executable, "-m", "raywl", "bench", "load", str(folder), "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nbytes"] == num_bytes
    assert found["identical"]
    assert set(found["contestants"]) == {"raw-2", "raw-4", "raw-8", "load_into", "safe_open"}
    assert found["contestants"][found["raw"]]["ratio_to_raw"] == 1.0
    assert "1/1 load_into" in done.stderr


def test_copying_is_the_limit_of_a_reload(synthetic):
    """From one memory to another, as many bytes as the parameters have."""
    folder, num_bytes = synthetic
    copy = make_contestant("copy-2")
    copy.prepare(Work(str(folder)))
    copy._from[:] = 7
    assert copy.run() == num_bytes
    assert (copy._to == 7).all()


def test_a_parameter_that_moves_in_a_reload_is_seen(synthetic):
    contestant = make_contestant("reload_into")
    contestant.prepare(Work(str(synthetic[0])))
    contestant.run()
    assert contestant.digest() is not None
    parameter = next(contestant._model.parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="other addresses"):
        contestant.digest()


def test_the_reload_command(synthetic):
    """Its limit is copying."""
    command = [sys.executable, "-m", "raywl", "bench", "reload", str(synthetic[0]), "--repeat", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"]
    assert found["raw"].startswith("copy-")
    assert set(found["contestants"]) == {"copy-1", "copy-2", "copy-4", "reload_into", "load_file"}
