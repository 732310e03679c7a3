"""Weights through runai-model-streamer on several ranks: one reads for all, or all together; and failures."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from raywl.errors import CheckpointError, ClusterError, CorruptFileError
from raywl.weight_utils import runai_safetensors_weights_iterator
from tests.iterators import scenarios
from tests.iterators.many_dtypes import write_all
from tests.iterators.ranks import run_ranks

CPU = {"RAYWL_RUNAI_CPU_WEIGHT_FILES": "cpu-1.safetensors,cpu-2.safetensors"}
SHARE_READS = {"RUNAI_STREAMER_DIST": "1", "RUNAI_STREAMER_DIST_BUFFER_MIN_BYTESIZE": "65536"}
"""The library shares reads over NCCL alone by default, by way of 1 GiB buffers."""


@pytest.fixture
def checkpoint(tmp_path):
    """A file that each rank reads, and two for the CPU."""
    tensors = {
        "model.safetensors": {"g.1": torch.ones(2), "g.2": torch.zeros(3)},
        "cpu-1.safetensors": {
            "a.table": torch.arange(8),
            "b.norm": torch.tensor(3.0),
            "c.norm": torch.ones(0, 2),
        },
        "cpu-2.safetensors": {"d.table": torch.ones(2, 2), "e.norm": torch.arange(5).to(torch.bfloat16)},
    }
    for name, values in tensors.items():
        save_file(values, tmp_path / name)
    return tmp_path


def paths_of(folder):
    return sorted(str(path) for path in folder.glob("*.safetensors"))


def run(checkpoint, size=3, files=None, env=CPU, store="apart", **options):
    return run_ranks(
        scenarios.runai,
        size,
        files or {-1: paths_of(checkpoint)},
        {"cpu": True, **options},
        env=env,
        store=store,
    )


def failures(ranks, *killed):
    """The errors of the ranks that live on, after a look at the others."""
    assert [at for at, rank in enumerate(ranks) if rank.kind == "killed"] == list(killed)
    errors = [rank.error for at, rank in enumerate(ranks) if at not in killed]
    assert all(errors), ranks
    return errors


def test_one_rank_reads_for_all(checkpoint, tmp_path_factory):
    """Names, shapes and dtypes on all ranks; shared tensors on `meta` there, the others by broadcast.

    The other ranks' files for the CPU are damaged, which they don't find out, as they don't open them.
    """
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(checkpoint, damaged, dirs_exist_ok=True)
    for name in ("cpu-1", "cpu-2"):
        (damaged / f"{name}.safetensors").write_bytes(b"")
    reader, *others = run(checkpoint, files={0: paths_of(checkpoint), -1: paths_of(damaged)})
    assert not reader.error
    assert [row[0] for row in reader.value] == [
        "g.1",
        "g.2",
        "a.table",
        "b.norm",
        "c.norm",
        "d.table",
        "e.norm",
    ]
    alone = dict(runai_safetensors_weights_iterator(paths_of(checkpoint), False))
    assert reader.value == [scenarios.row(name, alone[name]) for name, *_ in reader.value]
    for rank in others:
        assert not rank.error
        for (name, dtype, shape, device, raw), theirs in zip(rank.value, reader.value, strict=True):
            assert (name, dtype, shape) == theirs[:3]
            assert (device, raw) == (("meta", None) if "table" in name else ("cpu", theirs[4]))


def test_every_dtype_is_broadcast(tmp_path):
    """Those that the library can't read included."""
    files = write_all(tmp_path)
    env = {"RAYWL_RUNAI_CPU_WEIGHT_FILES": ",".join(map(os.path.basename, files))}
    reader, other = run(tmp_path, 2, env=env, shared={0: [], 1: []})
    assert not reader.error
    assert len(reader.value) > 100
    assert other.value == reader.value
    assert sum("can't read" in text for text in reader.warnings) == 1


def test_what_a_consumer_does_to_a_tensor_stays_with_it(checkpoint):
    """The reader's tensors have been sent when it gets them."""
    reader, other = run(checkpoint, 2, shared={0: [], 1: []}, at={(0, "a.table"): "scribble"})
    assert reader.value == other.value


