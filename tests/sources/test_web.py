"""Checkpoints on plain web servers, with and without ranges, ETags and listings."""

from __future__ import annotations

import base64
import pickle
import traceback
from pathlib import Path

import pytest

from raywl.errors import AuthError, CheckpointError, NotFoundError, RaywlError, SourceError
from raywl.opening import open_checkpoint
from raywl.sources import pin
from tests.sources.conftest import FETCHED, PATIENCE_S, shard, sharded
from tests.web_server import WebServer

ROWS = 20_000
PASSWORD = "passw0rd"


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYWL_STALL_S", str(PATIENCE_S))
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("RAYWL_OFFLINE", raising=False)
    with WebServer() as server:
        yield server


def put(web, files, folder="m/"):
    web.files |= {folder + name: data for name, data in files.items()}
    return f"{web.url}/{folder}"


def whole(checkpoint, files):
    """Whether all files are local, byte for byte."""
    checkpoint.fetch()
    for file in checkpoint.files:
        assert Path(checkpoint.path(file.name)).read_bytes() == files[file.name]
    return True


def requests_for(web, name):
    return [r for r in web.requests if r.path == f"/m/{name}"]


@pytest.mark.parametrize("listings", [True, False])
def test_a_folder_is_opened_by_its_headers(web, tmp_path, listings):
    """By a listing, or by the usual names; a look at each file brings size, ETag and header at once."""
    web.has_listings = listings
    files = sharded(ROWS)
    checkpoint = open_checkpoint(put(web, files))
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    shards = sorted(name for name in FETCHED if name.startswith("model-"))
    for name in shards:
        assert len(requests_for(web, name)) == 1
        assert web.num_bytes(f"/m/{name}") < 40_000
    assert not (tmp_path / "cache").exists()
    web.forget()
    assert whole(checkpoint, files)
    for name in shards:
        # With what was read before, each byte came once.
        assert 0 < len(files[name]) - web.num_bytes(f"/m/{name}") < 40_000
    names = {path.name for path in Path(checkpoint.path("")).iterdir()}
    assert names == (FETCHED if listings else FETCHED | {"chat_template.jinja"})
    web.forget()
    open_checkpoint(f"{web.url}/m").fetch()
    assert web.num_bytes("/m/model-*") < 80_000


def test_one_file(web):
    files = {"model.safetensors": shard(["a"], ROWS), "config.json": b"{}"}
    checkpoint = open_checkpoint(put(web, files) + "model.safetensors")
    assert len(web.requests) == 1
    assert whole(checkpoint, files)
    assert {r.path for r in web.requests} == {"/m/model.safetensors"}


def test_without_an_index_or_a_listing(web):
    web.has_listings = False
    files = {"model.safetensors": shard(["a"], ROWS), "config.json": b"{}"}
    assert whole(open_checkpoint(put(web, files)), files)
    with pytest.raises(
        NotFoundError, match=r"no listing of files there .* none of model\.safetensors\.index"
    ):
        open_checkpoint(f"{web.url}/none")


@pytest.mark.parametrize("name", ["a+b%25 c [1]&;=.safetensors", "ü#?.safetensors"])
def test_names_are_taken_literally(web, name):
    files = {name: shard(["a"], ROWS)}
    assert whole(open_checkpoint(put(web, files)), files)


def test_a_server_without_ranges(web):
    """The whole comes: of a look as much is read as is wanted; after a break, what is there goes by."""
    web.has_ranges = False
    files = {"model.safetensors": shard(["a"], ROWS)}
    url = put(web, files)
    checkpoint = open_checkpoint(url)
    assert not checkpoint.source.files["model.safetensors"].ranged
    web.fail("/m/model.safetensors", "cut", times=1, after_bytes=1 << 18)
    assert whole(checkpoint, files)


def test_a_server_with_dates_alone(web):
    web.has_etags, web.has_dates = False, True
    files = {"model.safetensors": shard(["a"], ROWS)}
    url = put(web, files)
    checkpoint = open_checkpoint(url)
    assert checkpoint.identity.startswith("http:")
    assert whole(checkpoint, files)
    web.forget()
    again = open_checkpoint(url)
    assert again.identity == checkpoint.identity
    again.fetch()
    assert len(web.requests) == 2


def test_a_server_that_tells_nothing(web):
    """What can't be told from another file isn't taken for the same one later."""
    web.has_etags = False
    old, new = {"model.safetensors": shard(["a"], ROWS)}, {"model.safetensors": shard(["b"], ROWS)}
    url = put(web, old)
    first = open_checkpoint(url)
    assert whole(first, old)
    put(web, new)
    assert whole(open_checkpoint(url), new)
    assert whole(first, old)


