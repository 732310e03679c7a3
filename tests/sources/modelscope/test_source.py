"""Checkpoints from ModelScope, `ms://org/name`: ranges, one cache, one commit; from a server on 127.0.0.1."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raywl.errors import (
    AuthError,
    CheckpointError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    SourceError,
)
from raywl.opening import open_checkpoint
from raywl.sources import ModelScopePin, pin
from raywl.sources.modelscope import maybe_download_from_modelscope
from raywl.sources.modelscope_pin import parse_modelscope_ref
from tests.hub_server import SIGNATURE
from tests.modelscope_server import ModelScopeServer
from tests.sources.conftest import FETCHED, shard, sharded
from tests.sources.modelscope.conftest import TOKEN, environment, names_in

SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def snapshot(tmp_path, version):
    return tmp_path / "ms/models/org--name/snapshots" / version


def read(checkpoint):
    return {name: tensor.numpy() for name, tensor in checkpoint.iter_weights()}


def fetched(server):
    """What was downloaded, each once."""
    downloads = server.downloads()
    return {name.removeprefix("org/name/") for name in downloads}


def test_a_repository_opens(client, tmp_path):
    """Its identity is the commit; opening reads headers alone, and use brings the files, once."""
    commit = client.add("org/name", sharded(rows=20_000))
    checkpoint = open_checkpoint("ms://org/name")
    assert checkpoint.identity == f"ms:org/name@{commit}"
    assert checkpoint.source.ref == f"ms://org/name@{commit}"
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert client.num_bytes("/cdn/*") < 100_000
    weights = read(checkpoint)
    assert np.array_equal(weights["c"], np.full((20_000, 8), 2.0, np.float32))
    assert names_in(snapshot(tmp_path, commit)) == FETCHED
    client.forget()
    again = open_checkpoint(checkpoint.source.ref)
    assert again.identity == checkpoint.identity
    assert read(again).keys() == weights.keys()
    assert not fetched(client)
    assert client.listings() == 1


def test_the_commit_is_that_of_the_newest_change(client):
    """Files were last changed in different commits; the newest of these has them all."""
    files = sharded()
    client.add("org/name", files)
    second = client.add("org/name", {**files, "config.json": b'{"new": 1}'})
    found = pin("ms://org/name")
    assert found.commit == second
    client.add("org/name", files, branch="other")
    assert pin("ms://org/name").commit == second


@pytest.mark.parametrize("why", ["a deletion", "no commits"])
def test_where_no_commit_is_known_the_listing_stands_for_it(tmp_path, client, why):
    """The newest change isn't all, since a file was deleted later; or the server takes branches alone."""
    files = sharded()
    if why == "a deletion":
        client.add("org/name", {**files, "extra.txt": b"x"})
    else:
        client.resolves_commits = False
    client.add("org/name", files)
    checkpoint = open_checkpoint("ms://org/name")
    assert checkpoint.source.pin.commit is None
    assert checkpoint.identity.startswith("ms:org/name@master+")
    assert len(checkpoint.identity.partition("+")[2]) == 40
    checkpoint.fetch()
    assert open_checkpoint("ms://org/name", offline=True).identity == checkpoint.identity
    # Other files are another state, in another folder.
    client.add("org/name", {**files, SHARD: shard(["a", "new"])})
    other = open_checkpoint("ms://org/name")
    assert other.identity != checkpoint.identity
    assert "new" in read(other)
    assert "new" not in read(open_checkpoint(checkpoint.source.pin_for_others()))


def test_revisions(client):
    client.add("org/name", sharded())
    old = client.add("org/name", {"model.safetensors": shard(["old"])}, branch="v1/x")
    for checkpoint in (
        open_checkpoint("ms://org/name@v1/x"),
        open_checkpoint("ms://org/name", revision="v1/x"),
        open_checkpoint(f"ms://org/name@{old}"),
    ):
        assert checkpoint.identity == f"ms:org/name@{old}"
        assert list(checkpoint.tensors) == ["old"]
    checkpoint.fetch()
    assert open_checkpoint(f"ms://org/name@{old}", offline=True).identity == checkpoint.identity


