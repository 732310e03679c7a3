"""An S3 on 127.0.0.1: moto's, behind a door that counts what leaves it, at a rate, and fails on demand.

    with S3Server() as s3:
        s3.put("bucket", "model/config.json", b"{}")
        # AWS_ENDPOINT_URL=s3.url, with any keys

moto reads a whole object for each range of it: keep objects below 32 MiB.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["S3Fault", "S3Server"]

_BLOCK_BYTES = 64 << 10


@dataclass
class S3Fault:
    """What goes wrong with requests for a path."""

    pattern: str
    how: str
    times: int | None
    after_bytes: int
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class S3Server:
    """The server, running from `__enter__` to `__exit__`.

    Args:
        bytes_per_s: What it sends in all, at most.
        host: Where it listens.
        bytes_per_s_and_client: What it sends to each address, at most.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        host: str = "127.0.0.1",
        bytes_per_s_and_client: float | None = None,
    ) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self._app = DomainDispatcherApplication(create_backend_app)
        self._rates = bytes_per_s, bytes_per_s_and_client
        self._free_at_s: dict[str, float] = {}
        self._faults: list[S3Fault] = []
        self._lock = threading.Lock()
        self.sent: dict[str, int] = {}
        """Bytes of bodies that were sent, by path."""
        self.requests: list[tuple[str, str]] = []
        """Method and path."""
        self._server = make_server(host, 0, self._serve, threaded=True)
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.mend()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Stores an object; makes the bucket if need be."""
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key=key, Body=data)

    def fail(self, pattern: str, how: str, *, times: int | None = None, after_bytes: int = 0) -> S3Fault:
        """Makes GETs whose path matches fail: a status, `"cut"`, `"hang"` (until released) or `"garble"`."""
        fault = S3Fault(pattern, how, times, after_bytes)
        with self._lock:
            self._faults.append(fault)
        return fault

    def mend(self) -> None:
        """Takes all faults back."""
        with self._lock:
            for fault in self._faults:
                fault.released.set()
            self._faults.clear()

    def forget(self) -> None:
        """Starts counting anew."""
        with self._lock:
            self.sent.clear()
            self.requests.clear()

    def num_bytes(self, pattern: str = "*") -> int:
        """Bytes of bodies that were sent for paths that match."""
        with self._lock:
            return sum(count for path, count in self.sent.items() if fnmatch.fnmatchcase(path, pattern))

    def _fault(self, method: str, path: str) -> S3Fault | None:
        with self._lock:
            for fault in self._faults if method == "GET" else ():
                if fault.times != 0 and fnmatch.fnmatchcase(path, fault.pattern):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path))
        fault = self._fault(method, path)
        if fault is not None and fault.how.isdecimal():
            fault.reached.set()
            body = b"<Error><Code>SlowDown</Code><Message>made to fail</Message></Error>"
            start(f"{fault.how} Made To Fail", [("Content-Length", str(len(body))), ("Retry-After", "1")])
            return [body]
        body = self._app(environ, start)
        if method != "GET":
            return body
        return self._paced(path, environ.get("REMOTE_ADDR", ""), body, fault)

    def _paced(self, path: str, client: str, body: Iterable[bytes], fault: S3Fault | None) -> Iterator[bytes]:
        data, at = b"".join(body), 0
        while at < len(data):
            if fault is not None and at >= fault.after_bytes:
                fault.reached.set()
                if fault.how == "hang":
                    fault.released.wait(120)
                elif fault.how == "cut":
                    raise ConnectionError("cut")
            block = data[at : at + _BLOCK_BYTES]
            if fault is not None and fault.how == "garble":
                block = bytes(byte ^ 0xFF for byte in block)
            self._wait_for_turn("", self._rates[0], len(block))
            self._wait_for_turn(client, self._rates[1], len(block))
            with self._lock:
                self.sent[path] = self.sent.get(path, 0) + len(block)
            at += len(block)
            yield block

    def _wait_for_turn(self, whose: str, rate: float | None, nbytes: int) -> None:
        if rate is None:
            return
        with self._lock:
            now_s = time.monotonic()
            free_s = max(self._free_at_s.get(whose, 0.0), now_s - 0.05) + nbytes / rate
            self._free_at_s[whose] = free_s
        time.sleep(max(0.0, free_s - now_s))
