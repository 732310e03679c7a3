"""The Serve example, over HTTP, with the weights of the demo."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cluster.conftest import eventually
from tests.examples.conftest import EXAMPLES, copy_of

pytest.importorskip("ray.serve", reason="ray[serve] is not installed", exc_type=ImportError)
import requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEXTS = ["The cat sleeps on the warm windowsill.", "Interest rates were left unchanged."]
DEPLOY_S = 150.0
SAME = 1e-5


@dataclass
class Deployed:
    """The application, from outside."""

    dashboard: str
    url: str
    config: dict[str, Any]

    def deploy(self, user_config: dict[str, Any]) -> None:
        """A config deploy through Serve's REST API, as `serve deploy` makes it."""
        self.config["applications"][0]["deployments"][0]["user_config"] = user_config
        answer = requests.put(
            f"{self.dashboard}/api/serve/applications/",
            json=self.config,
            headers=_authorization(),
            timeout=60,
        )
        assert answer.ok, answer.text

    def state(self) -> tuple[str, str]:
        """How the application is, and all that Serve says of it."""
        answer = requests.get(
            f"{self.dashboard}/api/serve/applications/", headers=_authorization(), timeout=60
        )
        found = answer.json()["applications"].get("embeddings", {})
        return found.get("status", "absent"), json.dumps(found.get("deployments"), indent=1)

    def wait_until(self, holds, what: str) -> None:
        """Until Serve calls the application running and `holds(status)`."""

        def held() -> bool:
            state, message = self.state()
            assert state != "DEPLOY_FAILED", message
            return state == "RUNNING" and holds(self.status())

        eventually(held, DEPLOY_S, what)

    def status(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/status", timeout=60).json()

    def embed(self, texts: list[str]) -> torch.Tensor:
        answer = requests.post(f"{self.url}/embed", json={"texts": texts}, timeout=60)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["embeddings"])

    def addresses(self) -> list[Any]:
        """Of each rank: its process, and where its parameters are."""
        from ray import serve

        handle = serve.get_deployment_handle("Embedder", "embeddings")
        return handle.on_ranks.remote(addresses).result(timeout_s=60)


def addresses(model):
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return os.getpid(), {name: tensor.data_ptr() for name, tensor in tensors}


def _authorization() -> dict[str, str]:
    return {"Authorization": f"Bearer {Path(os.environ['RAY_AUTH_TOKEN_PATH']).read_text().strip()}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def deployed(model_folder):
    """The application on a cluster of its own, loaded with the demo's weights."""
    import ray
    from ray import serve

    config = yaml.safe_load((EXAMPLES / "serve" / "config.yaml").read_text())
    port = config["http_options"]["port"] = _free_port()
    config["applications"][0]["runtime_env"] = {"env_vars": {"PYTHONPATH": str(EXAMPLES / "serve")}}
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=True,
        dashboard_port=_free_port(),
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    try:
        application = Deployed(f"http://{context.dashboard_url}", f"http://127.0.0.1:{port}", config)
        application.deploy({"checkpoint": str(model_folder)})
        application.wait_until(lambda status: status["checkpoint"] == str(model_folder), "the first load")
        yield application
        serve.shutdown()
    finally:
        ray.shutdown()


def expected(folder: Path, texts: list[str]) -> torch.Tensor:
    """Embeddings by `transformers` alone."""
    from transformers import AutoModel, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(str(folder))(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = AutoModel.from_pretrained(str(folder)).eval()(**batch).last_hidden_state
    weights = batch["attention_mask"][:, :, None].float()
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1).clone()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= SAME)


def test_answers_over_http(deployed, model_folder):
    """Texts in, the model's embeddings out; what isn't a list of texts is the client's mistake."""
    assert same(deployed.embed(TEXTS), expected(model_folder, TEXTS))
    for body in ({}, {"texts": []}, {"texts": "one"}, {"texts": [1]}):
        assert requests.post(f"{deployed.url}/embed", json=body, timeout=60).status_code == 422
    assert deployed.embed(["", TEXTS[0] * 500]).shape == (2, 384)