def test_a_subfolder_and_patterns(client):
    files = {f"fp8/{name}": data for name, data in sharded().items()}
    commit = client.add("org/name", {**sharded(), **files})
    checkpoint = open_checkpoint("ms://org/name", subfolder="fp8/", allow_patterns=["*-00002-*"])
    assert checkpoint.identity == f"ms:org/name@{commit}/fp8"
    assert set(checkpoint.tensors) == {"b", "c"}
    checkpoint.fetch()
    assert {name for name in fetched(client) if not name.startswith("fp8/")} == set()
    assert f"fp8/{SHARD}" not in fetched(client)
    with pytest.raises(NotFoundError, match="no folder 'no'"):
        open_checkpoint("ms://org/name", subfolder="no")


def test_a_cache_of_ones_own(client, tmp_path):
    commit = client.add("org/name", sharded())
    open_checkpoint("ms://org/name", cache_dir=tmp_path / "mine").fetch()
    assert (tmp_path / "mine/models/org--name/snapshots" / commit / SHARD).exists()


def test_what_its_client_downloaded_is_taken(client, tmp_path):
    """By content: of what didn't change since, only headers are asked for."""
    files = sharded(rows=20_000)
    client.add("org/name", files)
    assert maybe_download_from_modelscope("org/name", allow_patterns=["*.safetensors", "*.json"])
    commit = client.add("org/name", {**files, SHARD: shard(["a"], rows=30_000)})
    client.forget()
    checkpoint = open_checkpoint("ms://org/name")
    weights = read(checkpoint)
    assert weights["a"].shape == (30_000, 8)
    assert np.array_equal(weights["c"], np.full((20_000, 8), 2.0, np.float32))
    assert client.num_bytes("/cdn/*00002-of*") < 200_000 < 960_000 < client.num_bytes(f"/cdn/*{SHARD}")
    assert names_in(snapshot(tmp_path, commit)) == FETCHED


class TestOffline:
    """What the cache knows, and nobody asked."""

    @pytest.fixture
    def cached(self, client, tmp_path):
        commit = client.add("org/name", sharded())
        open_checkpoint("ms://org/name").fetch()
        client.forget()
        yield snapshot(tmp_path, commit)
        assert not client.requests

    @pytest.mark.parametrize("how", ["argument", "variable"])
    def test_cached(self, cached, monkeypatch, how):
        options = {"offline": True} if how == "argument" else {}
        if how == "variable":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        # The client itself isn't needed then.
        monkeypatch.setitem(sys.modules, "modelscope_hub", None)
        for ref in ("ms://org/name", f"ms://org/name@{cached.name}"):
            checkpoint = open_checkpoint(ref, **options)
            assert checkpoint.identity == f"ms:org/name@{cached.name}"
            assert set(read(checkpoint)) == {"a", "b", "c"}

    def test_not_cached(self, cached, tmp_path):
        for ref in ("ms://org/other", "ms://org/name@v2", "ms://org/name@../../x"):
            with pytest.raises(OfflineError) as caught:
                open_checkpoint(ref, offline=True)
            assert str(tmp_path / "ms") in str(caught.value)

    @pytest.mark.parametrize("dangling", [False, True])
    def test_a_part_names_each_missing_file(self, cached, dangling):
        names = [SHARD, "model-00002-of-00002.safetensors"]
        for name in names:
            path = cached / name
            os.unlink(os.path.realpath(path) if dangling else path)
        with pytest.raises(MissingFileError) as caught:
            open_checkpoint("ms://org/name", offline=True)
        assert sorted(caught.value.files) == names

    def test_without_its_index(self, cached):
        (cached / INDEX).unlink()
        with pytest.raises(MissingFileError, match=INDEX):
            open_checkpoint("ms://org/name", offline=True)


