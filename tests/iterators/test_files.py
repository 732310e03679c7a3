"""What is known of a list of files before a tensor is read: order, names, experts, damage, doubles."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace

import numpy
import pytest
import torch
from safetensors.torch import save_file

from raywl.checkpoint import TensorEntry
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.iterators.files import as_expert_ids, as_paths, in_order, open_files, plan_files
from raywl.iterators.reading import read_file, read_lazily
from raywl.iterators.tally import Tally, is_local_rank_0
from raywl.node import page_cache
from raywl.readers.whole import batches_of
from raywl.types import ParallelContext
from tests.hostile.files import FILES, VALID, write
from tests.iterators.ranks import run_ranks


def save(folder, name, **tensors):
    path = folder / name
    save_file(tensors, path)
    return str(path)


def silent(tally_bytes=0):
    return Tally(tally_bytes, False)


def test_files_are_in_natural_order_and_names_sorted(tmp_path):
    paths = [
        save(
            tmp_path,
            f"model-{number}.safetensors",
            **{f"b{number}": torch.ones(2), f"a{number}": torch.ones(1)},
        )
        for number in (10, 2, 1)
    ]
    works = plan_files(paths)
    assert [work.path for work in works] == [paths[2], paths[1], paths[0]]
    assert [work.names for work in works] == [("a1", "b1"), ("a2", "b2"), ("a10", "b10")]
    assert [work.nbytes for work in works] == [12, 12, 12]
    assert works[0].dtypes == {"F32"}


def test_base_names_count_before_folders(tmp_path):
    (tmp_path / "b").mkdir()
    one, two = (
        save(tmp_path / "b", "m-1.safetensors", a=torch.ones(1)),
        save(tmp_path, "m-2.safetensors", b=torch.ones(1)),
    )
    assert in_order([two, one]) == [one, two]


@pytest.mark.parametrize("wrong", ["model.safetensors", b"model.safetensors"])
def test_one_path_is_no_list(wrong):
    """A string would be taken for its letters."""
    with pytest.raises(TypeError, match="list of paths"):
        as_paths(wrong)


def test_paths_of_all_kinds(tmp_path):
    with pytest.raises(TypeError, match="list of paths"):
        as_paths(tmp_path)
    assert as_paths(iter([tmp_path / "a", b"b", "c"])) == [str(tmp_path / "a"), "b", "c"]
    with pytest.raises(TypeError):
        as_paths([3])


@pytest.mark.parametrize(
    "ids", [[1, 3], {1, 3}, range(1, 4, 2), numpy.array([1, 3]), torch.tensor([3, 1]), iter([1, 3])]
)
def test_expert_ids_of_all_kinds(ids):
    assert as_expert_ids(ids) == {1, 3}


@pytest.mark.parametrize("ids", [["1"], [1.0], [True], "13"])
def test_what_is_no_expert_id(ids):
    """A text would match no expert, and every expert would be left out in silence."""
    with pytest.raises(ValueError, match="expert id"):
        as_expert_ids(ids)


def test_experts_of_others_are_left_out(tmp_path):
    """Heavy tensors only; and no expert's are when there are no ids."""
    names = [f"m.experts.{e}.w1.{kind}" for e in range(3) for kind in ("weight", "weight_scale")]
    names += ["m.experts.w13_weight", "m.shared_experts.w1.weight", "experts.1.w1.qweight"]
    path = save(tmp_path, "m.safetensors", **{name: torch.ones(1) for name in names})
    (work,) = plan_files([path], as_expert_ids([0]))
    assert (
        set(names) - set(work.names)
        == {"m.experts.1.w1.weight", "m.experts.2.w1.weight", "experts.1.w1.qweight"}
        == set(work.left_out)
    )
    assert plan_files([path])[0].names == tuple(sorted(names))
    assert not any(
        ".w1.weight" in name and name.endswith("weight") and "shared" not in name
        for name in plan_files([path], frozenset())[0].names
    )


