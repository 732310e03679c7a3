"""Filters over lists of weight files: what stays, in which order, and what is refused."""

import os
import shutil
import warnings
from pathlib import Path

import pytest

from raywl.checkpoint.filters import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
    filter_mm_encoder_only_safetensors_files,
    filter_safetensors_files_by_weight_name,
    resolve_mm_encoder_only_lm_prefixes,
)
from raywl.checkpoint.index import natural_sort_key
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.remap.mapper import WeightsMapper
from tests.hostile.files import build, entry
from tests.hostile.folders import INDEX, ONE, TWO, Link, index, tensors, write

EXTRA = "consolidated.safetensors"


def paths(folder, *names):
    return [os.path.join(folder, name) for name in names]


@pytest.fixture(autouse=True)
def _no_unexpected_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def folder(tmp_path):
    """Two indexed shards, and a copy in another naming."""
    files = {ONE: tensors("a"), TWO: tensors("b"), EXTRA: tensors("c"), INDEX: index({"a": ONE, "b": TWO})}
    return str(write(files, tmp_path / "checkpoint"))


def test_natural_order_is_by_base_name_with_numbers():
    files = ["a/model-10.safetensors", "b/model-2.safetensors", "c/model-1.safetensors"]
    assert sorted(files, key=natural_sort_key) == files[::-1]


