"""Checkpoints from a hub, through its real client, from a server on 127.0.0.1."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from raywl.errors import CheckpointError, CorruptFileError, MissingFileError, NotFoundError, OfflineError
from raywl.opening import open_checkpoint
from raywl.sources import HubPin, pin
from tests.hub_server import SIGNATURE
from tests.sources.conftest import FETCHED, shard, sharded

INDEX = "model.safetensors.index.json"


def load(ref="org/name", **options):
    """An open checkpoint whose files are local."""
    checkpoint = open_checkpoint(ref, **options)
    checkpoint.fetch()
    return checkpoint


def fetched(hub):
    """What was downloaded, each once."""
    downloads = hub.downloads()
    assert set(downloads.values()) <= {1}, downloads
    return {name.removeprefix("org/name/") for name in downloads}


def snapshot(tmp_path: Path, commit: str) -> Path:
    return tmp_path / "hub" / "models--org--name" / "snapshots" / commit


def test_a_repository_opens(client, tmp_path):
    """Its identity is the commit; the files are where any other tool looks for them."""
    commit = client.add("org/name", sharded())
    checkpoint = load()
    assert checkpoint.identity == f"hf:org/name@{commit}"
    assert checkpoint.source.ref == f"hf://org/name@{commit}"
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert checkpoint.path("config.json") == str(snapshot(tmp_path, commit) / "config.json")
    assert (tmp_path / "hub/models--org--name/refs/main").read_text() == commit
    weights = dict(checkpoint.iter_weights())
    assert np.array_equal(weights["c"].numpy(), np.full((4, 8), 2.0, np.float32))
    assert open_checkpoint(checkpoint.source.ref).identity == checkpoint.identity


def test_a_repository_is_opened_by_its_headers(client, tmp_path):
    """One look-up, the index, and of each file a range that the hub leads to; nothing is written."""
    client.add("org/name", sharded(rows=20_000))
    checkpoint = open_checkpoint("org/name")
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert client.count("/api/*") == 1
    for name in (name for name in FETCHED if name.startswith("model-")):
        assert client.count(f"/org/name/resolve/*/{name}") == client.count(f"/cdn/org/name/{name}") == 1
        assert client.num_bytes(f"/cdn/org/name/{name}") < 40_000
    assert client.count() == 1 + 1 + 2 * 2
    assert not (tmp_path / "hub").exists()


def test_a_long_header_takes_one_more_range(client):
    """From where the hub had led to."""
    names = [f"layer.{i}.{'x' * 200}" for i in range(3000)]
    client.add("org/name", {"model.safetensors": shard(names, rows=0)})
    assert len(open_checkpoint("org/name").tensors) == 3000
    assert client.count("/org/name/resolve/*") == 1
    assert client.count("/cdn/*") == 2


def test_it_is_fetched_when_it_is_used(client, tmp_path):
    """Only the files that are needed, with the small ones."""
    commit = client.add("org/name", sharded(rows=20_000))
    ((name, tensor),) = open_checkpoint("org/name").iter_weights(["a"])
    assert (name, tensor.shape) == ("a", (20_000, 8))
    there = {path.name for path in snapshot(tmp_path, commit).iterdir()}
    assert there == FETCHED - {"model-00002-of-00002.safetensors"}


def test_a_mirror_that_lists_names_alone(client, monkeypatch):
    """Sizes and hashes are asked of it file by file."""
    from huggingface_hub import HfApi

    asked = HfApi.model_info
    monkeypatch.setattr(
        HfApi, "model_info", lambda self, *args, files_metadata, **options: asked(self, *args, **options)
    )
    commit = client.add("org/name", sharded())
    assert load().identity == f"hf:org/name@{commit}"
    assert fetched(client) == FETCHED


def test_a_file_of_another_size_is_fetched_again(client, tmp_path):
    """One that was cut in the cache, by whatever."""
    client.add("org/name", sharded())
    path = Path(os.path.realpath(load().path("model-00001-of-00002.safetensors")))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    checkpoint = load()
    assert path.read_bytes() == data
    assert checkpoint.verify(deep=True).ok


def test_only_the_checkpoint_is_fetched_and_each_file_once(client, tmp_path):
    """C05, C07: not `original/`, `consolidated`, other formats, code or documentation."""
    commit = client.add("org/name", sharded())
    load()
    assert fetched(client) == FETCHED
    assert {path.name for path in snapshot(tmp_path, commit).iterdir()} == FETCHED


def test_the_second_time_nothing_is_fetched(client):
    """One question to the hub: where the branch is at."""
    client.add("org/name", sharded())
    load()
    client.forget()
    load()
    assert client.count("/org/name/*") == client.count("/cdn/*") == 0
    assert client.count("/api/models/*") == 1


@pytest.mark.parametrize("how", ["in the ref", "as an argument", "with hf://"])
@pytest.mark.parametrize("branch", ["v1", "refs/pr/3", "a b+c"])
def test_revisions(client, tmp_path, how, branch):
    client.add("org/name", sharded())
    commit = client.add("org/name", {"model.safetensors": shard(["old"])}, branch=branch)
    if how == "as an argument":
        checkpoint = open_checkpoint("org/name", revision=branch)
    else:
        checkpoint = open_checkpoint(f"{'hf://' if how == 'with hf://' else ''}org/name@{branch}")
    assert checkpoint.identity == f"hf:org/name@{commit}"
    assert list(checkpoint.tensors) == ["old"]
    checkpoint.fetch()
    assert open_checkpoint("org/name", revision=branch, offline=True).identity == checkpoint.identity


def test_a_commit(client):
    commit = client.add("org/name", {"model.safetensors": shard(["old"])})
    client.add("org/name", sharded())
    assert open_checkpoint(f"org/name@{commit}").identity == f"hf:org/name@{commit}"


def test_a_branch_that_moved(client):
    """Only what differs is fetched again."""
    files = sharded()
    first = client.add("org/name", files)
    load()
    client.forget()
    second = client.add("org/name", {**files, "config.json": b'{"new": 1}'})
    assert load().identity == f"hf:org/name@{second}"
    assert client.num_bytes("/cdn/*") == 0
    assert fetched(client) == {"config.json"}
    assert open_checkpoint(f"org/name@{first}", offline=True).identity == f"hf:org/name@{first}"


def test_a_subfolder_with_its_own_index(client):
    files = {f"fp8/{name}": data for name, data in sharded().items()}
    commit = client.add("org/name", {**sharded(), "fp8/model.safetensors": b"other", **files})
    checkpoint = load(subfolder="fp8/")
    assert checkpoint.identity == f"hf:org/name@{commit}/fp8"
    assert fetched(client) == {f"fp8/{name}" for name in FETCHED}
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert open_checkpoint("org/name", subfolder="fp8", offline=True).identity == checkpoint.identity


def test_an_index_with_files_in_a_folder(client):
    index = json.dumps({"weight_map": {"a": "parts/1.safetensors"}}).encode()
    client.add("org/name", {INDEX: index, "parts/1.safetensors": shard(["a"]), "parts/2.safetensors": b"no"})
    assert list(load().tensors) == ["a"]
    assert fetched(client) == {INDEX, "parts/1.safetensors"}


def test_without_an_index(client):
    client.add(
        "org/name",
        {"model.safetensors": shard(["a"]), "consolidated.safetensors": b"no", "sub/x.safetensors": b"no"},
    )
    assert list(load().tensors) == ["a"]
    assert fetched(client) == {"model.safetensors"}


def test_patterns_choose_among_the_weights(client):
    client.add("org/name", sharded())
    checkpoint = load(allow_patterns=["*-00002-*"])
    assert set(checkpoint.tensors) == {"b", "c"}
    assert fetched(client) == FETCHED - {"model-00001-of-00002.safetensors"}
    with pytest.raises(CheckpointError, match=r"no weight file matches \['x\*'\]"):
        open_checkpoint("org/name", allow_patterns="x*")


@pytest.mark.parametrize(
    "name", ["m [1].safetensors", "a+b%25 c.safetensors", "#1?.safetensors", "ü*.safetensors"]
)
def test_names_are_taken_literally(client, name):
    client.add("org/name", {name: shard(["a"])})
    checkpoint = load()
    assert os.path.isfile(checkpoint.path(name))
    assert [file.name for file in checkpoint.files] == [name]


def test_a_cache_of_ones_own(client, tmp_path):
    client.add("org/name", sharded())
    for _ in range(2):
        checkpoint = load(cache_dir=tmp_path / "mine")
    assert checkpoint.path("config.json").startswith(str(tmp_path / "mine/models--org--name/snapshots"))
    assert not (tmp_path / "hub").exists()
    assert fetched(client) == FETCHED


def test_a_full_cache_is_not_written_to(client, tmp_path):
    """C62: it may be read-only."""

    def state():
        return {path: path.lstat().st_mtime_ns for path in (tmp_path / "hub").rglob("*")}

    client.add("org/name", sharded())
    load()
    before = state()
    load()
    load(offline=True)
    assert state() == before


def test_what_another_tool_downloaded_is_taken(client, tmp_path):
    import huggingface_hub

    commit = client.add("org/name", sharded())
    folder = huggingface_hub.snapshot_download("org/name", endpoint=client.url)
    client.forget()
    checkpoint = load()
    assert client.downloads() == {}
    assert os.path.dirname(checkpoint.path("config.json")) == folder == str(snapshot(tmp_path, commit))


# Contents that don't fit


def test_an_index_that_names_absent_files(client):
    """Said before the others are downloaded."""
    files = sharded()
    del files["model-00002-of-00002.safetensors"]
    client.add("org/name", files)
    with pytest.raises(
        MissingFileError, match=r"1 of 2 weight files are absent \(incomplete upload"
    ) as caught:
        open_checkpoint("org/name")
    assert caught.value.files == ("model-00002-of-00002.safetensors",)
    assert fetched(client) == {INDEX}


@pytest.mark.parametrize("index", [b"{", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}'])
def test_a_damaged_index(client, index):
    client.add("org/name", {**sharded(), INDEX: index})
    with pytest.raises(CheckpointError):
        open_checkpoint("org/name")
    assert not any("model-" in name for name in fetched(client))


@pytest.mark.parametrize("name", ["../../../../evil.safetensors", "/tmp/evil.safetensors"])
def test_an_index_that_leads_outside(client, tmp_path, name):
    index = json.dumps({"weight_map": {"a": name}}).encode()
    client.add("org/name", {INDEX: index, name: shard(["a"])})
    with pytest.raises(CheckpointError):
        open_checkpoint("org/name")
    assert fetched(client) == {INDEX}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"optimizer.bin": b"x", "config.json": b"{}"}, "optimizer.bin"),
        ({"config.json": b"{}"}, "none"),
        ({"original/model.safetensors": b"x"}, "none of its 0 files"),
    ],
)
def test_no_weights_that_can_be_read(client, files, said):
    client.add("org/name", files)
    with pytest.raises(CheckpointError, match=f"no weights here.*{said}"):
        open_checkpoint("org/name")
    assert fetched(client) == set()


def test_no_such_subfolder(client):
    client.add("org/name", sharded())
    with pytest.raises(NotFoundError, match="no folder 'nope'"):
        open_checkpoint("org/name", subfolder="nope")


def test_a_damaged_file(client):
    client.add("org/name", {"model.safetensors": b"not one"})
    with pytest.raises(CorruptFileError):
        open_checkpoint("org/name")


def test_other_bytes_than_the_hubs_are_found_by_verify(client):
    """The client compares the size alone; the hub's hash is the name that it stores a file under."""
    client.add("org/name", {"model.safetensors": shard(["a"], rows=100)})
    good = load()
    assert good.verify(deep=True).ok
    blob = Path(os.path.realpath(good.path("model.safetensors")))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert "SHA-256" in good.verify(deep=True).problems[0]


