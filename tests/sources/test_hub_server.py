"""The loopback hub itself, asked by the real client, so that a test that counts on it may."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from tests.hub_server import HubServer
from tests.sources.conftest import client_environment, sharded

FILES = sharded()


@pytest.fixture
def hub():
    with HubServer(page_size=3) as server:
        yield server


@pytest.fixture
def api(client):
    client.commit = client.add("org/name", FILES)
    return huggingface_hub.HfApi(endpoint=client.url)


def test_info(client, api):
    info = api.model_info("org/name", files_metadata=True)
    assert info.sha == client.commit
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    assert sizes == {name: len(data) for name, data in FILES.items()}
    assert api.model_info("org/name", revision=client.commit).gated is False


def test_trees_have_pages_and_folders(client, api):
    entries = list(api.list_repo_tree("org/name", recursive=True))
    assert {entry.path for entry in entries} == {*FILES, "original", "metal"}
    assert client.count("/api/models/org/name/tree/main") == -(-len(entries) // 3)
    assert [entry.path for entry in api.list_repo_tree("org/name", "metal")] == ["metal/model.bin"]
    assert "metal/model.bin" not in {entry.path for entry in api.list_repo_tree("org/name")}


def test_paths_info(api):
    (info,) = api.get_paths_info("org/name", ["config.json", "nope"])
    assert (info.path, info.size) == ("config.json", len(FILES["config.json"]))
    (large,) = api.get_paths_info("org/name", ["model-00001-of-00002.safetensors"])
    assert large.lfs.size == len(FILES["model-00001-of-00002.safetensors"])


def test_metadata_of_both_kinds_of_files(client):
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        client.add("org/name", FILES)
        url = huggingface_hub.hf_hub_url("org/name", name, endpoint=client.url)
        found = huggingface_hub.get_hf_file_metadata(url)
        assert found.size == len(FILES[name])
        assert found.commit_hash is not None
        assert ("/cdn/" in found.location) == name.endswith(".safetensors")


def test_a_whole_snapshot(client, api, tmp_path):
    folder = api.snapshot_download("org/name", cache_dir=tmp_path / "c")
    for name, data in FILES.items():
        assert Path(folder, name).read_bytes() == data
    assert client.downloads() == {f"org/name/{name}": 1 for name in FILES}
    assert client.num_bytes("/cdn/*") == sum(
        len(data) for name, data in FILES.items() if name.endswith((".safetensors", ".bin", ".model"))
    )


def test_ranges(client, api):
    from huggingface_hub import HfFileSystem

    name = "org/name/model-00001-of-00002.safetensors"
    with HfFileSystem(endpoint=client.url).open(name, block_size=64) as file:
        file.seek(5)
        assert file.read(20) == FILES["model-00001-of-00002.safetensors"][5:25]
    assert any(request.status == 206 for request in client.requests)


def test_garbled_bytes_have_the_right_length(client, api, tmp_path):
    client.fail("/cdn/*", "garble")
    path = api.hf_hub_download("org/name", "model-00001-of-00002.safetensors", cache_dir=tmp_path / "c")
    data, got = FILES["model-00001-of-00002.safetensors"], Path(path).read_bytes()
    assert len(got) == len(data)
    assert got != data


def test_a_limit_is_waited_for(client, api, tmp_path):
    """The client's own treatment of 429 in a download."""
    client.fail("/cdn/*", "429", method="GET", times=1, retry_after_s=0)
    api.hf_hub_download("org/name", "model-00001-of-00002.safetensors", cache_dir=tmp_path / "c")
    assert [r.status for r in client.requests if r.path.startswith("/cdn/")] == [429, 200]


def test_the_environment_of_another_process(hub, tmp_path):
    assert client_environment(hub, tmp_path)["HF_ENDPOINT"].startswith("http://127.0.0.1:")