@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_changed_since_it_was_opened(web, tmp_path, etags):
    """By its ETag; without one at least by its size."""
    web.has_etags = etags
    url = put(web, {"model.safetensors": shard(["a"], ROWS)})
    checkpoint = open_checkpoint(url)
    put(web, {"model.safetensors": shard(["b", "c"], ROWS)})
    with pytest.raises(CheckpointError, match="changed in the store since it was opened"):
        checkpoint.fetch()
    assert not list(tmp_path.rglob("model.safetensors"))


@pytest.mark.parametrize("how", ["500", "429", "cut", "reset", "hang"])
def test_faults_that_pass(web, how, monkeypatch):
    if how == "hang":
        monkeypatch.setenv("RAYWL_STALL_S", "3")
    files = {"model.safetensors": shard(["a"], ROWS)}
    checkpoint = open_checkpoint(put(web, files))
    web.forget()
    web.fail("/m/model.safetensors", how, times=1, after_bytes=1 << 17 if how in ("cut", "hang") else 0)
    assert whole(checkpoint, files)
    sent = sum(request.num_bytes for request in web.requests if request.status == 206)
    assert sent == len(files["model.safetensors"]) - (256 << 10)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("401", AuthError, "storage_options"),
        ("403", AuthError, "storage_options"),
        ("404", NotFoundError, "not found"),
        ("407", AuthError, "the proxy refused"),
        ("500", SourceError, "the store failed"),
        ("cut", SourceError, "can't be reached"),
    ],
)
def test_refusals(web, how, kind, said):
    url = put(web, {"model.safetensors": shard(["a"])}) + "model.safetensors"
    web.fail("/m/*", how)
    with pytest.raises(kind) as caught:
        open_checkpoint(url)
    assert said in str(caught.value)
    assert caught.value.endpoint == web.url
    assert caught.value.status == (int(how) if how.isdecimal() else None)


def test_a_page_in_the_place_of_weights(web):
    """From a proxy, with 200."""
    web.content_type = "text/html"
    url = put(web, {"model.safetensors": b"<html>sign in</html>"})
    with pytest.raises(SourceError, match="a web page came in its place"):
        open_checkpoint(url + "model.safetensors")


@pytest.mark.parametrize("how", ["in the URL", "as an option"])
def test_secrets(web, how):
    """A password and a signing query go with the requests and are shown nowhere."""
    web.password = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    files = {"model.safetensors": shard(["a"], ROWS)}
    put(web, files)
    if how == "in the URL":
        ref, options = web.url.replace("//", f"//me:{PASSWORD}@") + "/m?sig=passw0rd", {}
    else:
        ref, options = f"{web.url}/m", {"headers": {"Authorization": web.password}}
    checkpoint = open_checkpoint(ref, storage_options=options)
    assert checkpoint.source.ref == f"{web.url}/m"
    pinned = pin(ref, storage_options=options)
    shown = repr(checkpoint) + repr(checkpoint.source) + repr(pinned) + str(pinned)
    assert PASSWORD not in shown + pickle.dumps(checkpoint).decode("latin-1")
    assert whole(open_checkpoint(pickle.loads(pickle.dumps(pinned))), files)
    kept = [
        path.read_bytes() for path in Path(checkpoint.source.repository.folder).rglob("*") if path.is_file()
    ]
    assert not any(PASSWORD.encode() in data for data in kept)
    web.password = "another"
    with pytest.raises(RaywlError) as caught:
        open_checkpoint(ref, storage_options=options)
    assert type(caught.value) is AuthError
    assert PASSWORD not in "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))


def test_memory(tmp_path, monkeypatch):
    """fsspec's own memory, by the calls that every one of its stores has; no node could read it."""
    import fsspec

    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "cache"))
    files = sharded(ROWS)
    store = fsspec.filesystem("memory")
    for name, data in files.items():
        store.pipe_file(f"/test_memory/m/{name}", data)
    checkpoint = open_checkpoint("memory://test_memory/m")
    assert checkpoint.identity.startswith("memory:")
    assert whole(checkpoint, files)
    assert whole(open_checkpoint("memory://test_memory/m/model-00001-of-00002.safetensors"), files)
    with pytest.raises(ValueError, match="no node can read"):
        pin("memory://test_memory/m")
    with pytest.raises(NotFoundError):
        open_checkpoint("memory://test_memory/none")
    changed = open_checkpoint("memory://test_memory/m", cache_dir=tmp_path / "other")
    store.pipe_file("/test_memory/m/model-00001-of-00002.safetensors", shard(["a"], ROWS))
    with pytest.raises(CheckpointError, match="changed in the store"):
        changed.fetch()
