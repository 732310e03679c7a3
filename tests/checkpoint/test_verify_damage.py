"""Of a damaged checkpoint all problems are listed; what is odd, but no damage, is noted."""

import json
import os

import pytest

import raywl
from raywl.checkpoint import Manifest
from raywl.errors import CheckpointError, SourceError
from raywl.sources import resolve
from raywl.sources.local import LocalSource
from raywl.verifying import notes_on, verify_source
from tests.hostile.folders import FOLDERS, GOOD, INDEX, ONE, TWO, index, tensors, write

SHARDS = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]


def check(folder, **options):
    return verify_source(resolve(folder), **options)


def says(lines, *words):
    """The one line that has all of these words in it."""
    (line,) = [line for line in lines if all(word in line for word in words)]
    return line


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_whatever_can_not_be_opened_has_problems(case, tmp_path):
    """The problems say what the error at opening says."""
    report = check(write(case.files, tmp_path / "checkpoint"))
    assert not report.ok
    text = "\n".join(report.problems)
    for words in {TWO, INDEX} & set(case.says):
        assert words in text
    assert str(tmp_path) in text


@pytest.mark.parametrize("name", GOOD)
def test_whatever_can_be_opened_has_none(name, tmp_path):
    folder = write(GOOD[name][0], tmp_path)
    report = check(folder, deep=True)
    assert report.problems == []
    assert report.files_checked == len(report.sha256)
    manifest = Manifest.read(resolve(folder))
    assert report.files_checked == len(manifest.files)
    assert report.notes == notes_on(manifest)
    assert raywl.open_checkpoint(folder).verify().to_dict() == check(folder).to_dict()


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_all_damage_is_listed(indexed, deep, tmp_path):
    """Two truncated files, one too long, one that is no safetensors file, one that isn't there."""
    raw = {name: tensors(f"t{i}") for i, name in enumerate(SHARDS)}
    if indexed:
        raw[INDEX] = index({f"t{i}": name for i, name in enumerate(SHARDS)})
    write(raw, tmp_path)
    checkpoint = raywl.open_checkpoint(tmp_path)
    for name in SHARDS[:2]:
        os.truncate(tmp_path / name, len(raw[name]) - 3)
    (tmp_path / SHARDS[2]).write_bytes(raw[SHARDS[2]] + b"x")
    (tmp_path / SHARDS[3]).write_bytes(b"x" * 100)
    (tmp_path / SHARDS[4]).unlink()
    for report in (check(tmp_path, deep=deep), checkpoint.verify(deep=deep)):
        assert not report.ok
        problems = report.problems
        says(problems, SHARDS[0], "short by 3 bytes")
        says(problems, SHARDS[1], "short by 3 bytes")
        says(problems, SHARDS[2], "longer by 1 bytes")
        says(problems, SHARDS[3], "header")
        assert any(SHARDS[4] in problem for problem in problems)
        assert report.files_checked == 4
        assert report.sha256 == {}
    assert len(check(tmp_path).problems) == 5


def test_whole_files_beside_a_damaged_one_are_read_in_full(tmp_path):
    write({ONE: tensors("a"), TWO: tensors("b")[:-1]}, tmp_path)
    report = check(tmp_path, deep=True)
    assert len(report.problems) == 1
    assert list(report.sha256) == [ONE]
    assert report.bytes_checked == len(tensors("a"))


def test_each_missing_file_has_a_line(tmp_path):
    names = [f"model-{i:05}-of-00040.safetensors" for i in range(1, 41)]
    write({INDEX: index({f"t{i}": name for i, name in enumerate(names)})}, tmp_path)
    problems = check(tmp_path).problems
    assert len(problems) == 40
    for name in names:
        says(problems, str(tmp_path / name), "absent")


