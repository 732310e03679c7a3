"""`launch` from a hub: real HTTP on 127.0.0.1, two nodes with caches of their own, two ranks on each."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

import raywl
from raywl.errors import (
    AuthError,
    CheckpointError,
    MissingFileError,
    NotFoundError,
    SourceError,
    StagingTimeout,
)
from tests.cluster.conftest import connected, ray_cluster
from tests.cluster.parts import COLUMNS, SHARDS, Part
from tests.hub_server import HubServer

TIMEOUT_S = 60.0
ROWS = 8
SECRET = "hf_" + "s" * 20


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


def repository(seed: int) -> dict[str, bytes]:
    """Two shards with an index, a config, and what must not be fetched."""
    tensors = values(seed)
    shards = {
        "model-00001-of-00002.safetensors": {"embed.weight": tensors["embed.weight"]},
        "model-00002-of-00002.safetensors": {"norm.weight": tensors["norm.weight"]},
    }
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    return {
        **{file: save(held) for file, held in shards.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b"{}",
        "README.md": b"# x",
        "consolidated.safetensors": save({"x": torch.zeros(1000)}),
        "pytorch_model.bin": b"no",
    }


FETCHED = {
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        hub.tokens.add(SECRET)
        yield hub


@pytest.fixture(scope="module")
def homes(tmp_path_factory, server):
    """Two nodes whose caches lie apart, and from the driver's."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    nodes = [
        {"num_cpus": 2, "env_vars": environment(server, folder, f"node-{index}")}
        for index, folder in enumerate(folders)
    ]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield folders


def environment(server, folder, origin) -> dict[str, str]:
    return {
        # Another than the driver's: the driver says which hub it is.
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "3",
        "HF_HUB_ETAG_TIMEOUT": "3",
        "HF_HUB_USER_AGENT_ORIGIN": origin,
    }


@pytest.fixture
def hub(homes, server, tmp_path, monkeypatch):
    """The driver's own client points at it, with a cache that must stay empty."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "driver"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 3)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 3)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "driver" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "driver" / "token"))
    # They go to the nodes with what is asked of them.
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    monkeypatch.setenv("RAYWL_STALL_S", "3")
    server.mend()
    server.forget()
    yield server
    server.mend()
    assert not list(tmp_path.joinpath("driver").rglob("*.safetensors"))
    from ray.util.placement_group import placement_group_table

    assert all(entry["state"] == "REMOVED" for entry in placement_group_table().values())


def launch(ref, timeout_s=TIMEOUT_S, **arguments):
    return raywl.launch(ref, Model, tp_size=4, shards=SHARDS, timeout_s=timeout_s, **arguments)


def embed_of(group) -> torch.Tensor:
    return torch.cat(group.run(lambda model: model.embed.weight.detach().clone()))


def fails(kind, ref, within_s=40.0, **arguments):
    """The error of a launch that fails in time."""
    start_s = time.monotonic()
    with pytest.raises(kind) as caught:
        launch(ref, **arguments)
    assert time.monotonic() - start_s < within_s
    return caught.value


def test_each_file_once_for_all_nodes(hub, homes):
    """Four ranks on two nodes: one download of each file for both, of those that the index names alone."""
    commit = hub.add("org/once", repository(0))
    with launch("org/once") as group:
        assert torch.equal(embed_of(group), values(0)["embed.weight"])
        assert len({rank.node for rank in group.report.ranks}) == 2
        assert group.report.identity == f"hf:org/once@{commit}"
        assert group.report.ref == f"hf://org/once@{commit}"
    index = "model.safetensors.index.json"
    for name in FETCHED:
        kind = "/cdn/org/once/" if name.endswith(".safetensors") else f"/org/once/resolve/{commit}/"
        assert hub.count(kind + name, method="GET", client="node-*") == 1 + (name == index)
        for home in homes:
            (path,) = home.glob(f"hub/models--org--once/snapshots/{commit}/{name}")
            assert path.read_bytes() == repository(0)[name]
    # The index tells what to stage, and so was read before.
    assert hub.downloads() == {f"org/once/{name}": 1 + (name == index) for name in FETCHED}
    # The revision was looked up by the driver; the nodes asked for the commit alone.
    assert hub.count("/api/models/org/once/revision/main", client="node-*") == 0
    assert hub.count("/api/models/org/once/revision/main") == 1
    for home in homes:
        assert (home / "hub" / "models--org--once" / "refs" / "main").read_text() == commit
    hub.forget()
    with launch(f"hf://org/once@{commit}") as group:
        assert torch.equal(embed_of(group), values(0)["embed.weight"])
    assert not hub.downloads()


@pytest.mark.slow
def test_a_branch_that_moves(hub, monkeypatch):
    """Between the driver's look and the nodes' downloads: all nodes have the commit that the driver saw."""
    old = hub.add("org/moving", repository(1))
    fault = hub.fail("/org/moving/resolve/*", "hang", times=1)
    monkeypatch.setenv("RAYWL_STALL_S", "60")
    result: list = []

    def run():
        with launch("org/moving") as group:
            result.append((group.report.identity, embed_of(group)))

    thread = threading.Thread(target=run)
    thread.start()
    assert fault.reached.wait(60)
    new = hub.add("org/moving", repository(2))
    assert new != old
    fault.released.set()
    thread.join(90)
    ((identity, embed),) = result
    assert identity == f"hf:org/moving@{old}"
    assert torch.equal(embed, values(1)["embed.weight"])
    with launch("org/moving") as group:
        assert group.report.identity == f"hf:org/moving@{new}"
        assert torch.equal(embed_of(group), values(2)["embed.weight"])
        # And back, in place, by the commit.
        group.reload(f"org/moving@{old}", timeout_s=TIMEOUT_S)
        assert group.report.identity == f"hf:org/moving@{old}"
        assert torch.equal(embed_of(group), values(1)["embed.weight"])


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("404", (NotFoundError, MissingFileError), "model-00002-of-00002.safetensors"),
        # The hub's client tries again for half a minute.
        pytest.param("500", SourceError, "500", marks=pytest.mark.slow),
        ("403", AuthError, "403"),
        ("cut", SourceError, "model-00002-of-00002.safetensors"),
    ],
)
def test_a_download_that_fails_on_one_node(hub, how, kind, told):
    """Its reason and its node come to the caller in time; afterwards a second try works."""
    name = f"org/fails-{how}"
    hub.add(name, repository(3))
    pattern = f"/{'cdn/' if how == 'cut' else ''}{name}/*model-00002*"
    hub.fail(pattern, how)
    error = fails(kind, name)
    assert told in str(error)
    assert name in str(error)
    assert "node" in str(error.where)
    hub.mend()
    with launch(name) as group:
        assert torch.equal(embed_of(group), values(3)["embed.weight"])


@pytest.mark.slow
def test_what_the_hub_doesnt_have(hub):
    """Said by the driver's one look, before anything is started on the nodes."""
    hub.add("org/there", repository(4))
    assert "org/none" in str(fails(NotFoundError, "org/none", 15.0))
    assert "v9" in str(fails(NotFoundError, "org/there@v9", 15.0))
    hub.add("org/private", repository(4), private=True, readers=(SECRET,))
    fails((NotFoundError, AuthError), "org/private", 15.0)
    hub.add("org/bare", {"pytorch_model.bin": b"x"})
    assert "pytorch_model.bin" in str(fails(CheckpointError, "org/bare"))
    lacking = repository(4)
    del lacking["model-00002-of-00002.safetensors"]
    hub.add("org/lacking", lacking)
    error = fails(MissingFileError, "org/lacking")
    assert "model-00002-of-00002.safetensors" in str(error)
    assert not [path for path in hub.downloads() if path.endswith(".safetensors")]