# Pins


def test_a_pin_is_of_one_commit(client, tmp_path):
    """Made by the driver, with one question; opened on a node, which downloads to its own cache."""
    first = client.add("org/name", sharded())
    pinned = pin("org/name", subfolder=None, timeout_s=60)
    assert (pinned.repo_id, pinned.commit, pinned.endpoint) == ("org/name", first, client.url)
    assert str(pinned) == f"hf://org/name@{first}"
    assert pinned.identity == f"hf:org/name@{first}"
    assert client.downloads() == {}
    assert client.count("/api/models/*") == 1
    assert not (tmp_path / "hub").exists()

    client.add("org/name", {"model.safetensors": shard(["other"])})
    on_node = pickle.loads(pickle.dumps(pinned))
    checkpoint = load(on_node)
    assert checkpoint.identity == pinned.identity
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert pin(pinned) is pinned


def test_a_pin_has_all_options(client, tmp_path):
    client.tokens.add("t0ken")
    files = {f"fp8/{name}": data for name, data in sharded().items()}
    client.add("org/name", files, private=True, readers=("t0ken",))
    pinned = pin(
        "hf://org/name",
        revision="main",
        subfolder="fp8",
        cache_dir=tmp_path / "other",
        token="t0ken",
        allow_patterns=["*-00001-*"],
    )
    checkpoint = open_checkpoint(pickle.loads(pickle.dumps(pinned)))
    assert list(checkpoint.tensors) == ["a"]
    assert checkpoint.path("x").startswith(str(tmp_path / "other"))
    assert "t0ken" not in repr(pinned) + str(pinned) + repr(checkpoint) + repr(checkpoint.source)
    # Nor does the checkpoint take it to wherever it is pickled to.
    assert b"t0ken" not in pickle.dumps(checkpoint)