class TestDuplicates:
    def test_without_an_index_nothing_changes(self, tmp_path):
        files = paths(tmp_path, TWO, EXTRA, ONE)
        assert filter_duplicate_safetensors_files(files, str(tmp_path), INDEX) == files

    def test_an_index_without_entries_counts_as_none(self, tmp_path):
        write({INDEX: index({}), ONE: tensors("a")}, tmp_path)
        files = paths(tmp_path, ONE)
        assert filter_duplicate_safetensors_files(files, str(tmp_path), INDEX) == files

    @pytest.mark.parametrize("order", [(ONE, EXTRA, TWO), (TWO, EXTRA, ONE)])
    def test_only_what_the_index_names_in_the_order_given(self, folder, order):
        kept = filter_duplicate_safetensors_files(paths(folder, *order), folder, INDEX)
        assert kept == [file for file in paths(folder, *order) if not file.endswith(EXTRA)]

    @pytest.mark.parametrize("name", [INDEX, "other.index.json"])
    def test_the_index_has_the_name_that_was_given(self, folder, name):
        if name != INDEX:
            write({name: index({"c": EXTRA})}, Path(folder))
        kept = filter_duplicate_safetensors_files(
            paths(folder, ONE, TWO) if name == INDEX else paths(folder, ONE, EXTRA), folder, name
        )
        assert kept == (paths(folder, ONE, TWO) if name == INDEX else paths(folder, EXTRA))

    def test_an_absent_file_of_a_number_that_no_file_has(self, tmp_path):
        name = f"model-{'9' * 5000}.safetensors"
        write({INDEX: index({"a": name})}, tmp_path)
        with pytest.raises(MissingFileError, match="1 of 1 weight files are absent"):
            filter_duplicate_safetensors_files([], str(tmp_path), INDEX)

    def test_all_absent_files_are_listed(self, tmp_path):
        """One shard is there, one isn't and one is a link to nothing: an incomplete download."""
        three = "model-00003.safetensors"
        files = {INDEX: index({"a": ONE, "b": TWO, "c": three}), ONE: tensors("a"), three: Link("nowhere")}
        write(files, tmp_path)
        with pytest.raises(FileNotFoundError, match="incomplete download") as caught:
            filter_duplicate_safetensors_files(paths(tmp_path, ONE, three), str(tmp_path), INDEX)
        assert isinstance(caught.value, MissingFileError)
        assert set(caught.value.files) == {TWO, three}
        assert str(tmp_path) in str(caught.value)

    def test_files_that_are_there_but_not_listed_are_named(self, folder):
        with pytest.warns(UserWarning, match=f"1 of 2 files .* {TWO}"):
            kept = filter_duplicate_safetensors_files(paths(folder, ONE), folder, INDEX)
        assert kept == paths(folder, ONE)

    def test_spellings_of_a_place_are_one(self, folder, tmp_path, monkeypatch):
        """`./`, doubled slashes, a linked folder on either side, and paths from the current folder."""
        link = str(tmp_path / "link")
        os.symlink(folder, link)
        monkeypatch.chdir(folder)
        for files in (
            [f"{folder}/./{ONE}", f"{folder}//{TWO}"],
            paths(link, ONE, TWO),
            [ONE, f"./{TWO}"],
            [f"{folder}/../checkpoint/{ONE}", f"{link}/{TWO}"],
        ):
            assert filter_duplicate_safetensors_files([*files, EXTRA], folder, INDEX) == files
            assert filter_duplicate_safetensors_files([*files, EXTRA], link, INDEX) == files
            assert filter_duplicate_safetensors_files([*files, EXTRA], ".", INDEX) == files

    @pytest.mark.parametrize("entry", [f"sub/{ONE}", f"./sub/{ONE}", f"sub//{ONE}", f"x/../sub/{ONE}"])
    def test_entries_in_sub_folders(self, tmp_path, entry):
        """Another file of the same base name isn't taken for the one that is meant."""
        files = {"sub": None, f"sub/{ONE}": tensors("a"), ONE: tensors("b"), INDEX: index({"a": entry})}
        write(files, tmp_path)
        given = paths(tmp_path, ONE, f"sub/{ONE}")
        assert filter_duplicate_safetensors_files(given, str(tmp_path), INDEX) == given[1:]

    @pytest.mark.parametrize("outside", ["../x.safetensors", "/etc/x.safetensors", "sub/../../x.safetensors"])
    def test_entries_that_lead_outside_are_refused(self, tmp_path, outside):
        write({INDEX: index({"a": outside})}, tmp_path)
        with pytest.raises(CheckpointError, match="leads outside") as caught:
            filter_duplicate_safetensors_files([], str(tmp_path), INDEX)
        assert INDEX in str(caught.value)
        assert repr(outside) in str(caught.value)

    def test_links_may_lead_anywhere(self, tmp_path):
        """A hub's snapshot: every file is a link to a blob, and two names may have one blob."""
        blob = tmp_path / "blobs" / "0f"
        blob.parent.mkdir()
        blob.write_bytes(tensors("a"))
        target = "../blobs/0f"
        snapshot = tmp_path / "snapshot"
        write({ONE: Link(target), EXTRA: Link(target), INDEX: index({"a": ONE})}, snapshot)
        kept = filter_duplicate_safetensors_files(paths(snapshot, EXTRA, ONE), str(snapshot), INDEX)
        assert kept == paths(snapshot, ONE)

    def test_a_linked_sub_folder_may_lead_anywhere(self, tmp_path):
        write({ONE: tensors("a")}, tmp_path / "elsewhere")
        here = write({"sub": Link("../elsewhere"), INDEX: index({"a": f"sub/{ONE}"})}, tmp_path / "here")
        for given in (paths(here, f"sub/{ONE}"), paths(tmp_path, f"elsewhere/{ONE}")):
            assert filter_duplicate_safetensors_files(given, str(here), INDEX) == given

    @pytest.mark.parametrize("raw", [b"{", b"[]", b'{"weight_map": []}'])
    def test_a_damaged_index_is_refused(self, tmp_path, raw):
        write({INDEX: raw}, tmp_path)
        with pytest.raises(CorruptFileError, match=INDEX):
            filter_duplicate_safetensors_files([], str(tmp_path), INDEX)

    def test_an_index_that_leads_nowhere_is_refused(self, tmp_path):
        """A download that ended before its index isn't read as if there were none."""
        write({INDEX: Link("nowhere")}, tmp_path)
        with pytest.raises(FileNotFoundError, match=INDEX):
            filter_duplicate_safetensors_files([], str(tmp_path), INDEX)


class TestTrainingFiles:
    @pytest.mark.parametrize(
        "name", ["training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"]
    )
    def test_trainer_files_are_left_out_and_logged(self, name, caplog):
        caplog.set_level("INFO")
        files = ["m/pytorch_model.bin", f"m/{name}", f"m/sub/{name}", f"m/my_{name}", "m/model.pt"]
        assert filter_files_not_needed_for_inference(files) == [files[0], files[-1]]
        assert all(file in caplog.text for file in files[1:-1])

    def test_others_stay(self, caplog):
        caplog.set_level("INFO")
        files = ["optimizer.bin.safetensors", "b.bin", "optimizer.pt/model.bin", "scheduler.bin", "a.pt"]
        assert filter_files_not_needed_for_inference(files) == files
        assert not caplog.text


