"""Configs as checkpoints carry them, and what they say of a layer's tensors."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from types import SimpleNamespace

import pytest

from raywl.quant import (
    AWQConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    Fp8Config,
    GPTQConfig,
    ModelOptConfig,
    ModelOptMixedConfig,
    Mxfp4Config,
    QuantizationConfig,
    TensorLayout,
    get_quantization_config,
    quantization_methods,
    register_quantization_config,
)
from raywl.quant.base import layer_matches

FP8_BLOCK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 64],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}
FP8_TENSOR = {"activation_scheme": "static", "quant_method": "fp8"}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"}
AWQ = {"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "quant_method": "awq"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
NVFP4 = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_*"]},
}
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head"],
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 32},
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
    },
}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}


def compressed(weights, *, form="pack-quantized", inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
W8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
FLOAT_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = "float8_e4m3fn"

TENSORS = [
    (Fp8Config, FP8_BLOCK, {"weight": FP8, "weight_scale_inv": "float32"}),
    (Fp8Config, {**FP8_BLOCK, "scale_fmt": "ue8m0"}, {"weight": FP8, "weight_scale_inv": None}),
    (Fp8Config, FP8_TENSOR, {"weight": FP8, "weight_scale": "float32", "input_scale": "float32"}),
    (Fp8Config, {"quant_method": "fp8", "fmt": "e5m2"}, {"weight": "float8_e5m2", "weight_scale": "float32"}),
    (GPTQConfig, GPTQ, {"qweight": "int32", "qzeros": "int32", "scales": "float16", "g_idx": "int32"}),
    (AWQConfig, AWQ, {"qweight": "int32", "qzeros": "int32", "scales": "float16"}),
    (AWQConfig, {**AWQ, "zero_point": False}, {"qweight": "int32", "scales": "float16"}),
    (Mxfp4Config, MXFP4, {"blocks": "uint8", "scales": "uint8"}),
    (
        ModelOptConfig,
        NVFP4,
        {"weight": "uint8", "weight_scale": FP8, "weight_scale_2": "float32", "input_scale": "float32"},
    ),
    (
        ModelOptConfig,
        {"quant_algo": "fp8"},
        {"weight": FP8, "weight_scale": "float32", "input_scale": "float32"},
    ),
    (ModelOptConfig, {"quant_algo": "FP8_PB_WO"}, {"weight": FP8, "weight_scale": "float32"}),
    (ModelOptConfig, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {"weight": FP8, "weight_scale": "float32"}),
    (ModelOptConfig, {"quant_algo": "MXFP8"}, {"weight": FP8, "weight_scale": "uint8"}),
    (BitsAndBytesConfig, BNB8, {"weight": "int8", "SCB": "float32"}),
    (
        BitsAndBytesConfig,
        BNB4,
        {
            "weight": "uint8",
            "weight.absmax": "float32",
            "weight.quant_map": "float32",
            "weight.quant_state.bitsandbytes__nf4": "uint8",
        },
    ),
    (BitsAndBytesConfig, {}, {}),
    (
        CompressedTensorsConfig,
        compressed(W4),
        {"weight_packed": "int32", "weight_scale": None, "weight_shape": "int64"},
    ),
    (
        CompressedTensorsConfig,
        compressed({**W4, "symmetric": False, "actorder": "group"}),
        {
            "weight_packed": "int32",
            "weight_scale": None,
            "weight_shape": "int64",
            "weight_zero_point": "int32",
            "weight_g_idx": "int32",
        },
    ),
    (
        CompressedTensorsConfig,
        compressed(W8_CHANNEL, form="int-quantized", inputs={"num_bits": 8, "dynamic": False}),
        {"weight": "int8", "weight_scale": None, "input_scale": None},
    ),
    (
        CompressedTensorsConfig,
        compressed(FLOAT_BLOCK, form="float-quantized", inputs={"dynamic": True}),
        {"weight": FP8, "weight_scale": None},
    ),
    (
        CompressedTensorsConfig,
        compressed(NV, form="nvfp4-pack-quantized", inputs={"dynamic": "local"}),
        {"weight_packed": "uint8", "weight_scale": FP8, "weight_global_scale": "float32"},
    ),
    (
        CompressedTensorsConfig,
        compressed({**NV, "strategy": "group", "group_size": 32}, form="mxfp4-pack-quantized"),
        {"weight_packed": "uint8", "weight_scale": "uint8"},
    ),
    (CompressedTensorsConfig, {"quant_method": "compressed-tensors"}, {}),
]


@pytest.mark.parametrize(("cls", "config", "expected"), TENSORS)
def test_the_tensors_of_a_layer_and_their_dtypes(cls, config, expected):
    before = copy.deepcopy(config)
    found = cls.from_config(config)
    assert {
        name: layout.dtype for name, layout in found.layouts("model.layers.1.mlp.up_proj").items()
    } == expected
    assert config == before
    assert found == cls.from_config(json.loads(json.dumps(config)))
    assert hash(found) == hash(cls.from_config(config))


def test_fp8_blocks():
    config = Fp8Config.from_config(FP8_BLOCK)
    assert config.weight_block_size == (128, 64)
    assert config.layouts()["weight_scale_inv"] == TensorLayout("float32", block_shape=(128, 64))
    assert config.is_checkpoint_fp8_serialized
    assert not Fp8Config().layouts()
    assert not config.layouts("lm_head")
    assert not config.layouts("model.layers.0.mlp.gate")
    assert config.layouts("model.layers.0.mlp.gate_proj")


def test_gptq_groups_and_words():
    layouts = GPTQConfig.from_config(GPTQ).layouts()
    assert layouts["qweight"] == TensorLayout(
        "int32", 1, 0, packed_dim=0, packed_factor=Fraction(8), group_size=128
    )
    assert layouts["scales"] == TensorLayout("float16", 1, 0, group_size=128)
    assert GPTQConfig.from_config({**GPTQ, "bits": 3}).pack_factor == Fraction(32, 3)


@pytest.mark.parametrize("change", [{"desc_act": True}, {"group_size": -1}], ids=str)
def test_gptq_scales_that_every_rank_keeps(change):
    """With act-order, inputs of any group lie anywhere; and one group has one scale."""
    layouts = GPTQConfig.from_config({**GPTQ, **change}).layouts()
    assert layouts["scales"].input_dim is layouts["qzeros"].input_dim is None
    assert layouts["qweight"].input_dim == 0
    assert layouts["qweight"].group_size is None


def test_gptq_layers_of_their_own():
    config = GPTQConfig.from_config(
        {
            **GPTQ,
            "dynamic": {r"-:.*\.self_attn\..*": {}, r"+:model\.layers\.1\..*": {"bits": 8, "group_size": 32}},
            "modules_in_block_to_quantize": [["self_attn.q_proj", "mlp.up_proj"]],
        }
    )
    assert not config.layouts("model.layers.1.self_attn.q_proj")
    assert not config.layouts("model.layers.1.mlp.gate_proj")
    assert not config.layouts("lm_head")
    assert config.of_layer("model.layers.0.mlp.up_proj") == config
    assert config.layouts("model.layers.1.mlp.up_proj")["qweight"].packed_factor == 4
    assert config.layouts("model.layers.1.mlp.up_proj")["scales"].group_size == 32


def test_awq_from_its_own_file():
    """`quant_config.json` has other names for the same."""
    own = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert AWQConfig.from_config(own) == AWQConfig.from_config(AWQ)
    layouts = AWQConfig.from_config(own).layouts()
    assert layouts["qweight"] == TensorLayout("int32", 1, 0, packed_dim=1, packed_factor=8)
    assert layouts["qzeros"].group_size == layouts["scales"].group_size == 64


def test_mxfp4_patterns():
    config = Mxfp4Config.from_config(MXFP4)
    assert not config.layouts("model.layers.3.self_attn.q_proj")
    assert config.layouts("model.layers.3.mlp.experts")["scales"].group_size == 32


def test_modelopt_both_places_of_the_values():
    inner = {"quant_algo": "NVFP4", "ignore": ["lm_*"], "quant_method": "modelopt"}
    assert ModelOptConfig.from_config(NVFP4) == ModelOptConfig.from_config(inner)
    assert ModelOptConfig.from_config(NVFP4).group_size == 16
    assert not ModelOptConfig.from_config(NVFP4).layouts("lm_head")
    scale = ModelOptConfig.from_config({"quant_algo": "FP8_PB_WO"}).layouts()["weight_scale"]
    assert (scale.output_dim, scale.input_dim, scale.block_shape) == (0, 2, (128, 128))


def test_modelopt_mixed_layers():
    config = ModelOptMixedConfig.from_config(MIXED)
    assert config.layouts("model.layers.0.mlp.up_proj")["weight_scale"].group_size == 32
    assert config.layouts("model.layers.0.self_attn.q_proj")["weight_scale"].per_tensor
    assert not config.layouts("model.layers.1.mlp.up_proj")
    assert not config.layouts("lm_head")
    assert config == ModelOptMixedConfig.from_config({"quantization": MIXED})


def test_bitsandbytes_in_flight_has_no_quantised_tensors():
    config = BitsAndBytesConfig.from_config({})
    assert (config.load_in_4bit, config.load_in_8bit, config.is_prequantized) == (True, False, False)
    flat = BitsAndBytesConfig.from_config({**BNB4, "bnb_4bit_use_double_quant": True}).layouts()
    assert all(layout.input_dim is layout.output_dim is None for layout in flat.values())
    assert flat["weight.absmax"].dtype == "uint8"


def test_compressed_tensors_a_name_counts_before_a_class():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": W4},
        "group_1": {"targets": [r"re:.*\.down_proj$"], "weights": W8_CHANNEL, "format": "int-quantized"},
        "group_2": {"targets": ["model.layers.0.mlp.up_proj"], "weights": None},
    }
    config = CompressedTensorsConfig.from_config({**compressed(W4), "config_groups": groups})
    assert set(config.layouts("model.layers.0.mlp.down_proj")) == {"weight", "weight_scale"}
    assert set(config.layouts("model.layers.1.mlp.up_proj")) == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }
    assert not config.layouts("model.layers.0.mlp.up_proj")
    assert not config.layouts("lm_head")


def test_compressed_tensors_scales_of_heads():
    config = CompressedTensorsConfig.from_config(
        compressed(W4, kv_cache_scheme={"strategy": "attn_head"}, total_num_heads=8, total_num_kv_heads=2)
    )
    assert (config.total_num_heads, config.total_num_kv_heads) == (8, 2)
    assert config.kv_cache_layouts()["k_scale"] == TensorLayout(None, 0, None)
    tensor = CompressedTensorsConfig.from_config(compressed(W4, kv_cache_scheme={"strategy": "tensor"}))
    assert tensor.kv_cache_layouts()["v_scale"].per_tensor
    assert not CompressedTensorsConfig.from_config(compressed(W4)).kv_cache_layouts()


def test_compressed_tensors_older_spellings():
    block = {**FLOAT_BLOCK, "block_structure": "128x64"}
    config = CompressedTensorsConfig.from_config(compressed(block, form="float-quantized"))
    assert config.layouts()["weight_scale"].block_shape == (128, 64)
    acts = [
        CompressedTensorsConfig.from_config(compressed({**W4, "actorder": value})).schemes[0].actorder
        for value in (True, False, "dynamic", "static", None)
    ]
    assert acts == ["group", None, "group", "static", None]


@pytest.mark.parametrize(
    ("cls", "config", "said"),
    [
        (Fp8Config, {**FP8_BLOCK, "weight_block_size": [128]}, r"fp8: a block's size must be two.*\[128\]"),
        (Fp8Config, {**FP8_BLOCK, "weight_block_size": [128, 0]}, "at least 1, got 0"),
        (Fp8Config, {**FP8_BLOCK, "activation_scheme": "static"}, "blocks have a dynamic activation_scheme"),
        (Fp8Config, {"activation_scheme": "maybe"}, "one of 'static', 'dynamic', got 'maybe'"),
        (Fp8Config, {"fmt": "e3m4"}, "fmt must be one of 'e4m3', 'e5m2', got 'e3m4'"),
        (Fp8Config, {"ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
        (GPTQConfig, {"group_size": 128}, "gptq: the quantization config has no bits"),
        (GPTQConfig, {"bits": 4}, "no group_size"),
        (GPTQConfig, {**GPTQ, "bits": "4"}, "bits must be a whole number of at least 1, got '4'"),
        (GPTQConfig, {**GPTQ, "bits": 16}, "bits must be at most 8, got 16"),
        (GPTQConfig, {**GPTQ, "group_size": 0}, "group_size must be a whole number of at least 1, got 0"),
        (GPTQConfig, {**GPTQ, "group_size": True}, "group_size must be .* got True"),
        (GPTQConfig, {**GPTQ, "desc_act": "no"}, "desc_act must be true or false, got 'no'"),
        (GPTQConfig, {**GPTQ, "dynamic": ["x"]}, "dynamic must map"),
        (AWQConfig, {**AWQ, "version": "gemv"}, "version must be one of 'gemm', got 'gemv'"),
        (AWQConfig, {**AWQ, "bits": 3}, "values of 3 bits don't fill words of 32"),
        (
            BitsAndBytesConfig,
            {"load_in_8bit": True, "load_in_4bit": True},
            "one of load_in_8bit and load_in_4bit",
        ),
        (ModelOptConfig, {"quant_algo": "W4A8_AWQ"}, "quant_algo must be one of 'FP8'.* got 'W4A8_AWQ'"),
        (ModelOptConfig, {"quantization": 3}, "quantization must be an object, got 3"),
        (ModelOptMixedConfig, {"quant_algo": "FP8"}, "quant_algo must be one of 'MIXED_PRECISION'"),
        (ModelOptMixedConfig, {}, "no quantized_layers"),
        (ModelOptMixedConfig, {"quantized_layers": {"a": {}}}, "modelopt_mixed: a: .* no quant_algo"),
        (CompressedTensorsConfig, compressed({**W4, "strategy": "row"}), "group_0: strategy must be one of"),
        (
            CompressedTensorsConfig,
            compressed({"num_bits": 4, "strategy": "group"}),
            "strategy 'group' needs a group_size",
        ),
        (CompressedTensorsConfig, compressed({"strategy": "block"}), "a block's size must be two numbers"),
        (
            CompressedTensorsConfig,
            compressed(W4, sparsity_config={"format": "sparse-bitmask"}),
            "sparse weights of format 'sparse-bitmask' aren't known",
        ),
    ],
)
def test_what_can_not_be_is_named(cls, config, said):
    """Method, key, what was expected, and what was there."""
    with pytest.raises(ValueError, match=said):
        cls.from_config(config)


def test_an_unknown_format_is_refused_when_its_tensors_are_asked_for():
    config = CompressedTensorsConfig.from_config(compressed(W4, form="marlin-24"))
    with pytest.raises(ValueError, match="tensors of format 'marlin-24' aren't known; those of dense, pack"):
        config.layouts()


@pytest.mark.parametrize(
    ("layer", "patterns", "expected"),
    [
        ("lm_head", ["lm_head"], True),
        ("model.lm_head", ["lm_head"], True),
        ("lm_head_2", ["lm_head"], False),
        ("visual_proj_lm", ["visual"], False),
        ("visual.blocks.0", ["visual"], True),
        ("model.layers.10.mlp", ["model.layers.1"], False),
        ("model.layers.1.mlp", ["model.layers.1"], True),
        ("model.layers.1.mlp.up", ["*.mlp"], True),
        ("model.layers.1.mlp2", ["*.mlp"], False),
        ("model.layers.1.mlp", ["re:.*layers.[01]"], True),
        ("model.layers.1.mlp", ["re:layers"], False),
        ("a", [], False),
    ],
)
def test_layer_patterns(layer, patterns, expected):
    assert layer_matches(layer, patterns) is expected


def test_attributes_are_those_that_loaders_read():
    layout = TensorLayout("int32", 1, 0, packed_dim=0, packed_factor=8, group_size=128)
    assert layout.attributes() == {
        "output_dim": 1,
        "input_dim": 0,
        "packed_dim": 0,
        "packed_factor": 8,
        "group_size": 128,
    }
    assert layout.attributes(num_leading_dims=1) == {
        "output_dim": 2,
        "input_dim": 1,
        "packed_dim": 1,
        "packed_factor": 8,
        "group_size": 128,
    }
    assert TensorLayout("float32", None, None, per_tensor=True).attributes(1) == {
        "output_dim": None,
        "input_dim": None,
        "per_tensor": True,
    }


class TestRegistry:
    """Users add their own methods."""

    @pytest.fixture(autouse=True)
    def _as_before(self, monkeypatch):
        from raywl.quant import registry

        monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    def test_every_method_has_a_reader(self):
        for method in quantization_methods():
            cls = get_quantization_config(method)
            assert issubclass(cls, QuantizationConfig)
            assert cls().get_name() in (method, method.rpartition("_")[0])
            assert all(name.endswith(".json") for name in cls.get_config_filenames())

    def test_unknown_methods_are_named_with_what_there_is(self):
        with pytest.raises(ValueError, match=r"unknown quantization 'mine'; known are awq, .*mxfp4"):
            get_quantization_config("mine")

    def test_registered(self):
        mine = type("Mine", (), {})
        assert register_quantization_config("mine", mine) is mine
        assert get_quantization_config("mine") is mine
        assert "mine" in quantization_methods()

    def test_as_a_decorator(self):
        @register_quantization_config("mine")
        class Mine:
            pass

        assert get_quantization_config("mine") is Mine

    def test_taking_a_name_over_is_said(self):
        with pytest.warns(UserWarning, match="'fp8' was read by .*Fp8Config.* is by .*Mine"):
            register_quantization_config("fp8", type("Mine", (), {}))

    def test_only_classes(self):
        with pytest.raises(TypeError, match="must be a class"):
            register_quantization_config("mine", SimpleNamespace())