def test_the_drivers_own_token_goes_along(client, monkeypatch):
    client.add("org/name", sharded(), private=True, readers=("t0ken",))
    monkeypatch.setenv("HF_TOKEN", "t0ken")
    pinned = pin("org/name")
    monkeypatch.delenv("HF_TOKEN")
    load(pinned)
    assert fetched(client) == FETCHED


def test_a_pin_made_offline(client, monkeypatch):
    commit = client.add("org/name", sharded())
    load()
    client.forget()
    pinned = pin("org/name", offline=True)
    assert pinned == HubPin("org/name", commit, offline=True)
    assert open_checkpoint(pinned).identity == f"hf:org/name@{commit}"
    assert client.count() == 0


def test_a_token_goes_to_the_hub_and_to_no_other_host(client):
    client.add("org/name", sharded(), gated=True, readers=("t0ken",))
    load(token="t0ken")
    asked = [request for request in client.requests if "harness" not in request.path]
    assert {request.authorized for request in asked if not request.path.startswith("/cdn/")} == {True}
    assert {request.authorized for request in asked if request.path.startswith("/cdn/")} == {False}


# Offline


@pytest.fixture
def cached(client):
    """A repository in the cache, and a hub that nobody may ask."""
    commit = client.add("org/name", sharded())
    load()
    client.forget()
    yield commit
    assert client.count() == 0


