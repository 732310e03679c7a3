"""Where a model's quantisation config is found, clause by clause, in the order of the contract."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from raywl.errors import CorruptFileError, MissingFileError, NotFoundError, OfflineError
from raywl.quant import Fp8Config, ModelOptMixedConfig, registry
from raywl.weight_utils import (
    get_quant_config,
    get_sparse_attention_config,
    register_quantization_config,
)
from tests.hub_server import HubServer
from tests.quant.test_configs import FP8_BLOCK, MIXED, NVFP4


class Recorder:
    """A reader that keeps what it was given, and takes it apart."""

    filenames: tuple[str, ...] = ()

    def __init__(self, config=None, how="nothing"):
        self.config, self.how = copy.deepcopy(config), how
        if isinstance(config, dict):
            for value in config.values():
                if isinstance(value, dict):
                    value.clear()
            config.clear()

    @classmethod
    def from_config(cls, config):
        return cls(config, "config")

    @classmethod
    def get_config_filenames(cls):
        return cls.filenames


class Overridable(Recorder):
    """One that overrides may be for."""

    @classmethod
    def from_config_file(cls, path):
        return cls(path, "file")

    @classmethod
    def from_config_dict_json(cls, text):
        return cls(text, "json")


class FromFiles(Recorder):
    filenames = ("quant.json", "other_quant.json")


@pytest.fixture(autouse=True)
def _readers(monkeypatch):
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    for name in ("VLLM_USE_MODELSCOPE", "RAYWL_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    register_quantization_config("recorder", Recorder)
    register_quantization_config("overridable", Overridable)
    register_quantization_config("from_files", FromFiles)


LOAD = SimpleNamespace(download_dir=None)


def model(quantization="recorder", *, path="/no/such/model", overrides=None, **hf):
    return SimpleNamespace(
        model=str(path),
        revision=None,
        quantization=quantization,
        hf_config=SimpleNamespace(**hf),
        hf_overrides={} if overrides is None else overrides,
    )


def write(folder, **files):
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)


@pytest.mark.parametrize("quantization", [None, ""])
def test_no_quantization_set(quantization):
    with pytest.raises(ValueError, match="quantization is not set"):
        get_quant_config(model(quantization), LOAD)


def test_an_unknown_one():
    with pytest.raises(ValueError, match="unknown quantization 'nonesuch'"):
        get_quant_config(model("nonesuch"), LOAD)


TEXT = SimpleNamespace(quantization_config={"from": "text"})


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        (
            {
                "quantization_config": {"from": "own"},
                "text_config": TEXT,
                "compression_config": {"from": "c"},
            },
            "own",
        ),
        ({"text_config": TEXT, "compression_config": {"from": "c"}}, "text"),
        ({"quantization_config": None, "text_config": TEXT}, "text"),
        ({"text_config": SimpleNamespace(), "compression_config": {"from": "c"}}, "c"),
        ({"compression_config": {"from": "c"}}, "c"),
    ],
)
def test_the_models_own_config_in_order(hf, expected):
    """Before overrides, and before any file."""
    found = get_quant_config(model(overrides={"quantization_config_file": "x"}, **hf), LOAD)
    assert (found.how, found.config) == ("config", {"from": expected})


def test_an_empty_config_is_one():
    assert get_quant_config(model(quantization_config={}), LOAD).config == {}


def test_an_object_that_gives_a_dict():
    written = SimpleNamespace(to_dict=lambda: {"a": 1})
    assert get_quant_config(model(quantization_config=written), LOAD).config == {"a": 1}
    with pytest.raises(ValueError, match="must be a dict, not 3"):
        get_quant_config(model(quantization_config=3), LOAD)


def test_the_users_dict_is_never_modified():
    """MUST DIFFER: neither by the counts of heads nor by what the reader does, however deep."""
    written = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    }
    before = copy.deepcopy(written)
    for _ in range(2):
        found = get_quant_config(model(quantization_config=written, num_attention_heads=8), LOAD)
        assert found.config == {**before, "total_num_heads": 8, "total_num_kv_heads": 8}
        assert written == before


@pytest.mark.parametrize(
    ("hf", "heads"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, (8, 2)),
        ({"num_attention_heads": 8}, (8, 8)),
        ({"num_attention_heads": 8, "num_key_value_heads": None}, (8, 8)),
        (
            {
                "num_attention_heads": 1,
                "text_config": SimpleNamespace(num_attention_heads=16, num_key_value_heads=4),
            },
            (16, 4),
        ),
        ({}, (None, None)),
    ],
)
@pytest.mark.parametrize("quant_method", ["compressed-tensors", None])
def test_counts_of_heads_for_compressed_tensors(hf, heads, quant_method):
    written = {"config_groups": {"group_0": {}}} | ({"quant_method": quant_method} if quant_method else {})
    register_quantization_config("compressed-tensors-like", Recorder)
    if quant_method is None:
        registry._classes["compressed-tensors"] = Recorder
    method = "compressed-tensors-like" if quant_method else "compressed-tensors"
    found = get_quant_config(model(method, quantization_config=written, **hf), LOAD).config
    assert (found["total_num_heads"], found["total_num_kv_heads"]) == heads


@pytest.mark.parametrize(
    "written", [{"quant_method": "compressed-tensors"}, {"quant_method": "fp8", "config_groups": {}}]
)
def test_no_counts_for_others(written):
    found = get_quant_config(model(quantization_config=written, num_attention_heads=8), LOAD)
    assert found.config == written


def test_the_built_in_readers_are_found():
    found = get_quant_config(model("fp8", quantization_config=FP8_BLOCK), LOAD)
    assert found == Fp8Config.from_config(FP8_BLOCK)


def test_modelopt_mixed_with_layers_in_the_config():
    found = get_quant_config(model("modelopt_mixed", quantization_config=MIXED), LOAD)
    assert found == ModelOptMixedConfig.from_config(MIXED)
    inside = get_quant_config(model("modelopt_mixed", quantization_config={"quantization": MIXED}), LOAD)
    assert inside == found


def test_modelopt_mixed_without_them_goes_on_to_the_files(tmp_path):
    write(tmp_path, hf_quant_config={"producer": {"name": "modelopt"}, "quantization": MIXED})
    written = {"quant_algo": "MIXED_PRECISION"}
    found = get_quant_config(model("modelopt_mixed", path=tmp_path, quantization_config=written), LOAD)
    assert found == ModelOptMixedConfig.from_config(MIXED)


class TestOverrides:
    """What `hf_overrides` names, after the model's own config."""

    def test_a_file(self):
        overrides = {"quantization_config_file": "q.json", "quantization_config_dict_json": "{}"}
        found = get_quant_config(model("overridable", overrides=overrides), LOAD)
        assert (found.how, found.config) == ("file", "q.json")

    def test_a_text(self):
        found = get_quant_config(
            model("overridable", overrides={"quantization_config_dict_json": '{"a": 1}'}), LOAD
        )
        assert (found.how, found.config) == ("json", '{"a": 1}')

    @pytest.mark.parametrize("quantization", ["recorder", "fp8"])
    @pytest.mark.parametrize(
        ("key", "reader"),
        [
            ("quantization_config_file", "from_config_file"),
            ("quantization_config_dict_json", "from_config_dict_json"),
        ],
    )
    def test_a_class_without_the_method(self, quantization, key, reader):
        with pytest.raises(NotImplementedError, match=f"hf_overrides has {key}, but .* has no {reader}"):
            get_quant_config(model(quantization, overrides={key: "x"}), LOAD)

    @pytest.mark.parametrize("overrides", [lambda config: config, [("a", 1)], "{}"])
    def test_no_dict(self, overrides):
        with pytest.raises(ValueError, match="hf_overrides must be a dict"):
            get_quant_config(model(overrides=overrides), LOAD)

    def test_none_given(self):
        config = model()
        del config.hf_overrides
        assert get_quant_config(config, LOAD).how == "nothing"


