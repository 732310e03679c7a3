"""A hub of this test's own, and its client pointed at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from tests.hub_server import HubServer

T = TypeVar("T")

PATIENCE_S = 60
"""How long a busy machine may take for an answer. Only tests of what hangs have a shorter stall."""


def shard(names: Sequence[str], rows: int = 4) -> bytes:
    """The bytes of a safetensors file; every tensor is different."""
    return save({name: np.full((rows, 8), float(len(name) + i), np.float32) for i, name in enumerate(names)})


def sharded(rows: int = 4) -> dict[str, bytes]:
    """A repository as the hub has them: two shards, an index, small files, and what must not be fetched."""
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    index["weight_map"] |= dict.fromkeys(("b", "c"), "model-00002-of-00002.safetensors")
    return {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "README.md": b"# a model\n",
        "config.json": b'{"model_type": "tiny"}',
        "generation_config.json": b"{}",
        "modeling_tiny.py": b"raise SystemExit('code ran')\n",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer.model": b"sp",
        "chat_template.jinja": b"{{ x }}",
        "vocab.txt": b"a\nb\n",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": shard(["a"], rows),
        "model-00002-of-00002.safetensors": shard(["b", "c"], rows),
        "consolidated.safetensors": shard(["x"], rows),
        "original/model.safetensors": shard(["y"], rows),
        "metal/model.bin": b"pt 1",
        "pytorch_model.bin": b"pt 2",
        "training_args.bin": b"pt 3",
    }


FETCHED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "vocab.txt",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
"""What of it belongs to the checkpoint."""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def client(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The real client, in this process, with the hub as its endpoint and a cache in `tmp_path / "hub"`.

    The client reads most of its environment once, at import; its constants stand for that.
    """
    for name, value in client_environment(hub, tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", PATIENCE_S)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", PATIENCE_S)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return hub


def client_environment(hub: HubServer, home: Path) -> dict[str, str]:
    """What points a client in another process at the hub, with a cache of its own in `home / "hub"`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": str(PATIENCE_S),
        "HF_HUB_ETAG_TIMEOUT": str(PATIENCE_S),
        "RAYWL_STALL_S": str(PATIENCE_S),
        "RAYWL_RETRIES": "1",
    }


def start(hub: HubServer, home: Path, code: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """Python code in a process of its own, with the hub as its client's endpoint."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**inherited, **client_environment(hub, home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_plain(code: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """Python code in a process of its own, with nothing of this one's settings for stores."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RAYWL_"))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FETCH = """
import sys, pickle, json
from raywl.opening import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1])
    checkpoint.fetch()
    print(json.dumps({"identity": checkpoint.identity, "tensors": sorted(checkpoint.tensors)}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""
"""Opens its argument, makes its files local, and prints what it is, or the error."""


def answer(process: subprocess.Popen[str], timeout_s: float = 120.0) -> dict[str, object]:
    """The JSON object that a process prints."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no answer in {timeout_s} s: {err}") from None
    assert process.returncode == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def until(look: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """What `look` gives once that is something; it is called again and again."""
    end_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.01)
    return found


def spans_left(folder: Path, size: int, at_least: int) -> list[tuple[int, int]]:
    """What is there of a file of that size, by the journal of its part file, once it is as much as that."""
    for journal in folder.rglob("*.incomplete.journal"):
        try:
            head, *lines = journal.read_text().splitlines() or ["{}"]
        except FileNotFoundError:
            # Of another file, which has become whole meanwhile.
            continue
        spans = [(int(start), int(end)) for start, _, end in (line.partition(" ") for line in lines) if end]
        if json.loads(head).get("size") == size and sum(end - start for start, end in spans) >= at_least:
            return spans
    return []