def test_offline_what_its_client_downloaded(client):
    """Nobody has told the commit, so the content itself is the identity."""
    client.add("org/name", sharded())
    folder = maybe_download_from_modelscope("org/name")
    client.forget()
    checkpoint = open_checkpoint("ms://org/name", offline=True)
    assert checkpoint.source.identity is None
    assert checkpoint.identity == open_checkpoint(folder).identity
    assert set(read(checkpoint)) == {"a", "b", "c"}
    assert not client.requests


class TestPins:
    """What a driver sends to its nodes."""

    def test_of_one_commit(self, client, tmp_path):
        """Another node, with a cache of its own, gets the same, though the branch has moved on."""
        client.add("org/name", sharded())
        found = pin("ms://org/name")
        client.add("org/name", {"model.safetensors": shard(["new"])})
        other = pickle.loads(pickle.dumps(found))
        assert other == found
        checkpoint = open_checkpoint(other)
        assert checkpoint.identity == found.identity
        assert set(read(checkpoint)) == {"a", "b", "c"}
        assert pin(found) is found

    def test_without_a_commit_a_branch_that_moves_is_noticed(self, client):
        client.resolves_commits = False
        client.add("org/name", {"model.safetensors": shard(["a"], rows=20_000)})
        checkpoint = open_checkpoint("ms://org/name")
        client.add("org/name", {"model.safetensors": shard(["z"], rows=20_000)[::-1]})
        with pytest.raises(SourceError, match="brought other bytes than were listed"):
            checkpoint.fetch()

    def test_the_token_goes_along_and_is_not_shown(self, client, monkeypatch):
        client.add("org/name", sharded(), private=True, readers=(TOKEN,))
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
        found = pin("ms://org/name")
        assert found.token == TOKEN
        assert TOKEN not in repr(found)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN")
        checkpoint = open_checkpoint(found)
        checkpoint.fetch()
        assert TOKEN.encode() not in pickle.dumps(checkpoint)
        assert TOKEN not in repr(checkpoint.source)
        # To the server, and to no other host.
        assert {r.authorized for r in client.requests if not r.path.startswith("/cdn/")} == {True}
        assert {r.authorized for r in client.requests if r.path.startswith("/cdn/")} == {False}

    def test_options_are_in_the_pin(self, client):
        client.add("org/name", sharded())
        with pytest.raises(ValueError, match="has all options in itself"):
            open_checkpoint(pin("ms://org/name"), revision="v1")


