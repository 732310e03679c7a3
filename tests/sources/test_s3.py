"""Checkpoints in S3: moto's server over real HTTP, through the real s3fs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import socket
import struct
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

import raywl
from raywl.errors import (
    AuthError,
    CheckpointError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    RaywlError,
    SourceError,
)
from raywl.opening import open_checkpoint
from raywl.sources import StorePin, pin
from tests.s3_server import KEY, SECRET, S3Server
from tests.sources.conftest import FETCHED, PATIENCE_S, answer, shard, sharded, spans_left, start_plain, until
from tests.web_server import WebServer

ROWS = 20_000
"""Of tensors so that a file is much larger than what is read of it for its header."""
HEADER = 300 << 10
"""Bytes that no request for a header asks for."""


@pytest.fixture(scope="module")
def server():
    with S3Server() as s3:
        yield s3


@pytest.fixture
def s3(server, tmp_path, monkeypatch):
    """The server, a cache in `tmp_path / "cache"`, and an environment that names neither."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "RAYWL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYWL_STALL_S", str(PATIENCE_S))
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    server.mend()
    server.forget()
    yield server
    server.mend()


@pytest.fixture
def bucket(request):
    """A name of this test's own."""
    return "b" + hashlib.sha1(request.node.nodeid.encode()).hexdigest()[:20]


def opened(s3, url, **options):
    return open_checkpoint(url, **{"storage_options": s3.options, **options})


def whole(checkpoint, files):
    """Whether all files are local, byte for byte."""
    checkpoint.fetch()
    for file in checkpoint.files:
        assert Path(checkpoint.path(file.name)).read_bytes() == files[file.name]
    return True


def test_a_folder_is_opened_by_its_headers(s3, bucket):
    """One listing, the index, and a range of each file; nothing is written."""
    files = sharded(ROWS)
    url = s3.add(bucket, files)
    checkpoint = opened(s3, url)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert [r.path.removeprefix(f"/{bucket}/m/") for r in s3.reads()] == [
        "model.safetensors.index.json", *(r.path.removeprefix(f"/{bucket}/m/") for r in s3.reads()[1:])
    ]  # fmt: skip
    assert sorted(r.path.removeprefix(f"/{bucket}/m/model-") for r in s3.reads("*/model-*")) == [
        "00001-of-00002.safetensors", "00002-of-00002.safetensors"
    ]  # fmt: skip
    assert len(s3.requests) == 4
    assert s3.num_bytes("*/model-*") < 40_000
    assert not Path(os.environ["RAYWL_CACHE"]).exists()


def test_a_header_that_is_long_takes_two_reads(s3, bucket):
    """The first tells how long it is."""
    header = {
        f"layer.{i}.{'x' * 200}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(2000)
    }
    raw = json.dumps(header).encode()
    url = s3.add(bucket, {"model.safetensors": struct.pack("<Q", len(raw)) + raw})
    assert len(opened(s3, url).tensors) == 2000
    assert len(s3.reads("*/model.safetensors")) == 2
    assert s3.num_bytes() == len(raw) + 8


def test_it_is_fetched_when_it_is_used_and_once(s3, bucket, tmp_path):
    """Only the files that are needed, with the small ones; no byte twice, the headers' included."""
    import torch

    files = sharded(ROWS)
    url = s3.add(bucket, files)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(ROWS, 8))

    model = Model()
    seen: list[tuple[int, int, str]] = []
    report = raywl.load_into(
        model, url, strict=False, storage_options=s3.options, progress=lambda *step: seen.append(step)
    )
    assert torch.equal(model.a, torch.full((ROWS, 8), 1.0))
    assert {r.path.removeprefix(f"/{bucket}/m/") for r in s3.reads() if r.num_bytes > 50_000} == {
        "model-00001-of-00002.safetensors"
    }
    assert s3.num_bytes("*/model-00001*") == len(files["model-00001-of-00002.safetensors"])
    assert report.bytes_by_source["s3"] > 8 * 4 * ROWS - 40_000
    assert report.phases["fetch"] > 0
    total = {total for _, total, phase in seen if phase == "fetch"}
    assert total == {
        sum(len(files[name]) for name in FETCHED) - len(files["model-00002-of-00002.safetensors"])
    }
    s3.forget()
    assert "s3" not in raywl.load_into(model, url, strict=False, storage_options=s3.options).bytes_by_source
    # The other file's header alone.
    assert {r.path.rpartition("/")[2] for r in s3.reads()} == {"model-00002-of-00002.safetensors"}
    folder = Path(open_checkpoint(url, storage_options=s3.options).path(""))
    assert {path.name for path in folder.iterdir()} == FETCHED - {"model-00002-of-00002.safetensors"}
    assert not list(tmp_path.rglob("*.incomplete*"))