class TestByWeightName:
    def test_only_files_of_unused_weights_alone_are_left_out(self, tmp_path):
        write({"a": tensors("x.1", "x.2"), "b": tensors("x.3", "y"), "c": tensors("z")}, tmp_path)
        given = paths(tmp_path, "c", "a", "b")
        kept = filter_safetensors_files_by_weight_name(given, lambda name: name.startswith("x."))
        assert kept == paths(tmp_path, "c", "b")

    def test_if_all_would_go_all_stay(self, tmp_path):
        write({"a": tensors("x"), "b": tensors("y")}, tmp_path)
        given = paths(tmp_path, "b", "a")
        assert filter_safetensors_files_by_weight_name(given, lambda name: True) == given
        assert filter_safetensors_files_by_weight_name([], lambda name: True) == []

    def test_metadata_is_no_tensor(self, tmp_path):
        header = {"__metadata__": {"format": "pt"}, "x": entry(offsets=[0, 8])}
        write({"a": build(header, bytes(8)), "b": tensors("y")}, tmp_path)
        seen = []
        filter_safetensors_files_by_weight_name(paths(tmp_path, "a", "b"), lambda n: bool(seen.append(n)))
        assert sorted(seen) == ["x", "y"]

    def test_only_headers_are_read(self, tmp_path):
        """256 MiB of data, of which the process reads less than one."""
        num_bytes = 256 << 20
        header = {"x": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
        write({"a": build(header, b""), "b": tensors("y")}, tmp_path)
        os.truncate(tmp_path / "a", os.path.getsize(tmp_path / "a") + num_bytes)
        before = read_bytes()
        kept = filter_safetensors_files_by_weight_name(paths(tmp_path, "a", "b"), "x".__eq__)
        assert kept == paths(tmp_path, "b")
        assert read_bytes() - before < 1 << 20

    def test_damaged_and_absent_files_are_named(self, tmp_path):
        write({"a": tensors("x"), "b": b"short", "l": Link("nowhere")}, tmp_path)
        with pytest.raises(CorruptFileError, match=str(tmp_path / "b")):
            filter_safetensors_files_by_weight_name(paths(tmp_path, "a", "b"), lambda name: True)
        for absent in ("c", "l"):
            with pytest.raises(FileNotFoundError, match=absent) as caught:
                filter_safetensors_files_by_weight_name(paths(tmp_path, "a", absent), lambda name: True)
            assert str(tmp_path) in str(caught.value)

    def test_a_bare_name_is_in_the_current_folder(self, tmp_path, monkeypatch):
        write({"a": tensors("x"), "b": tensors("y")}, tmp_path)
        monkeypatch.chdir(tmp_path)
        assert filter_safetensors_files_by_weight_name(["a", "b"], "x".__eq__) == ["b"]


def read_bytes() -> int:
    """Bytes that this process has asked the kernel for."""
    with open("/proc/self/io") as lines:
        return int(dict(line.split(": ") for line in lines)["rchar"])


class TestPrefixes:
    @pytest.mark.parametrize(
        "names", [["language_model"], ["language_model."], ("language_model",) * 2, "language_model"]
    )
    def test_names_become_prefixes(self, names):
        assert resolve_mm_encoder_only_lm_prefixes(names) == ("language_model.",)

    def test_several_names_keep_their_order(self):
        assert resolve_mm_encoder_only_lm_prefixes(["model.llm", "head"]) == ("model.llm.", "head.")

    @pytest.mark.parametrize("names", [[], (), None])
    def test_no_names_give_none(self, names):
        assert resolve_mm_encoder_only_lm_prefixes(names) is None

    def test_the_whole_model_can_not_be_told_from_its_parts(self):
        with pytest.warns(UserWarning, match="whole model"):
            assert resolve_mm_encoder_only_lm_prefixes([""]) is None

    @pytest.mark.parametrize(
        "rules",
        [
            {"model.vision_tower.": "vision_tower."},
            {"model.layers.": "model.blocks.", "model.vision_tower.": "vision_tower."},
            {"model.vision": "vision"},
            {"model.": "vision."},
            {"model": "vision"},
            {"model.": ""},
        ],
        ids=str,
    )
    def test_prefixes_that_hold_other_weights_give_none_with_a_warning(self, rules):
        with pytest.warns(UserWarning, match="also hold other weights"):
            found = resolve_mm_encoder_only_lm_prefixes(
                ["model"], weights_mapper=WeightsMapper(orig_to_new_prefix=rules)
            )
        assert found is None

    @pytest.mark.parametrize(
        "rules",
        [
            {},
            {"model.transformer.": "model.layers."},
            {"model.text": "model"},
            {"model.vision_tower.": None},
            {"model_vision.": "vision."},
            {"visual.": "model.visual."},
        ],
        ids=str,
    )
    def test_other_rules_do_no_harm(self, rules):
        mapper = WeightsMapper(orig_to_new_prefix=rules)
        assert resolve_mm_encoder_only_lm_prefixes(["model"], weights_mapper=mapper) == ("model.",)

    def test_rules_into_another_prefix_of_the_language_model_do_no_harm(self):
        mapper = WeightsMapper(orig_to_new_prefix={"model.lm_head.": "lm_head."})
        found = resolve_mm_encoder_only_lm_prefixes(["model", "lm_head"], weights_mapper=mapper)
        assert found == ("model.", "lm_head.")


class TestEncoderOnly:
    def filter(self, tmp_path, weight_map, given, prefixes=("language_model.",), mapper=None):
        """The base names that stay of `given`, none of which needs to be on disk."""
        write({INDEX: index(weight_map)}, tmp_path)
        kept = filter_mm_encoder_only_safetensors_files(
            paths(tmp_path, *given), str(tmp_path), INDEX, prefixes, weights_mapper=mapper
        )
        return [os.path.relpath(file, tmp_path) for file in kept]

    def test_only_files_of_the_language_model_alone_go(self, tmp_path):
        """One file of its weights, two mixed ones, one without, and one that the index doesn't list."""
        weight_map = {
            "language_model.0": "lm",
            "language_model.1": "mixed",
            "visual.0": "mixed",
            "visual.1": "tower",
            "visual.2": "mixed too",
            "language_model.2": "mixed too",
        }
        given = ["tower", "mixed too", "unlisted", "lm", "mixed"]
        assert self.filter(tmp_path, weight_map, given) == ["tower", "mixed too", "unlisted", "mixed"]

    @pytest.mark.parametrize("prefixes", [["visual"], ["visual."], "visual"])
    def test_prefixes_end_at_a_module(self, tmp_path, prefixes):
        """C102: `visual` doesn't take `visual_proj_lm` along."""
        weight_map = {"visual.0": "a", "visual_proj_lm.0": "b"}
        assert self.filter(tmp_path, weight_map, ["a", "b"], prefixes) == ["b"]

    def test_a_weight_may_have_a_prefix_as_its_whole_name(self, tmp_path):
        assert self.filter(tmp_path, {"lm": "a", "x": "b"}, ["a", "b"], ["lm."]) == ["b"]

    def test_several_prefixes(self, tmp_path):
        weight_map = {"model.0": "a", "lm_head.weight": "a", "visual.0": "b"}
        assert self.filter(tmp_path, weight_map, ["a", "b"], ["model.", "lm_head."]) == ["b"]

    def test_without_prefixes_all_stay(self, tmp_path):
        assert self.filter(tmp_path, {"x": "a"}, ["a"], ()) == ["a"]

    @pytest.mark.parametrize("flat", [False, True])
    def test_names_are_compared_after_the_mapper(self, tmp_path, flat):
        """Nested and flat layouts of one model: in the flat one the language model is what is left over."""
        mapper = WeightsMapper(
            orig_to_new_prefix={
                "model.language_model.": "language_model.model.",
                "model.visual.": "visual.",
                "lm_head.": "language_model.lm_head.",
                "model.": "language_model.model.",
            }
        )
        lm, tower = ("model.", "visual.") if flat else ("model.language_model.", "model.visual.")
        weight_map = {f"{lm}layers.0": "a", "lm_head.weight": "a", f"{tower}blocks.0": "b"}
        assert self.filter(tmp_path, weight_map, ["a", "b"], mapper=mapper) == ["b"]
        assert self.filter(tmp_path, weight_map, ["a", "b"]) == ["a", "b"]

    def test_that_no_file_is_left_is_a_warning(self, tmp_path):
        with pytest.warns(UserWarning, match="none is left"):
            assert self.filter(tmp_path, {"language_model.0": "a"}, ["a"]) == []

    def test_a_name_that_the_mapper_drops_is_no_language_model_weight(self, tmp_path):
        mapper = WeightsMapper(orig_to_new_suffix={".inv_freq": None})
        weight_map = {"language_model.0": "a", "language_model.inv_freq": "a", "language_model.1": "b"}
        assert self.filter(tmp_path, weight_map, ["a", "b"], mapper=mapper) == ["a"]

    def test_any_object_that_maps_names_will_do(self, tmp_path):
        class Mapper:
            def map_name(self, name):
                return "language_model." + name

        with pytest.warns(UserWarning, match="none is left"):
            assert self.filter(tmp_path, {"x": "a"}, ["a"], mapper=Mapper()) == []

    def test_without_an_index_all_stay_with_one_warning(self, tmp_path):
        given = paths(tmp_path, "b", "a")
        with pytest.warns(UserWarning, match=INDEX) as seen:
            kept = filter_mm_encoder_only_safetensors_files(given, str(tmp_path), INDEX, ["lm."])
        assert kept == given
        assert len(seen) == 1

    @pytest.mark.parametrize("entry", ["sub/a", "./sub/a", "a"])
    def test_entries_are_base_names_or_paths(self, tmp_path, entry):
        assert self.filter(tmp_path, {"language_model.0": entry, "x": "b"}, ["sub/a", "b"]) == ["b"]

    def test_a_base_name_stands_for_one_file_alone(self, tmp_path):
        """Which of two files is meant can't be told, so both are read; the folder's own comes first."""
        weight_map = {"language_model.0": "a"}
        assert self.filter(tmp_path, weight_map, ["x/a", "y/a"]) == ["x/a", "y/a"]
        (tmp_path / "a").write_bytes(b"")
        assert self.filter(tmp_path, weight_map, ["x/a", "a"]) == ["x/a"]
        assert self.filter(tmp_path, weight_map, ["x/a"]) == ["x/a"]

    def test_spellings_of_a_place_are_one(self, tmp_path):
        real = write({INDEX: index({"lm.0": "a", "x": "b"})}, tmp_path / "real")
        os.symlink(real, tmp_path / "link")
        given = [f"{tmp_path}/link/./a", f"{tmp_path}/link/b"]
        kept = filter_mm_encoder_only_safetensors_files(given, str(real), INDEX, ["lm."])
        assert kept == given[1:]

    def test_entries_that_lead_outside_are_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="leads outside"):
            self.filter(tmp_path, {"x": "../a"}, ["a"])