def test_absent_files_are_all_named(tmp_path):
    """C01: also what is a folder, or a link that leads nowhere; before anything is given out."""
    there = save(tmp_path, "m-1.safetensors", a=torch.ones(1))
    (tmp_path / "m-2.safetensors").mkdir()
    (tmp_path / "m-3.safetensors").symlink_to(tmp_path / "nowhere")
    absent = [str(tmp_path / f"m-{number}.safetensors") for number in (2, 3, 4)]
    with pytest.raises(MissingFileError, match="3 of 4") as caught:
        plan_files([there, *absent])
    assert caught.value.files == tuple(absent)
    assert all(path in str(caught.value) for path in absent)


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_damage_is_found_first(case, tmp_path):
    """C80 and all other lies of headers, with file and tensor, though a whole file comes before it."""
    good, bad = save(tmp_path, "a.safetensors", first=torch.ones(1)), write(case, tmp_path)
    with pytest.raises(case.error) as caught:
        plan_files([good, str(bad)])
    assert caught.value.path == str(bad)
    assert case.tensor is None or caught.value.tensor == case.tensor


@pytest.mark.parametrize("name", VALID)
def test_odd_but_right(name, tmp_path):
    """C78: metadata is never a tensor."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(VALID[name])
    (work,) = plan_files([str(path)])
    assert "__metadata__" not in work.names
    assert [name for name, _ in read_lazily(work, silent())] == list(work.names)


def test_equal_doubles_come_once(tmp_path):
    """From the first file, with one warning that names both."""
    same, nan = torch.randn(3_000_000), torch.tensor([float("nan")])
    one = save(tmp_path, "m-1.safetensors", a=same, b=torch.ones(1), nan=nan)
    two = save(tmp_path, "m-2.safetensors", a=same, c=torch.ones(1), nan=nan)
    with pytest.warns(UserWarning, match=f"2 tensors.*{re.escape(one)}.*{re.escape(two)}") as caught:
        works = plan_files([two, one])
    assert len(caught) == 1
    assert [work.names for work in works] == [("a", "b", "nan"), ("c",)]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.full((3_000_000,), 1.0).index_fill_(0, torch.tensor([2_999_999]), 2.0), "values"),
        (torch.ones(3_000_000, 1), "shape: [3000000] here, [3000000, 1] there"),
        (torch.ones(3_000_000).view(torch.int32), "dtype: F32 here, I32 there"),
    ],
    ids=["last value", "shape", "dtype"],
)
def test_doubles_that_differ(other, says, tmp_path):
    """An error with both files and the tensor, whichever of the differences it is."""
    one = save(tmp_path, "m-1.safetensors", a=torch.ones(3_000_000))
    two = save(tmp_path, "m-2.safetensors", a=other)
    with pytest.raises(CheckpointError) as caught:
        plan_files([one, two])
    assert caught.value.tensor == "a"
    assert all(words in str(caught.value) for words in (one, two, says))


def test_doubles_that_are_left_out_are_nobodys_concern(tmp_path):
    name = "experts.1.w1.weight"
    paths = [save(tmp_path, f"m-{i}.safetensors", **{name: torch.full((2,), float(i))}) for i in range(2)]
    with pytest.raises(CheckpointError):
        plan_files(paths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [work.names for work in plan_files(paths, as_expert_ids([0]))] == [(), ()]


def test_one_file_given_twice_is_read_once(tmp_path):
    """By the same path or a link: its tensors needn't be compared."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(1))
    link = tmp_path / "n.safetensors"
    link.symlink_to(path)
    with pytest.warns(UserWarning, match="given twice") as caught:
        works = plan_files([path, str(link), path])
    assert [work.path for work in works] == [path]
    assert len(caught) == 1


def test_a_file_that_is_cut_while_open(tmp_path):
    """C52: an error with the file's name, where a mapping would end the process."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(5_000_000), b=torch.ones(5_000_000))
    for cut_first in (True, False):
        save(tmp_path, "m.safetensors", a=torch.ones(5_000_000), b=torch.ones(5_000_000))
        (work,) = plan_files([path])
        tensors = read_lazily(work, silent())
        if not cut_first:
            assert next(tensors)[0] == "a"
        os.truncate(path, 4096)
        with pytest.raises(CorruptFileError, match=re.escape(path)):
            list(tensors)


def test_a_file_that_is_written_to_meanwhile(tmp_path):
    """What belongs to two states of a file is not given out."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(5_000_000), b=torch.ones(5_000_000))
    (work,) = plan_files([path])
    tensors = read_lazily(work, silent())
    next(tensors)
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        next(tensors)