def test_iter_weights_fetches_what_it_is_asked_for(s3, bucket):
    url = s3.add(bucket, sharded(ROWS))
    ((name, tensor),) = opened(s3, url).iter_weights(["c"])
    assert name == "c"
    assert np.array_equal(tensor.numpy(), np.full((ROWS, 8), 2.0, np.float32))
    assert s3.num_bytes("*/model-00001*") < 40_000


def test_one_file(s3, bucket):
    """By its URL; alone, without what lies beside it."""
    files = {"model.safetensors": shard(["a"], ROWS), "config.json": b"{}", "x.safetensors": b"no"}
    url = s3.add(bucket, files)
    checkpoint = opened(s3, f"{url}/model.safetensors")
    assert len(s3.requests) == 1
    assert whole(checkpoint, files)
    assert {r.path for r in s3.reads()} == {f"/{bucket}/m/model.safetensors"}


# Which keys


def test_folder_markers_are_no_files(s3, bucket):
    """C69: keys that consoles make."""
    files = {"config.json": b"{}", "model.safetensors": shard(["a"])}
    url = s3.add(bucket, {**files, "": b"", "sub/": b"", "sub/x.safetensors": b"no"})
    checkpoint = opened(s3, url)
    assert checkpoint.source.list() == ["config.json", "model.safetensors"]
    assert whole(checkpoint, files)
    for name in ("empty/", "empty/sub/"):
        s3.client.put_object(Bucket=bucket, Key=name, Body=b"")
    with pytest.raises(CheckpointError, match="no weights here"):
        opened(s3, f"s3://{bucket}/empty")


def test_all_pages_and_no_neighbours(s3, bucket):
    """C71: more keys than a page has, and a folder whose name starts like it."""
    s3.add(bucket, {"z.safetensors": shard(["a"])}, "many/")
    s3.add_empty(bucket, [f"many/f{i:05d}.json" for i in range(1200)])
    s3.add(bucket, {"y.safetensors": shard(["b"])}, "many2/")
    checkpoint = opened(s3, f"s3://{bucket}/many")
    assert len(checkpoint.source.list()) == 1201
    assert list(checkpoint.tensors) == ["a"]
    assert len([r for r in s3.requests if "list-type" in r.query]) == 2


@pytest.mark.parametrize("name", ["a+b%25 c [1]*?#.safetensors", "ü&=;.safetensors"])
def test_names_are_taken_literally(s3, bucket, name):
    files = {name: shard(["a"], ROWS)}
    assert whole(opened(s3, s3.add(bucket, files, "m %41 [x]+/")), files)


def test_an_index_with_files_in_a_folder(s3, bucket):
    index = json.dumps({"weight_map": {"a": "parts/1.safetensors"}}).encode()
    files = {
        "model.safetensors.index.json": index,
        "parts/1.safetensors": shard(["a"]),
        "parts/2.safetensors": b"no",
    }
    checkpoint = opened(s3, s3.add(bucket, files))
    assert whole(checkpoint, files)
    assert checkpoint.source.size("parts/2.safetensors") is None


def test_an_index_that_leads_outside(s3, bucket):
    index = json.dumps({"weight_map": {"a": "../x/1.safetensors"}}).encode()
    url = s3.add(bucket, {"model.safetensors.index.json": index, "../x/1.safetensors": shard(["a"])})
    with pytest.raises(CheckpointError, match="leads outside"):
        opened(s3, url)
    assert not s3.reads("*/1.safetensors")


def test_an_index_that_names_absent_files(s3, bucket):
    files = sharded()
    del files["model-00002-of-00002.safetensors"]
    with pytest.raises(MissingFileError, match="incomplete upload") as caught:
        opened(s3, s3.add(bucket, files))
    assert caught.value.files == ("model-00002-of-00002.safetensors",)