def test_no_shared_tensors_without_a_rule(checkpoint):
    ranks = run(checkpoint, 2, shared={0: [], 1: []})
    assert ranks[0].value == ranks[1].value


def test_a_tensor_in_files_of_both_kinds_comes_once_and_alike(checkpoint):
    """The reader takes it from the first file, `cpu-1`; the others leave it out of theirs."""
    save_file(
        {"a.table": torch.arange(8), "g.1": torch.ones(2), "g.2": torch.zeros(3)},
        checkpoint / "model.safetensors",
    )
    reader, other = run(checkpoint, 2)
    assert not reader.error
    assert not other.error
    names = [[row[0] for row in rank.value] for rank in (reader, other)]
    assert names[0] == names[1] == ["g.1", "g.2", "a.table", "b.norm", "c.norm", "d.table", "e.norm"]


def test_ranks_that_disagree_on_shared_all_fail(checkpoint):
    """Before anything is given out, with the tensor's name."""
    errors = failures(run(checkpoint, shared={0: ["a.table"], 1: ["a.table", "e.norm"], 2: ["a.table"]}))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "disagree on shared tensors: these are shared on rank 1, and not on rank 0: e.norm" in str(
            error
        )


def test_ranks_that_disagree_on_files_for_the_cpu_all_fail(checkpoint):
    """One of them would wait for tensors that nobody sends."""
    errors = failures(run(checkpoint, own_env={2: {"RAYWL_RUNAI_CPU_WEIGHT_FILES": ""}}))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "disagree on files for the CPU: ranks 0, 1: cpu-1.safetensors, cpu-2.safetensors; " in str(
            error
        )
        assert str(error).endswith("rank 2: none")


def test_a_rule_that_fails_on_one_rank_fails_on_all(checkpoint):
    errors = failures(run(checkpoint, shared={0: None, 1: 5, 2: None}))
    assert isinstance(errors[1], TypeError)
    for error in (errors[0], errors[2]):
        assert "[rank 1 of the group] failed: TypeError" in str(error)


def test_damage_that_only_the_reader_sees_reaches_all(checkpoint, tmp_path_factory):
    """The same error on every rank: same class, same fields, same text."""
    damaged = tmp_path_factory.mktemp("damaged")
    shutil.copytree(checkpoint, damaged, dirs_exist_ok=True)
    path = str(damaged / "cpu-2.safetensors")
    os.truncate(path, os.path.getsize(path) - 3)
    errors = failures(run(checkpoint, files={0: paths_of(damaged), -1: paths_of(checkpoint)}))
    for error in errors:
        assert isinstance(error, CorruptFileError)
        assert error.path == path
        assert "short by 3 bytes" in str(error)
    assert str(errors[1]).startswith("[rank 0 of the group] ")


@pytest.mark.parametrize(
    "shared", [["a.table", "b.norm", "c.norm", "d.table", "e.norm"], []], ids=["meta", "sent"]
)
def test_a_reader_that_fails_in_the_middle_ends_all(checkpoint, shared):
    """Also where the others get nothing from it but the word that it goes on."""
    path = str(checkpoint / "cpu-2.safetensors")
    errors = failures(
        run(checkpoint, shared=dict.fromkeys(range(3), shared), at={(0, "b.norm"): f"cut {path}"})
    )
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert error.path == path


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("a.table", "apart"),
        ("d.table", "rank 0"),
        *(
            pytest.param(name, store, marks=pytest.mark.slow)
            for name, store in (
                ("a.table", "rank 0"),
                ("d.table", "apart"),
                ("g.1", "apart"),
                ("g.1", "rank 0"),
            )
        ),
    ],
)
def test_a_reader_that_is_killed_ends_all(checkpoint, name, store):
    """Where all are at their own files, at a shared tensor, and at a later file."""
    errors = failures(run(checkpoint, 4, at={(0, name): "die"}, store=store), 0)
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "has gone without a word" in str(error)


