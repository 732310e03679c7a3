"""The decoder on Ray actors: its logits are those of transformers, however it is cut."""

from __future__ import annotations

import os
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

from .conftest import TOKENS

LLAMA_LAYOUTS = [{"tp_size": 1}, {"tp_size": 2}, {"tp_size": 4}]
MIXTRAL_LAYOUTS = [
    *LLAMA_LAYOUTS,
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 4, "ep_size": 2},
    {"tp_size": 2, "dp_size": 2, "ep_size": 2},
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
    ray.cloudpickle.register_pickle_by_value(parallel_decoder)
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


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", layout) for layout in LLAMA_LAYOUTS]
    + [("llama-tied", layout) for layout in LLAMA_LAYOUTS]
    + [("mixtral", layout) for layout in MIXTRAL_LAYOUTS],
    ids=str,
)
@pytest.mark.usefixtures("local_ray")
def test_logits_are_those_of_transformers(written, kind, layout):
    checkpoint = written(kind)
    config = DecoderConfig.from_folder(checkpoint.folder)
    with raywl.launch(
        checkpoint.folder, make_model(config), timeout_s=120.0, **layout, **load_arguments(config)
    ) as group:
        for logits in group.run(logits_of, TOKENS):
            assert (logits - checkpoint.logits).abs().max() <= 1e-4
        for tokens in group.run(greedy, TOKENS[0], 5):
            assert tokens == checkpoint.greedy
        report = group.report
        opened = raywl.open_checkpoint(checkpoint.folder)
        assert report.missing == []
        assert report.unexpected == []
        assert set(report.loaded) == set(opened.tensors)
        if layout == {"tp_size": 2, "ep_size": 2}:
            # Whole experts: nobody reads another's.
            experts = sum(entry.nbytes for name, entry in opened.tensors.items() if ".experts." in name)
            dense = opened.nbytes - experts
            for rank in report.ranks:
                assert rank.bytes_read <= experts / 2 + dense
                assert len([name for name in rank.skipped if ".experts." in name]) == 2 * 2 * 3


def test_the_script(written, tmp_path):
    """As a user runs it, from another folder."""
    checkpoint = written("mixtral")
    script = Path(parallel_decoder.__file__).with_name("run.py")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    options = ["--tp", "2", "--ep", "2", "--check", "--tokens", "5", "--prompt", *map(str, TOKENS[0])]
    done = subprocess.run(
        [sys.executable, str(script), checkpoint.folder, *options],
        cwd=tmp_path,
        env={**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"tokens: {' '.join(map(str, checkpoint.greedy))}\n" in done.stdout
    assert "rank 1: read " in done.stdout
    assert "largest difference of a logit: " in done.stdout


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
        ({"model_type": "bert"}, "'bert'.*'llama', 'mixtral'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
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