@pytest.mark.slow
def test_a_token_goes_along(hub):
    """To each node, whose own client has none; no error shows it."""
    hub.add("org/secret", repository(5), gated=True, readers=(SECRET,))
    with launch("org/secret", token=SECRET) as group:
        assert torch.equal(embed_of(group), values(5)["embed.weight"])
        assert SECRET not in repr(group.status())
        assert SECRET not in repr(group.report)
    hub.fail("/org/secret2/*", "403")
    hub.add("org/secret2", repository(5), gated=True, readers=(SECRET,))
    error = fails(AuthError, "org/secret2", token=SECRET)
    assert SECRET not in str(error) + repr(error) + "".join(getattr(error, "__notes__", []))


def test_a_hub_that_is_unreachable(hub, monkeypatch):
    """From the driver: at once. From the nodes, when it goes away after the driver's look: in time."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        error = fails(SourceError, "org/any", 30.0)
        assert "127.0.0.1" in str(error)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.add("org/goes", repository(6))
    hub.fail("/org/goes/*", "reset")
    assert "node" in str(fails(SourceError, "org/goes").where)


@pytest.mark.slow
def test_ranks_wait_with_a_deadline(hub, monkeypatch):
    """A hub that is silent for ever: the launch ends in time and names the node; then it works."""
    hub.add("org/silent", repository(7))
    monkeypatch.setenv("RAYWL_STALL_S", "60")
    fault = hub.fail("/cdn/org/silent/*00001*", "hang", after_bytes=10)
    error = fails((StagingTimeout, SourceError), "org/silent", 30.0, timeout_s=8.0)
    assert re.search(r"node|\([0-9a-f]{8}\) fetches", str(error))
    fault.released.set()
    hub.mend()
    with launch("org/silent") as group:
        assert torch.equal(embed_of(group), values(7)["embed.weight"])


@pytest.mark.slow
def test_an_open_checkpoint_stands_for_its_name(hub, homes, tmp_path):
    """What the driver opened itself: the nodes get repository, commit and what it was opened with."""
    commit = hub.add("org/open", repository(8), gated=True, readers=(SECRET,))
    cache = tmp_path / "mine"
    checkpoint = raywl.open_checkpoint("org/open", cache_dir=cache, token=SECRET)
    hub.forget()
    Path(constants.HF_TOKEN_PATH).parent.mkdir(parents=True, exist_ok=True)
    Path(constants.HF_TOKEN_PATH).write_text(SECRET)
    with launch(checkpoint) as group:
        assert group.report.identity == checkpoint.identity == f"hf:org/open@{commit}"
        assert torch.equal(embed_of(group), values(8)["embed.weight"])
    assert set(hub.downloads().values()) <= {1, 2}
    assert all((home / "hub" / "models--org--open").is_dir() for home in homes)


@pytest.mark.slow
def test_a_table_from_a_hub(hub, homes):
    """`share_table` takes a repository as well: one download for each node, of the file that has the rows."""
    hub.add("org/table", repository(9))
    with raywl.share_table("org/table", "embed.weight") as table:
        assert torch.equal(table.gather([7, 0]), values(9)["embed.weight"][[7, 0]])
    for home in homes:
        (folder,) = home.glob("hub/models--org--table/snapshots/*")
        assert {path.name for path in folder.iterdir()} == FETCHED - {"model-00002-of-00002.safetensors"}