def test_listings_are_fresh(s3, bucket):
    """No listing of a moment ago is believed, by this process or by s3fs."""
    url = s3.add(bucket, {"one.safetensors": shard(["a"])})
    assert list(opened(s3, url).tensors) == ["a"]
    s3.add(bucket, {"two.safetensors": shard(["bb"])})
    assert list(opened(s3, url).tensors) == ["a", "bb"]
    s3.client.delete_object(Bucket=bucket, Key="m/one.safetensors")
    assert list(opened(s3, url).tensors) == ["bb"]


# Identity


def test_identity_is_that_of_the_content(s3, bucket):
    """By ETags and sizes: the same in another place, another after a change that the header doesn't show."""
    files = {"model.safetensors": shard(["a"]), "config.json": b"{}"}
    first = opened(s3, s3.add(bucket, files)).identity
    assert first.startswith("s3:")
    assert opened(s3, s3.add(bucket, files, "copy/")).identity == first
    s3.add(bucket, {"config.json": b'{"x": 1}'})
    assert opened(s3, f"s3://{bucket}/m").identity == first
    s3.add(bucket, {"model.safetensors": save({"a": np.zeros((4, 8), np.float32)})})
    assert opened(s3, f"s3://{bucket}/m").identity != first


def test_a_file_that_changed_since_it_was_opened(s3, bucket, tmp_path):
    old, new = (save({"a": np.full((ROWS, 8), value, np.float32)}) for value in (1.0, 2.0))
    url = s3.add(bucket, {"model.safetensors": old})
    checkpoint = opened(s3, url)
    s3.add(bucket, {"model.safetensors": new})
    with pytest.raises(CheckpointError, match="changed in the store since it was opened"):
        checkpoint.fetch()
    assert not list(tmp_path.rglob("model.safetensors"))
    assert whole(opened(s3, url), {"model.safetensors": new})


def test_a_file_that_changes_while_it_is_fetched(s3, bucket, tmp_path):
    """The first part is the old file's: there is never a mix."""
    old, new = (save({"a": np.full((ROWS, 8), value, np.float32)}) for value in (1.0, 2.0))
    url = s3.add(bucket, {"model.safetensors": old})
    checkpoint = opened(s3, url)
    broken = s3.fail("*/model.safetensors", "cut", times=1, after_bytes=1 << 17)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(checkpoint.fetch)
        assert broken.reached.wait(PATIENCE_S)
        s3.add(bucket, {"model.safetensors": new})
        with pytest.raises(CheckpointError, match="changed in the store"):
            fetch.result(PATIENCE_S)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert whole(opened(s3, url), {"model.safetensors": new})


# Checks


def test_wrong_bytes_are_thrown_away(s3, bucket, tmp_path):
    """The ETag of what came in one part is its MD5."""
    files = sharded(ROWS)
    checkpoint = opened(s3, s3.add(bucket, files))
    s3.fail("*/model-00002*", "garble")
    with pytest.raises(SourceError, match=r"other bytes than the store has \(its CRC32|MD5 is") as caught:
        checkpoint.fetch()
    assert "model-00002" in str(caught.value)
    assert not list(tmp_path.rglob("model-00002*"))
    s3.mend()
    assert whole(checkpoint, files)


@pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32"])
def test_checksums_of_the_store(s3, bucket, algorithm):
    url = s3.add(bucket, {})
    data = shard(["a"], ROWS)
    s3.client.put_object(Bucket=bucket, Key="m/model.safetensors", Body=data, ChecksumAlgorithm=algorithm)
    checkpoint = opened(s3, url)
    known = checkpoint.source.known_hashes("model.safetensors")
    assert set(known) == {algorithm.lower(), "md5"}
    assert checkpoint.verify(deep=True).compared == ["model.safetensors"]
    path = Path(os.path.realpath(checkpoint.path("model.safetensors")))
    path.write_bytes(data[:-1] + b"\1")
    (problem,) = checkpoint.verify(deep=True).problems
    assert f"its {'MD5' if algorithm == 'CRC32' else algorithm} is" in problem


def test_an_etag_that_is_no_md5(s3, bucket, monkeypatch):
    """As of some stores that speak like S3."""
    checkpoint = opened(s3, s3.add(bucket, {"model.safetensors": shard(["a"])}))
    assert "md5" in checkpoint.source.known_hashes("model.safetensors")
    monkeypatch.setenv("RAYWL_ETAG_IS_MD5", "0")
    assert "md5" not in checkpoint.source.known_hashes("model.safetensors")


