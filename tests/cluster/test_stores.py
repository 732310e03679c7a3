"""`launch` from S3: two nodes with caches of their own and no credentials, two ranks on each."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

import raywl
from raywl.errors import AuthError, NotFoundError
from tests.cluster.conftest import connected, ray_cluster
from tests.cluster.parts import COLUMNS, SHARDS, Part
from tests.s3_server import SECRET, S3Server

ROWS = 8
TIMEOUT_S = 90.0
pytestmark = pytest.mark.slow


class Model(torch.nn.Module):
    """`embed` is cut over four ranks."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        self.embed = Part(ROWS // context.tp_size, COLUMNS)
        self.norm = Part(3)


def values(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(ROWS, COLUMNS, generator=random),
        "norm.weight": torch.randn(3, generator=random),
    }


def files_of(seed: int) -> dict[str, bytes]:
    names = {
        "embed.weight": "model-00001-of-00002.safetensors",
        "norm.weight": "model-00002-of-00002.safetensors",
    }
    return {
        **{names[name]: save({name: tensor}) for name, tensor in values(seed).items()},
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        "config.json": b"{}",
    }


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    nodes = [
        {
            "num_cpus": 2,
            "env_vars": {
                "RAYWL_CACHE": str(folder),
                "HOME": str(folder),
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        }
        for folder in folders
    ]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield folders


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """The driver's own cache, which stays empty."""
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "driver"))
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    yield
    assert not (tmp_path / "driver").exists()


def launch(ref, s3, **options):
    return raywl.launch(
        ref, Model, tp_size=4, shards=SHARDS, timeout_s=TIMEOUT_S, storage_options={**s3.options, **options}
    )


def embed_of(group) -> torch.Tensor:
    return torch.cat(group.run(lambda model: model.embed.weight.detach().clone()))


def test_each_node_fetches_once(s3, homes, driver):
    """All see what the driver listed, with the driver's keys, which nothing shows."""
    url = s3.add("launch", files_of(1))
    checkpoint = raywl.open_checkpoint(url, storage_options=s3.options)
    with launch(url, s3) as group:
        assert torch.equal(embed_of(group), values(1)["embed.weight"])
        assert group.report.identity == checkpoint.identity
        assert group.report.ref == url
        assert group.report.fetched_bytes["s3"] > 0
        assert SECRET not in repr(group.report) + repr(group.status()) + json.dumps(group.report.to_dict())
        other = s3.add("launch", files_of(2), "other/")
        group.reload(other, storage_options=s3.options, timeout_s=TIMEOUT_S)
        assert torch.equal(embed_of(group), values(2)["embed.weight"])
    for home in homes:
        names = sorted(path.name for path in home.glob("stores/*/snapshots/*/*"))
        assert names == sorted([*files_of(1)] * 2)
    s3.forget()
    # What the driver has open stands for its name, its keys included.
    with raywl.launch(checkpoint, Model, tp_size=4, shards=SHARDS, timeout_s=TIMEOUT_S) as group:
        assert torch.equal(embed_of(group), values(1)["embed.weight"])
        assert not group.report.fetched_bytes


def test_what_the_driver_is_told_by_the_store(s3, homes, driver):
    """Before anything is started on the nodes."""
    url = s3.add("refused", files_of(3))
    with pytest.raises(NotFoundError, match="no bucket"):
        launch("s3://no-such-bucket/m", s3)
    s3.fail("/refused/*", "403 AccessDenied")
    try:
        with pytest.raises(AuthError) as caught:
            launch(url, s3)
    finally:
        s3.mend()
    assert SECRET not in str(caught.value) + repr(caught.value)