def test_bitsandbytes_in_flight():
    found = get_quant_config(model("bitsandbytes"), LOAD)
    assert not found.is_prequantized
    written = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert get_quant_config(model("bitsandbytes", quantization_config=written), LOAD).is_prequantized


def test_bitsandbytes_is_given_an_empty_config():
    registry._classes["bitsandbytes"] = Recorder
    found = get_quant_config(model("bitsandbytes"), LOAD)
    assert (found.how, found.config) == ("config", {})


class TestFiles:
    """The JSON files of the model's folder."""

    def test_no_name_wanted(self):
        """Not even the folder is looked at."""
        assert get_quant_config(model("recorder"), LOAD).how == "nothing"

    @pytest.mark.parametrize("name", ["quant", "hf_quant", "other_quant"])
    def test_the_one_that_ends_so(self, tmp_path, name):
        write(tmp_path, config={"a": 0}, **{name: {"bits": 4}})
        (tmp_path / "quant.json.txt").write_text("no")
        found = get_quant_config(model("from_files", path=tmp_path), LOAD)
        assert (found.how, found.config) == ("config", {"bits": 4})

    def test_none(self, tmp_path):
        write(tmp_path, config={})
        with pytest.raises(
            ValueError, match=r"from_files has no config file; expected .* quant\.json or other"
        ):
            get_quant_config(model("from_files", path=tmp_path), LOAD)

    def test_several(self, tmp_path):
        write(tmp_path, quant={}, a_quant={})
        with pytest.raises(ValueError, match=r"several config files: a_quant\.json, quant\.json"):
            get_quant_config(model("from_files", path=tmp_path), LOAD)

    def test_a_folder_of_such_a_name_is_none(self, tmp_path):
        write(tmp_path, quant={"bits": 4})
        (tmp_path / "a_quant.json").mkdir()
        assert get_quant_config(model("from_files", path=tmp_path), LOAD).config == {"bits": 4}

    def test_a_link_that_leads_nowhere(self, tmp_path):
        (tmp_path / "quant.json").symlink_to(tmp_path / "absent")
        with pytest.raises(MissingFileError, match=r"quant\.json"):
            get_quant_config(model("from_files", path=tmp_path), LOAD)

    @pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "NaN"])
    def test_no_json_object(self, tmp_path, text):
        write(tmp_path, quant=text)
        with pytest.raises(CorruptFileError, match=r"quant\.json"):
            get_quant_config(model("from_files", path=tmp_path), LOAD)

    @pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mxfp8"])
    def test_modelopt(self, tmp_path, method):
        write(tmp_path, hf_quant_config=NVFP4)
        assert get_quant_config(model(method, path=tmp_path), LOAD).quant_algo == "NVFP4"

    @pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mixed"])
    @pytest.mark.parametrize("producer", [None, {"name": "other"}, {}, "other"])
    def test_modelopt_of_another_producer(self, tmp_path, method, producer):
        config = {**NVFP4, "producer": producer}
        if producer is None:
            del config["producer"]
        write(tmp_path, hf_quant_config=config)
        with pytest.raises(ValueError, match=r"hf_quant_config\.json: made by .*, but .* needs .*'modelopt'"):
            get_quant_config(model(method, path=tmp_path), LOAD)

    def test_a_model_that_is_not_there(self):
        with pytest.raises(NotFoundError, match="path not found"):
            get_quant_config(model("from_files"), LOAD)


