"""What goes wrong with a hub, each with its own error, without secrets, and with a second try that works."""

from __future__ import annotations

import hashlib
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import constants

from raywl.errors import AuthError, NotFoundError, OfflineError, RaywlError, SourceError
from raywl.opening import open_checkpoint
from raywl.sources import pin
from raywl.sources.hub_errors import without_secrets
from tests.hub_server import SIGNATURE
from tests.sources.conftest import FETCHED, PATIENCE_S, shard, sharded

TOKEN = "hf_s3cretT0ken"


def failure(ref="org/name", **options) -> RaywlError:
    """The error of opening and fetching; whatever it is, it shows no secret."""
    with pytest.raises(RaywlError) as caught:
        open_checkpoint(ref, **options).fetch()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))
    for secret in (TOKEN, SIGNATURE, "passw0rd"):
        assert secret not in shown
    return caught.value


@pytest.mark.parametrize("token", [None, TOKEN])
def test_no_such_repository(client, token):
    """The hub answers strangers with 401, as it does for private ones; it still is "not found"."""
    client.tokens.add(TOKEN)
    error = failure("org/nothing", token=token)
    assert type(error) is NotFoundError
    assert not error.local
    assert (error.endpoint, error.status) == (client.url, 401 if token is None else 404)
    assert "no such repository" in str(error)
    assert "private" in str(error)


@pytest.mark.parametrize("use", [open_checkpoint, pin])
def test_no_such_revision(client, use):
    client.add("org/name", sharded())
    with pytest.raises(NotFoundError, match="no revision 'v9'") as caught:
        use("org/name", revision="v9")
    assert caught.value.status == 404


@pytest.mark.parametrize(("token", "status"), [(None, 401), (TOKEN, 403)])
def test_gated(client, token, status):
    client.tokens.add(TOKEN)
    client.add("org/name", sharded(), gated=True)
    error = failure(token=token)
    assert type(error) is AuthError
    assert error.status == status
    for said in ("gated", f"{client.url}/org/name", "HF_TOKEN"):
        assert said in str(error)


def test_a_token_that_is_no_token(client):
    client.add("org/name", sharded())
    error = failure(token=TOKEN)
    assert type(error) is AuthError
    assert error.status == 401
    assert "Invalid credentials" in str(error)
    assert "HF_TOKEN" in str(error)