def test_a_damaged_index_hides_no_damaged_file(tmp_path):
    """The folder's files are looked at; which of two copies counts is left open."""
    write({INDEX: b"{", ONE: tensors("a")[:-1], TWO: tensors("b"), "x.safetensors": tensors("b")}, tmp_path)
    problems = check(tmp_path).problems
    assert len(problems) == 2
    says(problems, INDEX, "not JSON")
    says(problems, ONE, "short by 1 bytes")


def test_a_damaged_index_is_no_lack_of_weights(tmp_path):
    (problem,) = check(write({INDEX: b"{", "sub/model.safetensors": tensors("a")}, tmp_path)).problems
    assert INDEX in problem


def test_all_contradictions_are_listed(tmp_path):
    """Tensors that are elsewhere, by file; those of a damaged file are no contradiction as well."""
    names = SHARDS[:3]
    files = {
        INDEX: index({"a": names[0], "b": names[0], "c": names[1], "d": names[2]}),
        names[0]: tensors("x"),
        names[1]: tensors("x"),
        names[2]: tensors("d")[:-1],
    }
    problems = check(write(files, tmp_path)).problems
    assert len(problems) == 4
    says(problems, names[0], "the index says", "2 such tensors: a, b")
    says(problems, names[1], "the index says", "'c'")
    says(problems, "'x'", "two files", names[0], names[1])
    says(problems, names[2], "short by")


def test_doubled_names_by_pair_of_files(tmp_path):
    files = {"x.safetensors": tensors("a", "b", "c"), "y.safetensors": tensors("a", "b", "c")}
    (problem,) = check(write(files, tmp_path)).problems
    assert "3 such tensors: a, b, c" in problem
    with pytest.raises(CheckpointError, match="3 such tensors"):
        raywl.open_checkpoint(tmp_path)


def test_a_tensor_of_a_damaged_file_is_not_looked_for_in_others(tmp_path):
    """The index says where it counts, though nobody can read it there."""
    files = {
        INDEX: index({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[2]}),
        SHARDS[0]: tensors("a")[:-1],
        SHARDS[1]: tensors("a", "b"),
        SHARDS[2]: tensors("a", "c"),
    }
    report = check(write(files, tmp_path))
    assert len(report.problems) == 1
    assert not any("not in the index" in note for note in report.notes)


class Unreadable(LocalSource):
    """A folder on a disk that can't read one of its files; root may read any other one."""

    def read(self, name, start, end):
        if name == ONE:
            raise SourceError(self.path(name), "can't be read at byte 0: Input/output error")
        return super().read(name, start, end)


def test_a_file_that_can_not_be_read_hides_no_other(tmp_path):
    folder = write({ONE: tensors("a"), TWO: tensors("b")[:-1]}, tmp_path)
    problems = verify_source(Unreadable.open(str(folder))).problems
    says(problems, ONE, "can't be read")
    says(problems, TWO, "short by")


def test_only_what_was_asked_for_is_checked(tmp_path):
    """Neither damage nor leavings elsewhere count, for a pattern and for a path to one file."""
    write({INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: b"x", "y.bin": b"x"}, tmp_path)
    for report in (check(tmp_path, allow_patterns="*00001*"), check(tmp_path / ONE)):
        assert report.ok
        assert report.notes == []
        assert report.files_checked == 1
    checkpoint = raywl.open_checkpoint(tmp_path, allow_patterns=["*00001*"])
    assert checkpoint.verify(deep=True).to_dict()["notes"] == []
    assert notes_on(checkpoint) == []


def sized(total_size, weight_map):
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}).encode()


