"""Which files of a folder count, and folders that contradict themselves."""

import os
import pickle

import pytest

from raywl.checkpoint import Manifest
from raywl.checkpoint.index import missing_numbered_files, natural_sort_key
from raywl.errors import CheckpointError, MissingFileError, NotFoundError
from raywl.sources import resolve
from raywl.sources.selection import weight_files
from raywl.verifying import verify_source
from tests.hostile.folders import FOLDERS, GOOD, INDEX, ONE, TWO, HostileFolder, index, tensors, write


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_refused_by_name(case: HostileFolder, tmp_path):
    """The error has the right class, names folder, file and tensor, and says what is wrong."""
    folder = write(case.files, tmp_path / "checkpoint")
    with pytest.raises(case.error) as caught:
        Manifest.read(resolve(folder))
    assert type(caught.value) is case.error
    assert caught.value.tensor == case.tensor
    for words in (str(folder), *case.says):
        assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("name", GOOD)
def test_chosen_files(name, tmp_path):
    """Each tensor is taken from the one file that counts."""
    files, expected = GOOD[name]
    manifest = Manifest.read(resolve(write(files, tmp_path)))
    assert {key: found.file for key, found in manifest.tensors.items()} == expected
    assert {file.name for file in manifest.files} >= set(expected.values())


