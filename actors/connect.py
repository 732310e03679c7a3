"""Which Ray to use, and getting there without ever waiting for long."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

import ray

from raywl.actors.deadline import Deadline
from raywl.errors import ClusterError

__all__ = ["Connection", "connect", "disconnect", "is_connected"]

_TRY_S = 10.0
_JOIN_S = 60.0
# The opening words of HTTP/2 and an empty SETTINGS frame; a gRPC server answers with its own SETTINGS.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4

_CLIENT = (
    "Ray Client (ray://) can't be used: its driver is outside the cluster, where neither the ranks' nodes "
    "nor their memory are. Run the driver on a node of the cluster, and give its address as host:port "
    "(usually port 6379), or 'auto'"
)
_AUTHENTICATE = (
    "The cluster probably wants a token, which this process lacks or has another of. Set RAY_AUTH_MODE=token "
    "and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token on every process that joins it "
    "(`ray get-auth-token` prints it on the head node, where it is usually in ~/.ray/auth_token)"
)


@dataclass(frozen=True, slots=True)
class Connection:
    """How this process came to its Ray."""

    address: str
    """Of the cluster."""
    started: bool
    """raywl started the cluster itself, and so ends it."""
    note: str
    """What was chosen, and why."""


class _Own:
    """The local cluster that raywl started in this process: it lasts as long as one of its groups."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.address: str | None = None
        self.num_users = 0

    def use(self, address: str) -> None:
        with self.lock:
            self.num_users = self.num_users + 1 if self.address == address else 1
            self.address = address

    def leave(self, address: str) -> bool:
        """Whether the last user has left."""
        with self.lock:
            if self.address != address:
                return False
            self.num_users -= 1
            if self.num_users == 0:
                self.address = None
            return self.num_users == 0


_own = _Own()


def connect(address: str | None, *, num_cpus: float, deadline: Deadline) -> Connection:
    """Connects this process to a cluster.

    Args:
        address: `None` for the Ray that is initialised already, else `RAY_ADDRESS`, else a local one;
            `host:port`, `"auto"` or `"local"` otherwise.
        num_cpus: CPUs that a cluster of our own must have; it gets no fewer than the machine has.
        deadline: Bounds it.

    Raises:
        ClusterError: There is no cluster at the address, it refuses us, it is reached by Ray Client, or
            this process is connected to another one.
    """
    if (address or "").startswith("ray://") or _is_client():
        raise ClusterError(_CLIENT)
    if ray.is_initialized():
        return _use_initialised(address)
    chosen, why = (
        (address, "the given address") if address else (os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    )
    if chosen and chosen.startswith("ray://"):
        raise ClusterError(f"RAY_ADDRESS={chosen}: {_CLIENT}")
    if not chosen or chosen == "local":
        return _start_local(num_cpus)
    target = _look_up() if chosen == "auto" else chosen
    _knock(target, deadline.remaining_s(_TRY_S))
    _join(target, deadline.remaining_s(_JOIN_S))
    return Connection(_joined(), False, f"joined the Ray cluster at {target} ({why})")


def is_connected(connection: Connection) -> bool:
    """Whether this process is still on that cluster: the user may have left it, and joined another."""
    return bool(ray.is_initialized()) and _joined() == connection.address


def disconnect(connection: Connection) -> None:
    """Ends a cluster that raywl started, when no group of this process uses it any more."""
    if connection.started and _own.leave(connection.address) and is_connected(connection):
        ray.shutdown()


def _joined() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _use_initialised(address: str | None) -> Connection:
    own = _joined()
    if address not in (None, "auto") and _same(str(address), own) is False:
        raise ClusterError(
            f"this process is connected to the Ray cluster at {own} already, not to {address}: call "
            f"ray.shutdown() first, or leave the address out"
        )
    started = own == _own.address
    if started:
        _own.use(own)
    return Connection(own, started, f"used the Ray at {own} that was initialised already")


def _same(address: str, own: str) -> bool:
    if address == own:
        return True
    host, _, port = address.rpartition(":")
    own_host, _, own_port = own.rpartition(":")
    with contextlib.suppress(OSError):
        return port == own_port and socket.gethostbyname(host) in (
            socket.gethostbyname(own_host),
            "127.0.0.1",
        )
    return False


def _is_client() -> bool:
    try:
        from ray.util.client import ray as client

        return bool(client.is_connected())
    except ImportError:
        return False


def _start_local(num_cpus: float) -> Connection:
    cpus = max(os.cpu_count() or 1, int(-(-num_cpus // 1)))
    # In the calling thread: Ray's processes end with the thread that started them.
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    except (Exception, SystemExit) as error:
        raise ClusterError(f"a local Ray cluster can't be started: {_told(error)}") from error
    own = _joined()
    _own.use(own)
    return Connection(own, True, f"started a local Ray cluster with {cpus} CPUs")


def _look_up() -> str:
    """The address that Ray itself would find by `"auto"`; looked up beforehand, so that it can be tried."""
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address_or_die("auto"))
    except (Exception, SystemExit) as error:
        raise ClusterError(f"no Ray cluster runs on this machine: {_told(error)}") from error


def _knock(address: str, timeout_s: float) -> None:
    """Tries the port, since `ray.init` waits there for minutes and ends in `SystemExit`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise ClusterError(
            f"{address!r} is no address of a Ray cluster: it must be host:port, 'auto' or 'local'"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("1", "true"):
                return
            connection.settimeout(timeout_s)
            connection.sendall(_HTTP2_HELLO)
            answer = b""
            while len(answer) < 9 and (piece := connection.recv(64)):
                answer += piece
    except TimeoutError as error:
        raise ClusterError(f"no Ray cluster at {address}: no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {error.strerror or error}") from error
    if len(answer) < 9 or answer[3] != _HTTP2_SETTINGS:
        raise ClusterError(f"no Ray cluster at {address}: something else listens there")


def _join(address: str, timeout_s: float) -> None:
    # In a thread, since only that bounds the wait; joining starts no processes, which would end with it.
    failed: list[BaseException] = []

    def init() -> None:
        quiet = logging.getLogger("ray._private.worker")
        try:
            quiet.addFilter(_no_signal_warning)
            ray.init(address=address, logging_level=logging.WARNING)
        except BaseException as error:
            failed.append(error)
        finally:
            quiet.removeFilter(_no_signal_warning)

    thread = threading.Thread(target=init, name="raywl-ray-init", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ClusterError(
            f"the Ray cluster at {address} did not let this process join within {timeout_s:g} s"
        )
    if failed:
        error = failed[0]
        advice = f". {_AUTHENTICATE}" if _is_authentication(error) else ""
        raise ClusterError(f"the Ray cluster at {address} can't be joined: {_told(error)}{advice}") from error


def _no_signal_warning(record: logging.LogRecord) -> bool:
    return "SIGTERM handler" not in record.getMessage()


def _is_authentication(error: BaseException | None) -> bool:
    # Ray says it by class, by text, or (joining) by a plain ConnectionError after the port was found open.
    kinds: tuple[Any, ...] = (ConnectionError,)
    known = getattr(ray.exceptions, "AuthenticationError", None)
    if known is not None:
        kinds += (known,)
    while error is not None:
        if isinstance(error, kinds) or "auth" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