def test_what_came_in_several_parts_has_no_md5(s3, bucket):
    url = s3.add(bucket, {})
    data = shard(["a"], 200_000)
    key = {"Bucket": bucket, "Key": "m/model.safetensors"}
    upload = s3.client.create_multipart_upload(**key)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), 5 << 20), 1):
        body = data[start : start + (5 << 20)]
        part = s3.client.upload_part(**key, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    s3.client.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts})
    checkpoint = opened(s3, url)
    assert checkpoint.source.files["model.safetensors"].tag.endswith('-2"')
    assert "md5" not in checkpoint.source.known_hashes("model.safetensors")
    assert whole(checkpoint, {"model.safetensors": data})


# What goes wrong


def failure(s3, url, **options) -> RaywlError:
    """The error of opening and fetching; whatever it is, it shows no secret."""
    with pytest.raises(RaywlError) as caught:
        opened(s3, url, **options).fetch()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))
    for secret in (SECRET, "t0ken-of-a-session"):
        assert secret not in shown
    return caught.value


def test_no_such_bucket_or_key(s3, bucket):
    """C73: each is named, with the endpoint."""
    for url in ("s3://no-such-bucket/m", "s3://no-such-bucket/x.safetensors"):
        error = failure(s3, url)
        assert type(error) is NotFoundError
        assert not error.local
        assert "no bucket 'no-such-bucket'" in str(error)
        assert (error.endpoint, error.status) == (s3.url, 404)
    s3.add(bucket, {"x": b""})
    error = failure(s3, f"s3://{bucket}/none")
    assert type(error) is NotFoundError
    assert "no key below 'none/'" in str(error)
    assert bucket in str(error)
    error = failure(s3, f"s3://{bucket}/m/none.safetensors")
    assert type(error) is NotFoundError
    assert "none.safetensors" in str(error)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("403 AccessDenied", AuthError, "refused"),
        ("403 InvalidAccessKeyId", AuthError, "doesn't know these credentials"),
        ("403 SignatureDoesNotMatch", AuthError, "doesn't know these credentials"),
        ("400 ExpiredToken", AuthError, "have expired"),
        ("403 RequestTimeTooSkewed", AuthError, "clock is off"),
        ("301 PermanentRedirect", SourceError, "right endpoint and region"),
        ("500 InternalError", SourceError, "failed"),
        ("503 SlowDown", SourceError, "failed"),
    ],
)
def test_refusals(s3, bucket, how, kind, said):
    """C73: each with its status, and what to do."""
    url = s3.add(bucket, sharded())
    s3.fail(f"/{bucket}*", how)
    options = {**s3.options, "token": "t0ken-of-a-session"}
    error = failure(s3, url, storage_options=options)
    assert type(error) is kind
    assert said in str(error)
    assert how.split()[1] in str(error)
    assert (error.status, error.endpoint) == (int(how.split()[0]), s3.url)
    if kind is AuthError and "clock" not in said:
        assert "storage_options" in str(error)


def test_no_credentials(s3, bucket):
    error = failure(s3, s3.add(bucket, sharded()), storage_options={"endpoint_url": s3.url})
    assert type(error) is AuthError
    assert "no credentials were found" in str(error)


def test_the_usual_environment(s3, bucket, monkeypatch):
    """C73: endpoint and keys."""
    url = s3.add(bucket, sharded())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    checkpoint = open_checkpoint(url)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert open_checkpoint(url, storage_options=s3.options).identity == checkpoint.identity


def test_nobody_there(s3):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        error = failure(s3, "s3://b/m", storage_options={**s3.options, "endpoint_url": endpoint})
    assert type(error) is SourceError
    assert "can't be reached" in str(error)
    assert error.endpoint == endpoint


def test_something_else_than_a_store(s3, monkeypatch):
    """A proxy's page, with 200."""
    monkeypatch.setenv("no_proxy", "*")
    with WebServer() as web:
        web.files["bucket"] = b"<html>sign in</html>"
        web.content_type = "text/html"
        error = failure(s3, "s3://bucket/m", storage_options={**s3.options, "endpoint_url": web.url})
    assert isinstance(error, SourceError)
    assert error.endpoint == web.url
    assert "no such store" in str(error) or "no key below" in str(error), str(error)


def test_a_host_without_address(s3):
    endpoint = "http://no-such-host.invalid"
    error = failure(s3, "s3://b/m", storage_options={**s3.options, "endpoint_url": endpoint})
    assert type(error) is SourceError
    assert "name can't be resolved" in str(error)