FILES = {
    "config.json": b"{}",
    "my_quant.json": b'{"bits": 4}',
    "sub/quant.json": b"{}",
    "sparse_attention_config.json": b'{"0": {}}',
    "model.safetensors": b"x" * 100,
    "tokenizer.json": b"{}",
}


@pytest.mark.usefixtures("client")
class TestFromAHub:
    """A model that isn't local: only the files that may be wanted are fetched, into the given cache."""

    def test_the_config(self, client: HubServer, tmp_path):
        commit = client.add("org/name", FILES)
        for _ in range(2):
            load = SimpleNamespace(download_dir=str(tmp_path / "mine"))
            found = get_quant_config(model("from_files", path="org/name"), load)
            assert found.config == {"bits": 4}
        assert dict(client.downloads()) == {"org/name/my_quant.json": 1}
        folder = tmp_path / "mine/models--org--name/snapshots" / commit
        assert os.listdir(folder) == ["my_quant.json"]

    def test_none_there(self, client: HubServer):
        client.add("org/name", {"config.json": b"{}"})
        with pytest.raises(ValueError, match="no config file"):
            get_quant_config(model("from_files", path="org/name"), LOAD)
        assert get_sparse_attention_config(model(path="org/name"), LOAD) == {}

    def test_no_such_repository(self, client: HubServer):
        with pytest.raises(NotFoundError):
            get_quant_config(model("from_files", path="org/name"), LOAD)

    def test_the_revision(self, client: HubServer):
        client.add("org/name", FILES)
        client.add("org/name", {"a_quant.json": b'{"old": 1}'}, branch="v1")
        config = model("from_files", path="org/name")
        config.revision = "v1"
        assert get_quant_config(config, LOAD).config == {"old": 1}

    def test_offline(self, client: HubServer, monkeypatch):
        client.add("org/name", FILES)
        get_quant_config(model("from_files", path="org/name"), LOAD)
        client.forget()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert get_quant_config(model("from_files", path="org/name"), LOAD).config == {"bits": 4}
        assert get_sparse_attention_config(model(path="org/name"), LOAD) == {}
        with pytest.raises(OfflineError):
            get_quant_config(model("from_files", path="org/other"), LOAD)
        assert not client.requests

    def test_sparse_attention(self, client: HubServer):
        client.add("org/name", FILES)
        assert get_sparse_attention_config(model(path="org/name"), LOAD) == {"0": {}}
        assert dict(client.downloads()) == {"org/name/sparse_attention_config.json": 1}