def test_a_file_that_was_replaced_after_its_header_was_read(tmp_path):
    path = save(tmp_path, "m.safetensors", a=torch.ones(4))
    (work,) = plan_files([path])
    other = save(tmp_path, "n.safetensors", a=torch.zeros(4))
    os.replace(other, path)
    with pytest.raises(CheckpointError, match=re.escape(path)):
        list(read_lazily(work, silent()))


def test_whole_files_and_what_is_thrown_away(tmp_path):
    """Discarded tensors are read, but take no room: the others are whole, each with memory of its own."""
    given = {f"t{i:02}": torch.arange(i * 500_000, dtype=torch.float32) for i in range(12)}
    path = save(tmp_path, "m.safetensors", **given)
    (work,) = plan_files([path])
    read = []
    for discarded in ((), tuple(given)[6:]):
        part = replace(work, names=tuple(name for name in work.names if name not in discarded))
        read.clear()
        tensors = read_file(part, num_threads=2, discarded=discarded, on_bytes=read.append)
        assert sum(read) == sum(tensor.nbytes for tensor in given.values())
        assert list(tensors) == [name for name in sorted(given) if name not in discarded]
        for name, tensor in tensors.items():
            assert torch.equal(tensor, given[name])
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_under_a_default_device(tmp_path):
    """Models are made on `meta`; what is read is not."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(4))
    with torch.device("meta"):
        ((_, tensor),) = read_lazily(plan_files([path])[0], silent())
    assert tensor.tolist() == [1.0] * 4


def test_batches_keep_order_and_bounds():
    sizes = [5, 3, 9 << 20, 8 << 20, 40 << 20, 1, 2]
    entries = {str(i): TensorEntry("U8", (size,), "f", 0, size) for i, size in enumerate(sizes)}
    assert list(batches_of(list(entries), entries)) == [["0", "1", "2"], ["3"], ["4"], ["5", "6"]]
    many = {str(i): TensorEntry("U8", (0,), "f", 0, 0) for i in range(10_000)}
    assert [len(batch) for batch in batches_of(list(many), many)] == [4096, 4096, 1808]


def test_files_are_opened_when_they_are_read(tmp_path):
    """Planning holds none open."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(4))
    before = len(os.listdir("/proc/self/fd"))
    works = plan_files([path])
    with open_files(works):
        assert len(os.listdir("/proc/self/fd")) == before
        tensors = read_lazily(works[0], silent())
        next(tensors)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        tensors.close()
    assert len(os.listdir("/proc/self/fd")) == before


def shows_progress(rank: int) -> bool:
    """On a rank that knows no more than its process group."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return is_local_rank_0()


def test_progress_of_a_process_group_is_its_first_ranks():
    """Where nobody says which ranks share a node."""
    assert [rank.value for rank in run_ranks(shows_progress, 2)] == [True, False]


def test_tally_counts_shows_and_records(tmp_path):
    """What was read can be given back to the page cache later."""
    path = save(tmp_path, "m.safetensors", a=torch.ones(4), b=torch.ones(2))
    (work,) = plan_files([path])
    seen = []
    tally = Tally(work.nbytes, lambda *args: seen.append(args))
    page_cache.release_checkpoint_page_cache()
    assert len(list(read_lazily(work, tally))) == 2
    assert seen == [(16, 24, "read"), (24, 24, "read")]
    assert tally.bytes_read == 24
    assert os.path.realpath(path) in page_cache._recorded
    page_cache.release_checkpoint_page_cache()


@pytest.mark.parametrize(
    ("env", "context", "shown"),
    [
        ({}, None, True),
        ({"LOCAL_RANK": "0"}, None, True),
        ({"LOCAL_RANK": "1"}, None, False),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None, False),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, None, True),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ParallelContext(), True),
        ({}, ParallelContext(local_rank=1, local_size=2), False),
        ({}, ParallelContext(tp_rank=1, tp_size=2), True),
    ],
)
def test_progress_is_local_rank_0s(env, context, shown, monkeypatch, capsys):
    """By the context, else by what launchers set."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if context is not None:
        with context:
            assert is_local_rank_0() is shown
            Tally(8, True).add(8)
    else:
        assert is_local_rank_0() is shown
        Tally(8, True).add(8)
    assert bool(capsys.readouterr().err) is shown