def test_faults_that_pass(s3, bucket, monkeypatch):
    """An answer of 500, one that asks to slow down, a cut, a stall: each once; no byte is fetched twice."""
    # Nothing but what is made to hang takes as long.
    monkeypatch.setenv("RAYWL_STALL_S", "4")
    files = sharded(ROWS)
    checkpoint = opened(s3, s3.add(bucket, files))
    s3.forget()
    heads = {name: len(checkpoint.source.heads.get(name)) for name in files}
    s3.fail("*/model-00001*", "500", times=1)
    s3.fail("*/model-00001*", "cut", times=1, after_bytes=1 << 17)
    s3.fail("*/model-00002*", "503 SlowDown", times=1, retry_after_s=1)
    s3.fail("*/model-00002*", "hang", times=1, after_bytes=1 << 17)
    assert whole(checkpoint, files)
    for name in (f"model-0000{i}-of-00002.safetensors" for i in (1, 2)):
        answers = [r for r in s3.reads(f"*/{name}") if r.status == 206]
        starts = [int(r.range.removeprefix("bytes=").partition("-")[0]) for r in answers]
        # From the very byte where it stopped.
        assert starts == [heads[name], heads[name] + (1 << 17)]


# Offline


def test_offline(s3, bucket, tmp_path, monkeypatch):
    """From the cache alone; what is absent is named."""
    url = s3.add(bucket, sharded())
    with pytest.raises(OfflineError, match="nothing of it is in the cache"):
        opened(s3, url, offline=True)
    online = opened(s3, url)
    online.fetch(["model-00001-of-00002.safetensors"])
    s3.forget()
    with pytest.raises(MissingFileError) as caught:
        opened(s3, url, offline=True)
    assert caught.value.files == ("model-00002-of-00002.safetensors",)
    assert opened(s3, url, offline=True, allow_patterns="*-00001-*").tensors.keys() == {"a"}
    online.fetch()
    s3.forget()
    monkeypatch.setenv("RAYWL_OFFLINE", "1")
    offline = opened(s3, url)
    assert offline.identity == online.identity
    assert len(dict(offline.iter_weights())) == 3
    assert not s3.requests
    online.source.repository.blob(online.source.key(online.source.files["model-00002-of-00002.safetensors"]))
    Path(os.path.realpath(offline.path("model-00002-of-00002.safetensors"))).unlink()
    with pytest.raises(MissingFileError, match="working offline") as caught:
        offline.fetch()
    assert caught.value.files == ("model-00002-of-00002.safetensors",)


def test_a_full_cache_is_not_written_to(s3, bucket, tmp_path):
    """C62: it may be read-only."""

    def state():
        return {path: path.lstat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}

    url = s3.add(bucket, sharded())
    opened(s3, url).fetch()
    before = state()
    opened(s3, url).fetch()
    opened(s3, url, offline=True).fetch()
    assert state() == before


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_the_modes_of_files(s3, bucket, tmp_path, umask, mode):
    """C62: 0666 less the umask; locks can be taken by everybody."""
    url = s3.add(bucket, {"model.safetensors": shard(["a"])})
    before = os.umask(umask)
    try:
        opened(s3, url).fetch()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "cache" / "stores").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(mode)}
    (lock,) = (tmp_path / "cache" / "locks").iterdir()
    assert lock.stat().st_mode & 0o777 == 0o666


# Pins


def test_a_pin_is_of_what_was_listed(s3, bucket, tmp_path, monkeypatch):
    """The driver's look; a node opens that, and no later state, with what the driver may and it may not."""
    files = sharded(ROWS)
    url = s3.add(bucket, files)
    pinned = pin(url, storage_options=s3.options, timeout_s=60)
    assert isinstance(pinned, StorePin)
    assert str(pinned) == url
    assert SECRET not in repr(pinned) + str(pinned)
    assert not (tmp_path / "cache").exists()
    s3.forget()
    on_node = pickle.loads(pickle.dumps(pinned))
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "node"))
    checkpoint = open_checkpoint(on_node)
    assert checkpoint.identity == pinned.identity == opened(s3, url).identity
    assert whole(checkpoint, files)
    assert (tmp_path / "node").exists()
    assert not (tmp_path / "cache").exists()
    assert pin(pinned) is pinned
    with pytest.raises(ValueError, match="has all options in itself"):
        open_checkpoint(pinned, storage_options=s3.options)
    s3.add(bucket, {"model-00001-of-00002.safetensors": shard(["a"], ROWS + 1)})
    monkeypatch.setenv("RAYWL_CACHE", str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="changed in the store"):
        open_checkpoint(on_node)