FILTERS = [
    lambda files, folder: filter_duplicate_safetensors_files(files, folder, INDEX),
    lambda files, folder: filter_files_not_needed_for_inference(files),
    lambda files, folder: filter_safetensors_files_by_weight_name(files, lambda name: name == "c"),
    lambda files, folder: filter_mm_encoder_only_safetensors_files(files, folder, INDEX, ["lm."]),
]
"""None of them leaves out an indexed file of these folders."""
FILTER_IDS = ["duplicate", "not needed", "weight name", "encoder only"]


@pytest.mark.parametrize("run", FILTERS, ids=FILTER_IDS)
@pytest.mark.parametrize(
    "of_kind", [list, tuple, iter, dict.fromkeys], ids=["list", "tuple", "iterator", "keys"]
)
@pytest.mark.parametrize("path", [str, Path])
def test_files_of_any_kind(folder, run, of_kind, path):
    """An iterator, which gives its files once, is read to its end; paths come back as they were."""
    files = [path(os.path.join(folder, name)) for name in (TWO, ONE)]
    assert run(of_kind(files), path(folder)) == files


@pytest.mark.parametrize("run", FILTERS, ids=FILTER_IDS)
@pytest.mark.parametrize("path", [str, Path, os.fsencode])
def test_one_path_is_no_list(folder, run, path):
    with pytest.raises(TypeError, match="a list of paths, not the one path"):
        run(path(os.path.join(folder, ONE)), folder)


def test_inputs_are_left_alone(folder):
    """Lists come back as lists of their own."""
    shutil.rmtree(folder)
    given = ["a", "b"]
    for kept in (
        filter_duplicate_safetensors_files(given, folder, INDEX),
        filter_files_not_needed_for_inference(given),
    ):
        kept.clear()
    assert given == ["a", "b"]