def test_a_token_of_the_environment_is_not_shown_either(client, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    client.add("org/name", sharded())
    assert type(failure()) is AuthError


@pytest.mark.parametrize("status", [401, 403])
def test_refusals_without_a_code(client, status):
    client.add("org/name", sharded())
    client.fail("/api/models/*", str(status))
    error = failure()
    assert type(error) is AuthError
    assert error.status == status


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_failing_hub(client, status):
    client.add("org/name", sharded())
    client.fail("/api/models/*", str(status), retry_after_s=7)
    error = failure()
    assert type(error) is SourceError
    assert (error.status, error.endpoint) == (status, client.url)
    assert ("try again after 7 s" in str(error)) == (status == 429)
    client.mend()
    open_checkpoint("org/name")


def test_a_hub_that_does_not_answer(client, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    client.add("org/name", sharded())
    client.fail("/api/models/*", "hang")
    began_s = time.monotonic()
    error = failure()
    assert time.monotonic() - began_s < 20
    assert type(error) is SourceError
    assert "Timeout" in str(error)
    assert error.endpoint == client.url


@pytest.mark.parametrize("how", ["cut", "reset"])
def test_a_hub_that_breaks_off(client, how):
    client.add("org/name", sharded())
    client.fail("/api/models/*", how)
    error = failure()
    assert type(error) is SourceError
    assert "can't be reached" in str(error)


def test_no_hub_there(client, monkeypatch):
    """The endpoint is read when it is needed, and a password in it isn't shown."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://me:passw0rd@127.0.0.1:{port}")
        error = failure()
    assert type(error) is SourceError
    assert error.endpoint == f"http://127.0.0.1:{port}"
    assert "ConnectError" in str(error)


def test_something_else_than_a_hub(client, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"{client.url}/elsewhere")
    error = failure()
    assert type(error) is NotFoundError
    assert error.endpoint == f"{client.url}/elsewhere"


def test_a_client_that_was_imported_offline(client, monkeypatch):
    """It refuses whatever is asked of it, `offline=False` included; the error says why."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = failure(offline=False)
    assert type(error) is OfflineError
    assert "imported with HF_HUB_OFFLINE" in str(error)


# Downloads


def left(tmp_path):
    """Files of the cache that are not whole, or that are links to nothing."""
    repository = tmp_path / "hub" / "models--org--name"
    return [path for path in repository.rglob("*") if "incomplete" in path.name or not path.exists()]


LARGE = 20_000
"""Rows of tensors so that reading a header leaves most of a file for later."""


@pytest.mark.parametrize(("how", "status"), [("500", 500), ("403", 403), ("404", 404), ("reset", None)])
def test_a_download_that_fails(client, tmp_path, how, status):
    """Nothing half-written is under a name, and a second try fetches the rest alone."""
    files = sharded(LARGE)
    client.add("org/name", files)
    checkpoint = open_checkpoint("org/name")
    client.fail("/cdn/*model-00002*", how, method="GET")
    with pytest.raises(SourceError) as caught:
        checkpoint.fetch()
    error = caught.value
    assert (error.status, error.endpoint) == (status, client.url)
    assert "download of model-00002-of-00002.safetensors" in str(error)
    assert not list(tmp_path.rglob("snapshots/*/model-00002*"))

    client.mend()
    whole = {path.name for path in tmp_path.glob("hub/*/snapshots/*/*")}
    client.forget()
    checkpoint.fetch()
    assert left(tmp_path) == []
    assert checkpoint.verify(deep=True).ok
    assert {r.path.rpartition("/")[2] for r in client.requests} <= FETCHED - whole


def test_a_cut_connection_goes_on_where_it_stopped(client):
    """From the very byte."""
    files = {"model.safetensors": shard(["a"], rows=100_000)}
    client.add("org/name", files)
    size = len(files["model.safetensors"])
    checkpoint = open_checkpoint("org/name")
    client.forget()
    client.fail("/cdn/*", "cut", times=1, after_bytes=2 << 20)
    checkpoint.fetch()
    assert checkpoint.verify(deep=True).ok
    head, rest = (request.range for request in client.requests if request.path.startswith("/cdn/"))
    start = int(head.removeprefix("bytes=").partition("-")[0])
    assert rest == f"bytes={start + (2 << 20)}-{size - 1}"
    assert client.num_bytes("/cdn/*") == size - start


def test_the_first_failure_ends_the_other_downloads(client, tmp_path, monkeypatch):
    """A large file that is on its way doesn't keep the error for itself until it is done."""
    monkeypatch.setenv("RAYWL_RETRIES", "0")
    client.add("org/name", sharded(LARGE))
    checkpoint = open_checkpoint("org/name")
    slow = client.fail("/cdn/*model-00001*", "hang", times=1, after_bytes=1 << 10)
    broken = client.fail("/cdn/*model-00002*", "hang")
    broken.cut_when_released = True
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(checkpoint.fetch)
        assert slow.reached.wait(PATIENCE_S)
        assert broken.reached.wait(PATIENCE_S)
        broken.released.set()
        with pytest.raises(SourceError, match="model-00002"):
            fetch.result(PATIENCE_S)
    assert not slow.released.is_set()
    assert not list(tmp_path.rglob("snapshots/*/model-0000*"))


def test_a_stalled_download_is_cut_and_goes_on(client, monkeypatch):
    monkeypatch.setenv("RAYWL_STALL_S", "1")
    monkeypatch.setenv("RAYWL_RETRIES", "5")
    client.add("org/name", {"model.safetensors": shard(["a"], rows=LARGE)})
    stuck = client.fail("/cdn/*", "hang", times=1, after_bytes=1 << 10)
    checkpoint = open_checkpoint("org/name")
    assert stuck.reached.is_set()
    stuck = client.fail("/cdn/*", "hang", times=1, after_bytes=1 << 10)
    checkpoint.fetch()
    assert stuck.reached.is_set()
    assert checkpoint.verify(deep=True).ok


def test_a_busy_hub_is_given_the_time_that_it_asks_for(client):
    client.add("org/name", {"model.safetensors": shard(["a"], rows=LARGE)})
    checkpoint = open_checkpoint("org/name")
    client.fail("/cdn/*", "429", times=1, retry_after_s=1)
    began_s = time.monotonic()
    checkpoint.fetch()
    assert time.monotonic() - began_s >= 1
    assert checkpoint.verify(deep=True).ok
    client.fail("/cdn/*", "429", retry_after_s=3600)
    client.add("org/name", {"model.safetensors": shard(["b"], rows=LARGE)})
    assert "try again after 3600 s" in str(failure())


def test_a_gated_repository_whose_listing_is_open(client):
    """As on the real hub: the refusal comes with the first file."""
    client.add("org/name", sharded(), gated=True)
    assert type(failure()) is AuthError


def test_a_cache_that_can_not_be_made(client, tmp_path):
    """Its folder is a file."""
    client.add("org/name", sharded())
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "models--org--name").touch()
    error = failure()
    assert type(error) is SourceError
    assert str(tmp_path / "hub" / "models--org--name") in str(error)


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://cdn.x/a/b?X-Sig=abc&k=v failed", "GET https://cdn.x/a/b failed"),
        ("'http://me:pw@host:1/x'", "'http://host:1/x'"),
        (f"bearer {TOKEN}!", "bearer ***!"),
        ("nothing to hide?", "nothing to hide?"),
    ],
)
def test_secrets_are_taken_out(text, shown):
    assert without_secrets(text, [None, "", TOKEN]) == shown