def test_the_environments_keys_go_along(s3, bucket, monkeypatch):
    url = s3.add(bucket, sharded())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    pinned = pickle.loads(pickle.dumps(pin(url)))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
    open_checkpoint(pinned).fetch()


def test_an_open_checkpoint_shows_and_sends_no_secret(s3, bucket, monkeypatch):
    """Where it was pickled to, the environment's own credentials count."""
    files = sharded(ROWS)
    checkpoint = opened(s3, s3.add(bucket, files))
    sent = pickle.dumps(checkpoint)
    assert SECRET not in repr(checkpoint) + repr(checkpoint.source) + str(checkpoint.source.pin)
    assert SECRET.encode() not in sent
    there = pickle.loads(sent)
    with pytest.raises(AuthError):
        there.fetch()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert whole(pickle.loads(sent), files)


# Processes

FETCH = """
import json, sys
from raywl.opening import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1])
    print("open", flush=True)
    checkpoint.fetch()
    print(json.dumps({"identity": checkpoint.identity}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def environment(s3, home, **more):
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": s3.url,
        "RAYWL_CACHE": str(home / "cache"),
        "RAYWL_STALL_S": str(PATIENCE_S),
        **more,
    }


@pytest.mark.slow
def test_two_processes_fetch_each_byte_once(s3, bucket, tmp_path):
    files = sharded(ROWS)
    url = s3.add(bucket, files)
    slow = s3.fail("*/model-00001*", "hang", times=1, after_bytes=1 << 16, of_bytes=HEADER)
    processes = [start_plain(FETCH, url, **environment(s3, tmp_path)) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "open\n"
    assert slow.reached.wait(120)
    slow.released.set()
    identity = opened(s3, url).identity
    for process in processes:
        assert answer(process) == {"identity": identity}
    for name in (name for name in FETCHED if name.startswith("model-")):
        data = [r for r in s3.reads(f"*/{name}") if r.num_bytes > HEADER]
        assert len(data) == 1
    assert opened(s3, url).verify(deep=True).ok


def test_the_next_one_goes_on_where_a_killed_one_was(s3, bucket, tmp_path):
    """`kill -9` in the middle of a file: nothing of what it had is asked for again."""
    files = sharded(ROWS)
    url = s3.add(bucket, files)
    stuck = s3.fail("*/model-00002*", "hang", times=1, after_bytes=1 << 19, of_bytes=HEADER)
    killed = start_plain(FETCH, url, **environment(s3, tmp_path))
    assert stuck.reached.wait(120)
    # A block is written a second after it began, however small.
    size = len(files["model-00002-of-00002.safetensors"])
    until(lambda: spans_left(tmp_path, size, at_least=1 << 19))
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    killed.stderr.close()
    written = spans_left(tmp_path, size, at_least=1 << 19)
    s3.mend()
    s3.forget()
    checkpoint = opened(s3, url)
    assert whole(checkpoint, files)
    had = sum(end - start for start, end in written)
    asked = [r for r in s3.reads("*/model-00002*") if not r.range.startswith("bytes=0-")]
    assert sum(r.num_bytes for r in asked) == size - had
    assert not list(tmp_path.rglob("*.incomplete*"))


def test_the_command_line(s3, bucket, tmp_path):
    """By its headers; and all of it where it is to be verified."""
    url = s3.add(bucket, sharded(ROWS))
    code = "import sys; from raywl.cli import main; sys.exit(main(sys.argv[1:]))"
    process = start_plain(code, "inspect", url, "--json", **environment(s3, tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["ref"] == url
    assert s3.num_bytes("*/model-*") < 40_000
    assert not (tmp_path / "cache").exists()
    process = start_plain(code, "verify", url, "--deep", "--json", **environment(s3, tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["ok"]
    options = [f"--storage-option={name}={value}" for name, value in s3.options.items()]
    process = start_plain(code, "inspect", f"{url}x", "--json", *options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert json.loads(out)["error"]["class"] == "NotFoundError"
    assert SECRET not in out + err
    process = start_plain(code, "inspect", url, "--storage-option", SECRET)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "NAME=VALUE" in err
    assert SECRET not in err
