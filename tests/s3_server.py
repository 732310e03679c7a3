"""An S3 on 127.0.0.1: moto's, over real HTTP, that counts requests and fails on demand.

moto reads all of an object for each range of it: keep them small.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

__all__ = ["KEY", "SECRET", "S3Server"]

KEY = "AKIDEXAMPLE"
SECRET = "s3cr3t-acc3ss-k3y"
_BLOCK_BYTES = 64 << 10


@dataclass
class Request:
    """One request as it is answered."""

    method: str
    path: str
    """`/bucket/key`, unquoted."""
    query: str
    range: str | None
    status: int = 0
    num_bytes: int = 0
    """Bytes of the body that were sent so far."""


@dataclass
class Fault:
    """What goes wrong; made by `S3Server.fail`."""

    pattern: str
    how: str
    times: int | None
    after_bytes: int
    of_bytes: int
    retry_after_s: int
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class S3Server:
    """The server, running from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.options = {"key": KEY, "secret": SECRET, "endpoint_url": self.url}
        """fsspec's storage options for it."""
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._noted = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> S3Server:
        import boto3

        self._thread.start()
        self.client: Any = boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        from moto.s3.models import s3_backends

        self.mend()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        # What moto keeps belongs to the process: the next server would have it, too.
        for backends in s3_backends.values():
            backends.reset()

    def add(self, bucket: str, files: dict[str, bytes], prefix: str = "m/") -> str:
        """Puts objects into a bucket, which is made if need be; returns the URL of the prefix."""
        self.client.create_bucket(Bucket=bucket)
        for name, data in files.items():
            self.client.put_object(Bucket=bucket, Key=prefix + name, Body=data)
        self.forget()
        return f"s3://{bucket}/{prefix}".rstrip("/")

    def add_empty(self, bucket: str, keys: Iterable[str]) -> None:
        """Makes many objects without content, past HTTP."""
        from moto.s3.models import s3_backends

        backend = s3_backends["123456789012"]["aws"]
        for key in keys:
            backend.put_object(bucket, key, b"")

    def fail(
        self,
        pattern: str,
        how: str,
        *,
        times: int | None = None,
        after_bytes: int = 0,
        of_bytes: int = 0,
        retry_after_s: int = 0,
    ) -> Fault:
        """Makes reads whose `/bucket/key` matches fail.

        Args:
            pattern: `fnmatch` pattern.
            how: `"500"`, `"503"` (with `Retry-After`), a status with an S3 error code (`"403 AccessDenied"`),
                `"cut"`, `"hang"` or `"garble"`.
            times: How many; all by default.
            after_bytes: Bytes of the body that go out before.
            of_bytes: Only ranges of at least so many bytes.
            retry_after_s: For 503.
        """
        fault = Fault(pattern, how, times, after_bytes, of_bytes, retry_after_s)
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
            self.requests.clear()

    def reads(self, pattern: str = "*") -> list[Request]:
        """Reads of objects whose `/bucket/key` matches."""
        with self._lock:
            return [
                r for r in self.requests
                if r.method == "GET" and "list-type" not in r.query and fnmatch.fnmatchcase(r.path, pattern)
            ]  # fmt: skip

    def num_bytes(self, pattern: str = "*") -> int:
        """Bytes of objects that were sent."""
        return sum(request.num_bytes for request in self.reads(pattern))

    def wait_for(self, num: int, pattern: str, timeout_s: float = 60.0) -> None:
        """Waits until `num` reads of objects that match have come."""
        with self._noted:
            came = self._noted.wait_for(
                lambda: sum(fnmatch.fnmatchcase(r.path, pattern) for r in self.requests) >= num, timeout_s
            )
        assert came, f"fewer than {num} requests for {pattern} in {timeout_s} s"

    def _fault(self, request: Request) -> Fault | None:
        if request.method != "GET":
            return None
        asked = float("inf")
        if request.range:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            asked = int(last) + 1 - int(first)
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and fnmatch.fnmatchcase(request.path, fault.pattern):
                    if asked < fault.of_bytes:
                        continue
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = unquote(environ["PATH_INFO"].encode("latin-1").decode())
        request = Request(
            environ["REQUEST_METHOD"], path, environ.get("QUERY_STRING", ""), environ.get("HTTP_RANGE")
        )
        fault = self._fault(request)
        if fault is not None and fault.how[0].isdigit():
            fault.reached.set()
            status, _, code = fault.how.partition(" ")
            code = code or "InternalError"
            body = f"<Error><Code>{code}</Code><Message>made to fail</Message></Error>".encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            if fault.retry_after_s:
                headers.append(("Retry-After", str(fault.retry_after_s)))
            self._note(request, int(status))
            start_response(f"{status} made to fail", headers)
            return [body]

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            self._note(request, int(status.split()[0]))
            return start_response(status, headers, *rest)

        return self._body(self._app(environ, start), request, fault)

    def _note(self, request: Request, status: int) -> None:
        request.status = status
        with self._noted:
            self.requests.append(request)
            self._noted.notify_all()

    def _body(self, chunks: Iterable[bytes], request: Request, fault: Fault | None) -> Iterator[bytes]:
        body = b"".join(chunks)
        if fault is not None and fault.how == "garble":
            body = bytes(byte ^ 0x55 for byte in body)
        end = len(body) if fault is None or fault.how == "garble" else min(fault.after_bytes, len(body))
        yield from self._blocks(body[:end], request)
        if end < len(body):
            assert fault is not None
            fault.reached.set()
            if fault.how == "cut":
                raise ConnectionAbortedError("made to fail")
            fault.released.wait()
            yield from self._blocks(body[end:], request)

    def _blocks(self, body: bytes, request: Request) -> Iterator[bytes]:
        for start in range(0, len(body), _BLOCK_BYTES):
            block = body[start : start + _BLOCK_BYTES]
            request.num_bytes += len(block)
            yield block
