"""`launch` from ModelScope: real HTTP on 127.0.0.1, two nodes with caches of their own, two ranks on each."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub import constants

import raywl
from tests.cluster.conftest import connected, ray_cluster
from tests.cluster.parts import SHARDS
from tests.cluster.test_hub import FETCHED, TIMEOUT_S, Model, embed_of, repository, values
from tests.modelscope_server import ModelScopeServer

pytestmark = pytest.mark.slow
TOKEN = "ms-0123456789abcdef"


def test_each_file_once_for_each_cache(tmp_path, monkeypatch):
    """The driver alone looks the revision up, with its token; each node fetches what the index names."""
    with ModelScopeServer() as server:
        commit = server.add("org/name", repository(0), private=True, readers=(TOKEN,))
        for name, value in {
            "MODELSCOPE_ENDPOINT": server.url,
            "MODELSCOPE_CACHE": str(tmp_path / "driver"),
            "MODELSCOPE_HOME": str(tmp_path / "home"),
            "MODELSCOPE_API_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        found = raywl.open_checkpoint("ms://org/name")
        nodes = [
            {
                "num_cpus": 2,
                "env_vars": {
                    "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9",
                    "MODELSCOPE_CACHE": str(tmp_path / f"node-{index}"),
                    "MODELSCOPE_HOME": str(tmp_path / f"home-{index}"),
                    "MODELSCOPE_API_TOKEN": "",
                },
            }
            for index in range(2)
        ]
        with ray_cluster(*nodes) as cluster, connected(cluster.address):
            for ref in ("ms://org/name", found):
                server.forget()
                with raywl.launch(ref, Model, tp_size=4, shards=SHARDS, timeout_s=TIMEOUT_S) as group:
                    assert torch.equal(embed_of(group), values(0)["embed.weight"])
                    assert group.report.identity == f"ms:org/name@{commit}"
                    assert len({rank.node for rank in group.report.ranks}) == 2
                if ref != found:
                    # The branch's files, and whether they are the commit's; the nodes ask for no listing.
                    assert server.listings() == 2
                    shards = [name for name in FETCHED if name.endswith(".safetensors")]
                    assert all(server.downloads()[f"org/name/{name}"] >= 1 for name in shards)
                else:
                    assert not server.downloads()
        for index in range(2):
            snapshot = tmp_path / f"node-{index}/models/org--name/snapshots" / commit
            assert {path.name for path in snapshot.iterdir()} == FETCHED
        assert not list((tmp_path / "driver").rglob("*.safetensors"))