def test_all_missing_files_are_listed(tmp_path):
    """`files` has every absent file, the message the first ones and how many more."""
    names = [f"model-{i:05}-of-00040.safetensors" for i in range(1, 41)]
    write({INDEX: index({f"t{i}": name for i, name in enumerate(names)})}, tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        Manifest.read(resolve(tmp_path))
    assert list(caught.value.files) == names
    assert "and 28 more" in str(caught.value)


def test_a_single_file_is_taken_alone(tmp_path):
    """A path to one file of a set opens that file, whatever lies beside it."""
    write({INDEX: b"damaged", ONE: tensors("a"), "x.safetensors": b"damaged"}, tmp_path)
    manifest = Manifest.read(resolve(tmp_path / ONE))
    assert list(manifest.tensors) == ["a"]
    assert manifest.path(ONE) == str(tmp_path / ONE)


def test_a_single_file_of_another_format_is_named(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        Manifest.read(resolve(tmp_path / "model.bin"))


@pytest.mark.parametrize("ref", ["", "nowhere", "/no/such\0path", "~no-such-user/x"])
def test_no_such_path(ref, tmp_path, monkeypatch):
    """What isn't there is `NotFoundError`, marked as local; an empty text isn't the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(tensors("a"))
    with pytest.raises(NotFoundError) as caught:
        resolve(ref)
    assert caught.value.local


def test_subfolder(tmp_path):
    write({"sub/model.safetensors": tensors("a"), "model.safetensors": tensors("b")}, tmp_path)
    assert list(Manifest.read(resolve(tmp_path, subfolder="sub")).tensors) == ["a"]
    with pytest.raises(NotFoundError, match="other"):
        resolve(tmp_path, subfolder="other")


@pytest.mark.parametrize(
    "patterns", ["*.safetensors", ["*.safetensors"], ["no*", "*00001*", "*00002*"]], ids=str
)
def test_patterns(patterns, tmp_path):
    """One pattern or several, each of which may match."""
    write({INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("b")}, tmp_path)
    assert set(Manifest.read(resolve(tmp_path), patterns).tensors) == {"a", "b"}


def test_patterns_choose(tmp_path):
    """What isn't asked for may be absent; nothing matching is an error that says what there is."""
    write({INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a")}, tmp_path)
    assert list(Manifest.read(resolve(tmp_path), ["*00001*"]).tensors) == ["a"]
    with pytest.raises(CheckpointError, match=ONE):
        Manifest.read(resolve(tmp_path), ["consolidated*"])


HF = "model.layers.0.self_attn.q_proj.weight"
MISTRAL = "layers.0.attention.wq.weight"


@pytest.mark.parametrize("copy", ["consolidated.safetensors", "consolidated-00001-of-00001.safetensors"])
@pytest.mark.parametrize("indexed", [True, False])
def test_patterns_choose_between_two_namings(copy, indexed, tmp_path):
    """Two copies of a model under different names: the one that others read, or the other if asked for."""
    name = "model-00001-of-00001.safetensors"
    files = {copy: tensors(MISTRAL), name: tensors(HF)} | ({INDEX: index({HF: name})} if indexed else {})
    source = resolve(write(files, tmp_path))
    for patterns in ((), "*.safetensors", "model*", ["*.safetensors", "consolidated*"]):
        assert list(Manifest.read(source, patterns).tensors) == [HF]
    for patterns in ("consolidated*.safetensors", [copy]):
        found = Manifest.read(source, patterns)
        assert (list(found.tensors), [file.name for file in found.files]) == ([MISTRAL], [copy])
        assert weight_files(list(files), [name] if indexed else None, found.allow_patterns) == [copy]


def test_patterns_choose_among_torch_files(tmp_path):
    """What stands behind others without patterns is found by its name."""
    names = ["pytorch_model.bin", "consolidated.00.pth", "optimizer.pt"]
    assert weight_files(names, None) == ["pytorch_model.bin"]
    assert weight_files(names, None, ["*.pth"]) == ["consolidated.00.pth"]
    assert weight_files(names, None, ["*.pt"]) == []


def test_a_numbered_set_that_patterns_ask_for_is_whole(tmp_path):
    """What is missing of it is named, as long as it was asked for."""
    one, two = "consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"
    source = resolve(write({one: tensors("a"), "model.safetensors": tensors("b")}, tmp_path))
    assert list(Manifest.read(source, "*-00001-*").tensors) == ["a"]
    with pytest.raises(MissingFileError, match=two):
        Manifest.read(source, "consolidated*")
    assert any(two in problem for problem in verify_source(source, "consolidated*").problems)


def test_unindexed_tensors_are_reported(tmp_path):
    """Tensors that the index doesn't name are there, and listed."""
    write({INDEX: index({"a": ONE}), ONE: tensors("a", "extra")}, tmp_path)
    manifest = Manifest.read(resolve(tmp_path))
    assert set(manifest.tensors) == {"a", "extra"}
    assert manifest.unindexed == ("extra",)


def test_unknown_name_gets_the_nearest(tmp_path):
    write({"model.safetensors": tensors("model.layers.0.weight")}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.weight") as caught:
        Manifest.read(resolve(tmp_path)).entry("model.layer.0.weight")
    assert caught.value.tensor == "model.layer.0.weight"


def test_order(tmp_path):
    """Files in natural order, tensors of a file by name, whatever the order on disk and in the index."""
    files = {f"m-{i}.safetensors": tensors(f"z{i}", f"a{i}") for i in (10, 9, 1)}
    manifest = Manifest.read(resolve(write(files, tmp_path)))
    assert [file.name for file in manifest.files] == [
        "m-1.safetensors",
        "m-9.safetensors",
        "m-10.safetensors",
    ]
    assert list(manifest.tensors) == ["a1", "z1", "a9", "z9", "a10", "z10"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model-10.x", "model-2.x"], ["model-2.x", "model-10.x"]),
        (["b/model-1.x", "a/model-2.x"], ["b/model-1.x", "a/model-2.x"]),
        (["x", "1", "a1", "a"], ["1", "a", "a1", "x"]),
        (["m²", "m1", "m٣"], ["m1", "m٣", "m²"]),
    ],
    ids=str,
)
def test_natural_sort_key(names, expected):
    assert sorted(names, key=natural_sort_key) == expected


def test_identity_is_of_the_content(tmp_path):
    """The same files elsewhere, touched or linked: one identity. Another header, size or index: another."""
    files = {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("b")}
    here, there, linked = (tmp_path / name for name in ("here", "there", "linked"))
    write(files, here)
    write(files, there)
    linked.mkdir()
    for name in files:
        os.symlink(here / name, linked / name)
        os.utime(there / name, (1, 1))
    first = Manifest.read(resolve(here))
    for other in (there, linked, f"{here}/."):
        assert Manifest.read(resolve(other)) == first
        assert Manifest.read(resolve(other)).identity == first.identity
    for name, changed in {
        ONE: tensors("A"),
        TWO: tensors("b", "c"),
        INDEX: index({"b": TWO, "a": ONE}),
        "extra": b"x",
    }.items():
        folder = tmp_path / f"changed-{name}"
        if name == ONE:
            write({**files, ONE: changed, INDEX: index({"A": ONE, "b": TWO})}, folder)
        else:
            write({**files, name: changed}, folder)
        assert (Manifest.read(resolve(folder)) == first) is (name == "extra")


def test_pickles(tmp_path):
    """A manifest goes to another process whole, and stays immutable there."""
    first = Manifest.read(resolve(write({"model.safetensors": tensors("a", "b")}, tmp_path)))
    copy = pickle.loads(pickle.dumps(first))
    assert copy == first
    assert dict(copy.tensors) == dict(first.tensors)
    assert copy.source == first.source
    for manifest in (first, copy):
        with pytest.raises(TypeError):
            manifest.tensors["x"] = manifest.tensors["a"]


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["m-00001-of-00001.safetensors"], []),
        (["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"], []),
        (["m-00000-of-00002.safetensors"], ["m-00001-of-00002.safetensors"]),
        (["m-00002-of-00002.safetensors"], ["m-00001-of-00002.safetensors"]),
        (
            ["a-00001-of-00002.safetensors", "b-00002-of-00002.safetensors"],
            ["a-00002-of-00002.safetensors", "b-00001-of-00002.safetensors"],
        ),
        (["m-1-of-2.safetensors", "m-00001-of-00000.safetensors", "m.safetensors"], []),
    ],
    ids=str,
)
def test_missing_numbered_files(files, missing):
    assert missing_numbered_files(files) == (len(missing), missing)
