"""ModelScope's real client, and a server on 127.0.0.1 for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.modelscope_server import ModelScopeServer

TOKEN = "ms-0123456789abcdef"


@pytest.fixture
def server():
    with ModelScopeServer() as found:
        yield found


@pytest.fixture
def client(server, tmp_path, monkeypatch):
    """The real client, in this process, with the server as its endpoint and a cache in `tmp_path / "ms"`.

    It reads how often it tries again at import, for which its constants stand, and the rest when it is first
    used, for which its default configuration is cleared.
    """
    from modelscope_hub import _download, _legacy_api, config

    for name in [name for name in os.environ if name.startswith("MODELSCOPE_")]:
        monkeypatch.delenv(name)
    for name, value in environment(server, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_download, "DOWNLOAD_RETRY_TIMES", 1)
    monkeypatch.setattr(_download, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.0)
    monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    config.set_default_config(None)
    yield server
    config.set_default_config(None)


def environment(server, home: Path) -> dict[str, str]:
    return {
        "RAYWL_USE_MODELSCOPE": "true",
        "HF_HUB_OFFLINE": "0",
        "MODELSCOPE_ENDPOINT": server.url,
        "MODELSCOPE_CACHE": str(home / "ms"),
        "MODELSCOPE_HOME": str(home / "home"),
        "TMPDIR": str(home),
    }


def names_in(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