def test_reloads_in_place_while_it_answers(deployed, model_folder, other_folder):
    """No request fails, each answer is wholly of the old or of the new weights, and nothing moves."""
    old, new = expected(model_folder, TEXTS), expected(other_folder, TEXTS)
    assert (old - new).abs().max() > 1000 * SAME
    before, status = deployed.addresses(), deployed.status()
    done, counts = threading.Event(), []

    def ask() -> list[bool]:
        """Whether each answer was of the new weights, in order."""
        answers = []
        while not done.is_set() or len(answers) < 2:
            found = deployed.embed(TEXTS)
            assert same(found, old) or same(found, new)
            answers.append(same(found, new))
            counts.append(1)
        return answers

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask) for _ in range(3)]
        try:
            eventually(lambda: len(counts) >= 6 or any(a.done() for a in asking), 60.0, "answers before")
            deployed.deploy({"checkpoint": str(other_folder)})
            deployed.wait_until(lambda now: now["checkpoint"] == str(other_folder), "the reload")
            first = len(counts)
            eventually(
                lambda: len(counts) >= first + 6 or any(a.done() for a in asking), 60.0, "answers after"
            )
        finally:
            done.set()
        for answers in (asked.result(timeout=60) for asked in asking):
            # Old ones first, then new ones, and both were seen.
            assert answers == sorted(answers)
            assert set(answers) == {False, True}
    assert deployed.addresses() == before
    assert deployed.status() == {**status, "checkpoint": str(other_folder)}


def narrower(model_folder: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint in which one tensor has another shape."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model_folder / "model.safetensors")
    name = "encoder.layer.3.intermediate.dense.weight"
    weights[name] = weights[name][:-2].contiguous()
    save_file(weights, copy_of(model_folder, folder) / "model.safetensors")
    return {"checkpoint": str(folder)}


def other_heads(model_folder: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint that fits by its shapes, of a model that computes something else."""
    copy_of(model_folder, folder)
    (folder / "model.safetensors").symlink_to(model_folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    return {"checkpoint": str(folder)}


def test_a_wrong_checkpoint_is_refused(deployed, model_folder, tmp_path):
    """The old weights go on, in the same process, and the reason is told; the next one is taken."""
    before, status = deployed.addresses(), deployed.status()
    answer = deployed.embed(TEXTS)
    wrong = [
        (narrower(model_folder, tmp_path / "narrower"), "encoder.layer.3.intermediate.dense.weight"),
        (other_heads(model_folder, tmp_path / "heads"), "num_attention_heads is 6, the ranks have 12"),
        ({"checkpoint": str(tmp_path / "absent")}, "absent"),
        ({}, "None"),
    ]
    for user_config, told in wrong:
        deployed.deploy(user_config)
        name = str(user_config.get("checkpoint"))
        deployed.wait_until(lambda now, name=name: (now["refused"] or {}).get("checkpoint") == name, name)
        now = deployed.status()
        assert told in now["refused"]["reason"]
        assert now == {**status, "refused": now["refused"]}
        assert torch.equal(deployed.embed(TEXTS), answer)
    deployed.deploy({"checkpoint": str(model_folder)})
    deployed.wait_until(lambda now: now["checkpoint"] == str(model_folder), "the way back")
    assert deployed.status()["refused"] is None
    assert deployed.addresses() == before
    assert same(deployed.embed(TEXTS), expected(model_folder, TEXTS))


def test_a_dead_rank_is_replaced_with_its_replica(deployed):
    """Requests are told, and Serve starts another replica with the same checkpoint; after all other tests."""
    answer, status = deployed.embed(TEXTS), deployed.status()
    pids = [pid for pid, _ in deployed.addresses()]
    os.kill(pids[0], signal.SIGKILL)
    body = {"texts": TEXTS}
    told = requests.post(f"{deployed.url}/embed", json=body, timeout=60)
    assert told.status_code == 503
    assert "rank 0" in told.json()["detail"]

    def answers() -> bool:
        return requests.post(f"{deployed.url}/embed", json=body, timeout=60).ok

    eventually(answers, DEPLOY_S, "another replica")
    assert same(deployed.embed(TEXTS), answer)
    now = deployed.status()
    assert now["pid"] != status["pid"]
    assert now == {**status, "pid": now["pid"]}
    assert not {pid for pid, _ in deployed.addresses()} & set(pids)