@pytest.mark.parametrize("how", ["argument", "environment", "the other variable", "the client's constant"])
def test_offline_works_from_the_cache(cached, monkeypatch, how):
    """C65: the variable counts as it is now, though the client read it at import."""
    from huggingface_hub import constants

    offline = None
    if how == "argument":
        offline = True
    elif how == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    elif how == "the other variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    else:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("org/name", offline=offline).identity == f"hf:org/name@{cached}"
    assert set(open_checkpoint("org/name", offline=offline, revision=cached).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize("ref", ["org/other", "org/name@v9", "org/name@../../x", "org/name@" + "0" * 40])
def test_offline_and_not_in_the_cache(cached, tmp_path, ref):
    """C65: repository, revision and cache are named."""
    with pytest.raises(OfflineError) as caught:
        open_checkpoint(ref, offline=True)
    repo_id, _, revision = ref.partition("@")
    for named in (repo_id, revision or "main", str(tmp_path / "hub")):
        assert named in str(caught.value)


@pytest.mark.parametrize("dangling", [False, True])
def test_offline_with_files_missing_names_each(cached, tmp_path, dangling):
    """C63: the index says what belongs there."""
    shards = sorted(name for name in FETCHED if name.startswith("model-"))
    for name in shards:
        path = snapshot(tmp_path, cached) / name
        if dangling:
            Path(os.path.realpath(path)).unlink()
        else:
            path.unlink()
    with pytest.raises(MissingFileError, match="working offline, and 2 of 2 files are absent") as caught:
        open_checkpoint("org/name", offline=True)
    assert list(caught.value.files) == shards
    assert all(name in str(caught.value) for name in shards)


def test_offline_with_small_files_missing(cached, tmp_path):
    """Weights without a tokenizer still are weights."""
    (snapshot(tmp_path, cached) / "tokenizer.json").unlink()
    assert open_checkpoint("org/name", offline=True).identity == f"hf:org/name@{cached}"


def test_offline_a_numbered_set_says_what_it_lacks(client, tmp_path):
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    commit = client.add("org/name", {name: shard([name]) for name in names})
    load()
    (snapshot(tmp_path, commit) / names[1]).unlink()
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint("org/name", offline=True)
    assert caught.value.files == (names[1],)


def test_offline_the_clients_own_listing_counts(client, tmp_path):
    """Files that no index names, known from the record that `snapshot_download` leaves."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "get_cached_repo_tree"):
        pytest.skip("this client keeps no record of a commit's files")
    commit = client.add("org/name", {"one.safetensors": shard(["a"]), "two.safetensors": shard(["b"])})
    huggingface_hub.snapshot_download("org/name", endpoint=client.url)
    (snapshot(tmp_path, commit) / "two.safetensors").unlink()
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint("org/name", offline=True)
    assert caught.value.files == ("two.safetensors",)


def test_offline_with_configs_alone(client):
    import huggingface_hub

    client.add("org/name", {"config.json": b"{}", "model.safetensors": shard(["a"])})
    huggingface_hub.hf_hub_download("org/name", "config.json", endpoint=client.url)
    with pytest.raises(OfflineError, match=r"no weights .* it has: config\.json"):
        open_checkpoint("org/name", offline=True)


def test_an_interrupted_download_is_completed(cached, client, tmp_path):
    (snapshot(tmp_path, cached) / "model-00001-of-00002.safetensors").unlink()
    Path(os.path.realpath(snapshot(tmp_path, cached) / "vocab.txt")).unlink()
    checkpoint = load()
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    # The shard's bytes are still in the cache, only its name was gone.
    assert fetched(client) == {"vocab.txt"}
    client.forget()


def test_no_signature_in_what_is_kept(client, tmp_path):
    client.add("org/name", sharded())
    load()
    kept = [path.read_bytes() for path in (tmp_path / "hub").rglob("*") if path.is_file()]
    assert not any(SIGNATURE.encode() in data for data in kept)