def test_another_rank_that_is_killed_ends_all(checkpoint):
    errors = failures(run(checkpoint, 4, at={(2, "b.norm"): "die"}), 2)
    assert all("has gone without a word" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("who", "name"),
    [
        (0, "a.table"),
        (2, "e.norm"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "e.norm"), (2, "a.table"))),
    ],
)
def test_a_consumer_that_stops_early_ends_all(checkpoint, who, name):
    """At its last tensor, too. It may have failed itself, or think that it has all it needs."""
    ranks = run(checkpoint, at={(who, name): "stop"})
    stopped = ranks.pop(who)
    assert not stopped.error
    for error in failures(ranks):
        assert str(error) == f"[rank {who} of the group] stopped iterating before the end"


def test_a_consumer_that_fails_ends_all(checkpoint):
    ranks = run(checkpoint, at={(1, "g.2"): "raise"})
    assert isinstance(ranks.pop(1).error, ArithmeticError)
    for error in failures(ranks):
        assert str(error) == "[rank 1 of the group] stopped iterating before the end"


def test_a_library_that_only_one_rank_lacks_ends_all(checkpoint):
    """A rank that can't begin doesn't leave the others waiting."""
    errors = failures(run(checkpoint, 2, lacks=[1]))
    assert isinstance(errors[1], ImportError)
    assert "raywl[runai]" in str(errors[0])


# Reads that all ranks share.


def test_ranks_read_together(tmp_path):
    """Each rank gets all tensors, as one that reads alone does; each file is shared by the library."""
    files = [path for path in write_all(tmp_path) if "FNUZ" not in path]
    ranks = run_ranks(scenarios.shares_reads, 3, files, env=SHARE_READS)
    alone = [scenarios.row(*pair) for pair in runai_safetensors_weights_iterator(files, False)]
    for rank in ranks:
        assert not rank.error
        rows, shared = rank.value
        assert rows == alone
        assert shared == [True] * (len(files) - 2)


def test_by_default_the_library_shares_over_nccl_alone(tmp_path):
    """Over gloo each rank reads for itself, and gets the same."""
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    ranks = run_ranks(scenarios.shares_reads, 2, paths_of(tmp_path))
    for rank in ranks:
        rows, shared = rank.value
        assert [row[0] for row in rows] == ["a"]
        assert shared == [False]


def test_ranks_with_different_files_all_fail(tmp_path):
    """Before the library mixes them."""
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        save_file({"a": torch.full((value,), value)}, tmp_path / folder / "model.safetensors")
    files = {0: paths_of(tmp_path / "one"), -1: paths_of(tmp_path / "two")}
    errors = failures(run_ranks(scenarios.runai, 2, files, {"distributed": True}, env=SHARE_READS))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "the ranks have different files" in str(error)
        assert "model.safetensors (8" in str(error)


@pytest.mark.parametrize("what", ["cut", "die", "stop"])
def test_a_rank_that_fails_ends_those_that_read_together(tmp_path, what):
    """With its text, where it can still say something."""
    (tmp_path / "own").mkdir()
    for number in range(3):
        save_file({f"a.{number}": torch.ones(number + 1)}, tmp_path / f"model-{number}.safetensors")
        shutil.copy(tmp_path / f"model-{number}.safetensors", tmp_path / "own")
    path = str(tmp_path / "own" / "model-1.safetensors")
    ranks = run_ranks(
        scenarios.runai,
        4,
        {2: paths_of(tmp_path / "own"), -1: paths_of(tmp_path)},
        {"distributed": True, "at": {(2, "a.0"): f"{what} {path}"}},
        env=SHARE_READS,
    )
    if what == "stop":
        assert not ranks.pop(2).error
        assert {str(e) for e in failures(ranks)} == {"[rank 2 of the group] stopped iterating before the end"}
    elif what == "die":
        assert all("has gone without a word" in str(error) for error in failures(ranks, 2))
    else:
        assert all(isinstance(e, CheckpointError) and e.path == path for e in failures(ranks))


@pytest.mark.parametrize("group", ["none", "pair"])
def test_a_group_that_isnt_the_world(tmp_path, group):
    """`None` needs nobody else; the library can't share among some of the ranks, which is said."""
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    ranks = run_ranks(scenarios.runai_alone, 3, str(tmp_path / "model.safetensors"), group, env=SHARE_READS)
    assert not any(rank.error for rank in ranks)
    assert ranks[1].value == ["a"]
    said = [text for text in ranks[1].warnings if "of process_group reads for itself" in text]
    assert len(said) == (group == "pair")