@pytest.mark.parametrize("token", [TOKEN + "\n", " " + TOKEN], ids=["line break", "space"])
def test_a_token_as_it_is_read_from_a_file(client, token):
    """What stands around it is no part of it."""
    client.tokens.add(TOKEN)
    client.add("org/name", sharded(), private=True, readers=(TOKEN,))
    assert set(open_checkpoint("org/name", token=token).tensors) == {"a", "b", "c"}


@pytest.mark.parametrize("token", ["hf_SECRET\nmore", "hf_SECRET\u00e9", "hf_SE CRET"], ids=ascii)
def test_a_token_that_no_header_holds(client, token):
    """It is refused before the client would show it."""
    client.add("org/name", sharded())
    error = failure(token=token)
    assert type(error) is AuthError
    assert "SECRET" not in str(error)
    assert "CRET" not in str(error)


def test_a_page_in_the_hubs_place(client):
    """A proxy that answers for it, with 200."""
    client.add("org/name", sharded())
    client.fail("/api/models/org/name*", "garble")
    error = failure()
    assert type(error) is SourceError
    assert "no hub" in str(error)
    assert error.endpoint == client.url


def test_a_garbled_download_is_thrown_away(client, tmp_path):
    """The second try fetches it again; the right bytes come."""
    files = sharded(LARGE)
    client.add("org/name", files)
    checkpoint = open_checkpoint("org/name")
    client.fail("/cdn/*model-00002*", "garble", method="GET")
    with pytest.raises(SourceError, match="other bytes than the hub announced"):
        checkpoint.fetch()
    # What came of the other file may stay, for the second try.
    garbled = hashlib.sha256(files["model-00002-of-00002.safetensors"]).hexdigest()
    assert [path for path in left(tmp_path) if path.name.startswith(garbled)] == []
    client.mend()
    checkpoint.fetch()
    assert checkpoint.verify(deep=True).ok