class TestFailures:
    """Each by class, with repository, revision, file and endpoint, without token or signature."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch):
        monkeypatch.setenv("RAYWL_RETRIES", "1")

    def test_no_such_repository(self, client):
        with pytest.raises(NotFoundError, match=r"org/name@master: look-up: .*status 404") as caught:
            open_checkpoint("ms://org/name")
        assert client.url in str(caught.value)

    def test_no_such_revision(self, client):
        client.add("org/name", sharded())
        with pytest.raises(NotFoundError, match="org/name@v9"):
            open_checkpoint("ms://org/name@v9")

    def test_gated(self, client):
        client.add("org/name", sharded(), gated=True, readers=(TOKEN,))
        with pytest.raises(AuthError, match="MODELSCOPE_API_TOKEN"):
            open_checkpoint("ms://org/name")
        assert open_checkpoint("ms://org/name", token=f" {TOKEN}\n").files
        with pytest.raises(AuthError) as caught:
            open_checkpoint("ms://org/name", token="wrong-token")
        assert "wrong-token" not in str(caught.value)

    def test_no_weights(self, client):
        client.add("org/name", {"config.json": b"{}"})
        with pytest.raises(CheckpointError):
            open_checkpoint("ms://org/name")

    def test_a_download_that_fails_is_gone_on_with(self, client, tmp_path):
        commit = client.add("org/name", sharded(rows=50_000))
        checkpoint = open_checkpoint("ms://org/name")
        client.fail(f"/cdn/*{SHARD}", "503")
        with pytest.raises(SourceError, match=f"download of {SHARD}.*status 503") as caught:
            checkpoint.fetch()
        assert SIGNATURE not in str(caught.value)
        assert not (snapshot(tmp_path, commit) / SHARD).exists()
        client.mend()
        checkpoint.fetch()
        assert set(read(checkpoint)) == {"a", "b", "c"}

    def test_a_cut_connection_goes_on_where_it_stopped(self, client):
        client.add("org/name", sharded(rows=50_000))
        checkpoint = open_checkpoint("ms://org/name")
        client.forget()
        client.fail(f"/cdn/*{SHARD}", "cut", times=1, after_bytes=1_000_000)
        checkpoint.fetch()
        assert set(read(checkpoint)) == {"a", "b", "c"}
        assert client.num_bytes(f"/cdn/*{SHARD}") < 1_600_200 + 300_000

    def test_garbled_bytes_are_thrown_away(self, client, tmp_path):
        commit = client.add("org/name", {"model.safetensors": shard(["a"], rows=20_000)})
        checkpoint = open_checkpoint("ms://org/name")
        client.fail("/cdn/*", "garble")
        with pytest.raises(SourceError, match=r"model\.safetensors brought other bytes than were listed"):
            checkpoint.fetch()
        assert not (snapshot(tmp_path, commit) / "model.safetensors").exists()

    def test_nothing_there(self, client, monkeypatch):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(SourceError, match=r"endpoint http://127\.0\.0\.1:9"):
            open_checkpoint("ms://org/name")

    def test_without_the_client(self, client, monkeypatch):
        monkeypatch.setitem(sys.modules, "modelscope_hub", None)
        with pytest.raises(ImportError, match=r"needs the modelscope package; .*raywl\[modelscope\]"):
            open_checkpoint("ms://org/name")


@pytest.mark.parametrize(
    ("ref", "revision", "said"),
    [
        ("ms://name", None, "names no repository of ModelScope"),
        ("ms://org/name/sub", None, "names no repository"),
        ("ms://../name", None, "names no repository"),
        ("ms://org/name@", None, "has no revision after the @"),
        ("ms://org/name@v1", "v2", "names the revision 'v1', but revision='v2'"),
    ],
)
def test_what_names_no_repository_is_misuse(client, ref, revision, said):
    with pytest.raises(ValueError, match=said):
        open_checkpoint(ref, revision=revision)
    assert not client.requests


def test_names():
    assert parse_modelscope_ref("ms://Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "master")
    assert parse_modelscope_ref("ms://a/b@v1") == parse_modelscope_ref("ms://a/b", "v1") == ("a/b", "v1")


def test_the_driver_lists_once_for_all(client):
    """A pin has the listing in itself: opening it on a node asks for no other."""
    client.add("org/name", sharded())
    found = pin("ms://org/name")
    assert isinstance(found, ModelScopePin)
    before = client.listings()
    open_checkpoint(found).fetch()
    assert client.listings() == before


OPEN = """
import json
from raywl.opening import open_checkpoint
checkpoint = open_checkpoint("ms://org/name")
checkpoint.fetch()
print(json.dumps({"identity": checkpoint.identity}))
"""


def test_three_processes_fetch_each_file_once(server: ModelScopeServer, tmp_path: Path):
    commit = server.add("org/name", sharded(rows=50_000))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN],
            env={**os.environ, **environment(server, tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out) == {"identity": f"ms:org/name@{commit}"}
    size = os.path.getsize(snapshot(tmp_path, commit) / SHARD)
    # Each process reads the header for itself.
    assert size <= server.num_bytes(f"/cdn/*{SHARD}") < 1.2 * size