class TestSparseAttention:
    """`get_sparse_attention_config` of a folder."""

    def test_there(self, tmp_path):
        write(tmp_path, sparse_attention_config={"0": {"a": 1}}, mine={"1": {}})
        assert get_sparse_attention_config(model(path=tmp_path), LOAD) == {"0": {"a": 1}}
        assert get_sparse_attention_config(model(path=tmp_path), LOAD, "mine.json") == {"1": {}}

    def test_absent(self, tmp_path):
        assert get_sparse_attention_config(model(path=tmp_path), LOAD) == {}

    def test_a_link_that_leads_nowhere(self, tmp_path):
        """Part of a download that isn't whole, and not a model without one."""
        (tmp_path / "sparse_attention_config.json").symlink_to(tmp_path / "absent")
        with pytest.raises(MissingFileError, match=r"sparse_attention_config\.json"):
            get_sparse_attention_config(model(path=tmp_path), LOAD)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_damaged(self, tmp_path, text):
        write(tmp_path, sparse_attention_config=text)
        with pytest.raises(CorruptFileError, match=r"sparse_attention_config\.json"):
            get_sparse_attention_config(model(path=tmp_path), LOAD)


def test_reading_configs_needs_no_torch():
    """Nor a hub's client, where the config is at hand."""
    code = """
import sys, types
sys.modules["torch"] = None
from raywl.quant import get_quant_config
hf = types.SimpleNamespace(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
model = types.SimpleNamespace(quantization="fp8", model="x", hf_config=hf)
assert get_quant_config(model, None).layouts("x")["weight_scale_inv"].block_shape == (128, 128)
assert "huggingface_hub" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
