"""Addresses: which Ray is used, and every way of there being none, within a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

import raywl
from raywl.actors import connect as connecting
from raywl.actors.connect import connect
from raywl.actors.deadline import Deadline
from raywl.errors import ClusterError
from tests.cluster.parts import Model


def try_to_connect(address: str | None, timeout_s: float = 30.0) -> connecting.Connection:
    return connect(address, num_cpus=1, deadline=Deadline(timeout_s, "launch"))


@contextlib.contextmanager
def listening(answer: bytes | None):
    """A server that isn't Ray: it says `answer`, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    if answer is not None:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for connection in kept:
            connection.close()


def test_a_closed_port(checkpoint):
    """At once, by name; and nothing was started."""
    import ray

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start_s = time.monotonic()
    with pytest.raises(ClusterError, match=rf"no Ray cluster at 127\.0\.0\.1:{port}: Connection refused"):
        raywl.launch(checkpoint, Model, address=f"127.0.0.1:{port}")
    assert time.monotonic() - start_s < 10
    assert not ray.is_initialized()


def test_an_address_from_the_environment(monkeypatch, checkpoint):
    """`RAY_ADDRESS` counts where none is given."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1"):
        raywl.launch(checkpoint, Model)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", None])
def test_something_else_listens(answer, monkeypatch):
    """Not Ray: an HTTP server, a shell, or a server that never says anything."""
    monkeypatch.setattr(connecting, "_TRY_S", 1.0)
    with listening(answer) as address, pytest.raises(ClusterError, match="no Ray cluster at"):
        try_to_connect(address)


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:10001", "nonsense", "127.0.0.1", "http://127.0.0.1:8265"]
)
def test_what_is_no_address(address):
    """Ray Client and words that aren't host:port."""
    with pytest.raises(ClusterError, match="host:port"):
        try_to_connect(address)


def test_ray_client_from_the_environment(monkeypatch):
    """Also where the address comes from `RAY_ADDRESS`."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ClusterError, match="Ray Client"):
        try_to_connect(None)


def test_an_unknown_host():
    """The resolver's own words are kept."""
    with pytest.raises(ClusterError, match=r"no Ray cluster at host\.invalid:6379"):
        try_to_connect("host.invalid:6379")


def test_a_cluster_is_joined_and_then_used(cluster):
    """First by its address, then as what is initialised already, by any of its names."""
    import ray

    try:
        joined = try_to_connect(cluster.address)
        assert (joined.address, joined.started) == (cluster.address, False)
        for address in (None, cluster.address, "auto"):
            assert not try_to_connect(address).started
        with pytest.raises(ClusterError, match="already"):
            try_to_connect("10.255.255.1:6379")
    finally:
        ray.shutdown()


WRONG_TOKEN = """
import sys
import raywl
try:
    raywl.launch("/nowhere", print, address=sys.argv[1])
except raywl.errors.ClusterError as error:
    print(error)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ray._private.authentication") is None, reason="this Ray knows no tokens"
)
def test_a_cluster_that_wants_a_token(cluster):
    """The message says what to set."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    ended = subprocess.run(
        [sys.executable, "-c", WRONG_TOKEN, cluster.address],
        # Fewer of Ray's tries, a second each: they all end the same.
        env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stderr
    assert "can't be joined" in ended.stdout
    assert "RAY_AUTH_TOKEN_PATH" in ended.stdout
