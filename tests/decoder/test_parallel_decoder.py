"""The decoder on Ray actors: its logits are those of transformers, however it is cut."""

from __future__ import annotations

import dataclasses
import math
import os
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

import parallel_decoder
import pytest
import ray
import torch
from parallel_decoder import DecoderConfig, greedy, load_arguments, logits_of, make_model

import raywl
from raywl.plan.reads import SLACK_BYTES

from .conftest import TOKENS, bytes_read_of

PADDED = {"pad_heads_to": 6, "pad_experts_to": 320}
TP_2, TP_4 = {"tp_size": 2}, {"tp_size": 4}
EP_2 = {"tp_size": 2, "ep_size": 2}
EP_2_OF_4 = {"tp_size": 4, "ep_size": 2}
DP_2 = {"tp_size": 2, "dp_size": 2, "ep_size": 2}
# What is launched, and what its ranks load besides: kind, layout, padding.
LAUNCHES = [
    (("gpt-oss", {"tp_size": 1}, {}), [("gpt-oss", {"tp_size": 1}, PADDED)]),
    (
        ("gpt-oss", TP_2, PADDED),
        [
            (kind, TP_2, {})
            for kind in ("gpt-oss", "llama", "llama-tied", "mistral", "mixtral", "qwen2", "qwen3")
        ],
    ),
    (("gpt-oss", EP_2, {}), [("gpt-oss", EP_2, PADDED), ("mixtral", EP_2, {}), ("mixtral", EP_2, PADDED)]),
    (
        ("mixtral", EP_2_OF_4, {}),
        [
            ("gpt-oss", EP_2_OF_4, {}),
            ("gpt-oss", TP_4, {"pad_experts_to": 65}),
            ("gpt-oss", DP_2, {}),
            ("llama", TP_4, {}),
            ("llama-tied", TP_4, {}),
            ("mixtral", TP_4, {}),
            ("mixtral", DP_2, PADDED),
        ],
    ),
]


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    """One local Ray with a CPU for each of four ranks."""
    patch = pytest.MonkeyPatch()
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    patch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "token"))
    patch.setenv("RAY_AUTH_TOKEN_PATH", os.environ.get("RAY_AUTH_TOKEN_PATH", str(token)))
    patch.delenv("RAY_ADDRESS", raising=False)
    for module in (parallel_decoder, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    patch.undo()


def config_of(checkpoint, padding):
    return dataclasses.replace(DecoderConfig.from_folder(checkpoint.folder), **padding)


def facts_of(model, tokens):
    """On a rank: logits, its sinks, and how many of its experts' values are zero."""
    params = dict(model.named_parameters())
    sinks = [param.tolist() for name, param in params.items() if name.endswith(".sinks")]
    zeros = {name: int((param == 0).sum()) for name, param in params.items() if ".experts." in name}
    return logits_of(model, tokens), sinks, zeros


def load_more(_model, config, folder, layout, tokens):
    """On a rank: another model, in any layout of as many ranks, over the group's process group."""
    context = raywl.ParallelContext.of_rank(raywl.current_context().rank, **layout)
    model = make_model(config)(context)
    report = raywl.load_into(model, folder, parallel=context, **load_arguments(config))
    return report, *facts_of(model, tokens)


def check(checkpoint, layout, config, reports, facts):
    """Everything was loaded, each rank read its experts alone, and computes what transformers does."""
    opened = raywl.open_checkpoint(checkpoint.folder)
    names = {name for report in reports for name in report.loaded}
    assert names == set(opened.tensors)
    for rank, (report, (logits, sinks, zeros)) in enumerate(zip(reports, facts, strict=True)):
        assert report.missing == []
        assert report.unexpected == []
        assert (logits - checkpoint.logits).abs().max() <= 1e-4
        context = raywl.ParallelContext.of_rank(rank, **layout)
        check_padding(checkpoint, context, config, sinks, zeros)
        read = bytes_read_of(report, opened)
        if not padding_of(config):
            # With padding some is read on its own, and fewer gaps are read over.
            assert report.bytes_read == sum(read.values())
        if context.moe_tp_size == 1:
            # Parts of less than a page may lie in gaps that are read over.
            heavy = {
                name: entry.nbytes
                for name, entry in opened.tensors.items()
                if ".experts." in name and entry.nbytes > SLACK_BYTES * config.num_experts
            }
            assert sum(read[name] for name in heavy) <= 1.02 * sum(heavy.values()) / context.ep_size


def padding_of(config):
    return config.pad_heads_to or config.pad_experts_to


def check_padding(checkpoint, context, config, sinks, zeros):
    local = config.num_attention_heads // context.tp_size
    for layer, values in enumerate(sinks):
        whole = weight_of(checkpoint, f"model.layers.{layer}.self_attn.sinks").tolist()
        own = whole[context.tp_rank * local : (context.tp_rank + 1) * local]
        assert values == own + [-math.inf] * ((config.pad_heads_to or local) - local)
    if config.num_experts:
        width = -(-config.intermediate_size // context.moe_tp_size)
        more = (config.pad_experts_to or width) - width
        each = config.num_experts // context.ep_size * config.hidden_size * more
        for name, count in zeros.items():
            if name.endswith("weight"):
                assert count == each * (2 if "w13" in name else 1)


def weight_of(checkpoint, name):
    return dict(raywl.open_checkpoint(checkpoint.folder).iter_weights([name]))[name]


@pytest.mark.parametrize(("launched", "more"), LAUNCHES, ids=["1 rank", "tp 2", "tp 2, ep 2", "4 ranks"])
@pytest.mark.usefixtures("local_ray")
def test_logits_are_those_of_transformers(written, launched, more):
    kind, layout, padding = launched
    checkpoint = written(kind)
    config = config_of(checkpoint, padding)
    with raywl.launch(
        checkpoint.folder, make_model(config), timeout_s=150.0, **layout, **load_arguments(config)
    ) as group:
        assert group.report.missing == []
        assert group.report.unexpected == []
        check(checkpoint, layout, config, group.report.ranks, group.run(facts_of, TOKENS))
        for tokens in group.run(greedy, TOKENS[0], 5):
            assert tokens == checkpoint.greedy
        for kind, layout, padding in more:
            checkpoint = written(kind)
            config = config_of(checkpoint, padding)
            answers = group.run(load_more, config, checkpoint.folder, layout, TOKENS)
            check(checkpoint, layout, config, [report for report, *_ in answers], [f for _, *f in answers])


@pytest.mark.usefixtures("local_ray")
def test_the_script(written, tmp_path):
    """As a user runs it on a cluster, from another folder."""
    checkpoint = written("gpt-oss")
    script = Path(parallel_decoder.__file__).with_name("run.py")
    options = ["--address", ray.get_runtime_context().gcs_address]
    options += ["--tp", "2", "--ep", "2", "--check", "--tokens", "5", "--prompt", *map(str, TOKENS[0])]
    done = subprocess.run(
        [sys.executable, str(script), checkpoint.folder, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"tokens: {' '.join(map(str, checkpoint.greedy))}\n" in done.stdout
    assert "rank 1: read " in done.stdout
    assert "largest difference of a logit: " in done.stdout


def test_the_script_compares_in_float32(written, tmp_path):
    """A checkpoint in bfloat16, as trained ones are, isn't told from its own rounding otherwise."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(written("llama").folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        exact = model.float().eval()(torch.tensor([TOKENS[0]])).logits
    main = runpy.run_path(str(Path(parallel_decoder.__file__).with_name("run.py")))
    assert main["largest_difference"](str(tmp_path), TOKENS[0], [exact]) <= 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--tp", "3"], "padded vocabulary 1024"), (["--tp", "2", "--ep", "3"], "ep_size 3")],
)
def test_the_script_says_what_does_not_divide(written, monkeypatch, capsys, options, message):
    from parallel_decoder import run

    monkeypatch.setattr(sys, "argv", ["run.py", written("mixtral").folder, *options])
    with pytest.raises(SystemExit) as caught:
        run.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_attention_with_sinks_is_that_of_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from parallel_decoder.models import attend

    q, k, v, sinks = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(4)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sinks
    age = torch.arange(6)[:, None] - torch.arange(6)
    mask = torch.zeros(6, 6).masked_fill((age < 0) | (age >= 3), float("-inf"))
    expected, _ = gpt_oss.eager_attention_forward(module, q, k, v, mask, 8**-0.5)
    assert torch.allclose(attend(q, k, v, 3, sinks), expected.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "'bert'.*'llama', 'mistral'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "'yarn' with mscale"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
    ],
)
def test_what_it_does_not_compute_is_refused(written, change, message):
    import json

    config = json.loads((Path(written("llama").folder) / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        make_model(DecoderConfig.from_dict({**config, **change}))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp_size": 3}, "vocabulary 1024 .*3 parts"),
        ({"pp_size": 2}, "pp_size 2"),
        ({"tp_size": 8}, "heads 4 .*8"),
    ],
)
def test_cuts_that_are_not_possible_are_refused(written, layout, message):
    config = DecoderConfig.from_folder(written("llama").folder)
    with pytest.raises(ValueError, match=message):
        make_model(config)(raywl.ParallelContext(**layout))


@pytest.mark.parametrize("num_heads", [2, 5])
def test_padding_that_is_not_possible_is_refused(written, num_heads):
    config = config_of(written("llama"), {"pad_heads_to": num_heads})
    with pytest.raises(ValueError, match=f"4 heads in groups of 2 can't be padded to {num_heads}"):
        make_model(config)(raywl.ParallelContext())


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0},
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 2.0, "original_max_position_embeddings": 8192, "attention_factor": 1.5},
    ],
)
def test_stretched_rope_is_that_of_transformers(rope):
    transformers = pytest.importorskip("transformers")
    from parallel_decoder.rope import Rope
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        head_dim=64, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **rope}
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = Rope.from_dict(config.to_dict())
    assert torch.allclose(ours.frequencies(64), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(scale)