@pytest.mark.parametrize("total_size", [16, 16.0, None, "16", True, [], 1e308])
def test_total_size(total_size, tmp_path):
    """Both numbers are given where they differ; what is no number says nothing."""
    folder = write(
        {INDEX: sized(total_size, {"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("b")}, tmp_path
    )
    differs = total_size == 1e308
    report = check(folder)
    assert report.ok
    assert len(report.notes) == differs
    (tmp_path / INDEX).write_bytes(sized(24, {"a": ONE, "b": TWO}))
    (note,) = check(folder).notes
    assert "24" in note
    assert "16" in note
    assert raywl.open_checkpoint(folder).verify().notes == [note]


def test_what_passes_at_opening_is_noted(tmp_path):
    """One note for each kind of thing, with the names."""
    files = {
        INDEX: sized(16, {"a": SHARDS[0], "b": SHARDS[1]}),
        SHARDS[0]: tensors("a", "extra"),
        SHARDS[1]: tensors("b"),
        SHARDS[2]: tensors("c"),
        "adapter.safetensors": tensors("d"),
        "pytorch_model.bin": b"x",
        "model.gguf": b"x",
        "optimizer.pt": b"x",
        "rng_state_0.pth": b"x",
        "training_args.bin": b"x",
        "trainer_state.json": b"{}",
        "config.json": b"{}",
    }
    folder = write(files, tmp_path)
    notes = check(folder).notes
    assert len(notes) == 5
    says(notes, "1 tensors", "not in the index", "extra")
    says(notes, "same numbered set", SHARDS[2])
    assert "adapter" in says(notes, "are not used: adapter.safetensors")
    says(notes, "2 files of other formats", "pytorch_model.bin", "model.gguf")
    says(notes, "4 files that a trainer left", "optimizer.pt", "trainer_state.json")
    checkpoint = raywl.open_checkpoint(folder)
    assert checkpoint.verify(deep=True).ok
    assert checkpoint.verify().notes == notes == notes_on(checkpoint)


def test_an_empty_map_is_noted(tmp_path):
    folder = write({INDEX: index({}), "model.safetensors": tensors("a")}, tmp_path)
    (note,) = check(folder).notes
    assert "empty weight_map" in note


def test_notes_on_a_damaged_checkpoint(tmp_path):
    """A total that can't be compared isn't; what lies about is said all the same."""
    files = {INDEX: sized(1, {"a": ONE}), ONE: tensors("a")[:-1], TWO: tensors("b"), "x.bin": b""}
    notes = check(write(files, tmp_path)).notes
    assert len(notes) == 2
    says(notes, TWO)
    says(notes, "x.bin")


def test_an_index_that_gained_a_file_since_the_opening(tmp_path):
    write({INDEX: index({"a": ONE}), ONE: tensors("a"), TWO: tensors("b")}, tmp_path)
    checkpoint = raywl.open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_bytes(index({"a": ONE, "b": TWO}))
    problems = checkpoint.verify().problems
    assert len(problems) == 2
    says(problems, INDEX, "changed since")
    says(problems, TWO, "didn't when it was opened")
    (tmp_path / INDEX).unlink()
    says(checkpoint.verify().problems, INDEX, "removed since")


def test_an_index_that_lost_a_file_since_the_opening(tmp_path):
    write({INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("b")}, tmp_path)
    checkpoint = raywl.open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_bytes(index({"a": ONE}))
    says(checkpoint.verify().problems, TWO, "no more")


def test_a_folder_that_gained_a_file_or_an_index_since_the_opening(tmp_path):
    write({"model.safetensors": tensors("a")}, tmp_path)
    checkpoint = raywl.open_checkpoint(tmp_path)
    write({"other.safetensors": tensors("b")}, tmp_path)
    (problem,) = checkpoint.verify().problems
    assert "other.safetensors" in problem
    (tmp_path / INDEX).write_bytes(index({"a": "model.safetensors"}))
    (problem,) = checkpoint.verify().problems
    assert INDEX in problem
    assert "added since" in problem


def test_a_folder_that_is_gone(tmp_path):
    folder = write({"model.safetensors": tensors("a")}, tmp_path / "folder")
    checkpoint = raywl.open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (problem,) = checkpoint.verify().problems
    assert "no weights here" in problem
    folder.rmdir()
    (problem,) = checkpoint.verify().problems
    assert str(folder) in problem
