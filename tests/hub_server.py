"""A hub on 127.0.0.1: real HTTP, speaking what `huggingface_hub` asks of one; counts, and fails on demand.

    with HubServer() as hub:
        hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        # HF_ENDPOINT=hub.url

Large files (`*.safetensors`, `*.bin`, `*.model`) are answered as the hub answers LFS files: by a redirect to
another host with a signed query. Here that is `localhost` instead of `127.0.0.1`, so that it shows how a
client treats other hosts.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

__all__ = ["Fault", "HubServer", "Request"]

SIGNATURE = "s1gnature-of-a-storage-url"
"""In the query of every redirect; no message may show it."""

_LFS = (".safetensors", ".bin", ".model")
_API = re.compile(
    r"^/api/models/(?P<repo>[^/]+(?:/[^/]+)??)"
    r"(?:/(?P<what>revision|tree|paths-info)/(?P<rev>[^/]+)(?:/(?P<path>.+))?)?$"
)
_RESOLVE = re.compile(r"^/(?P<repo>[^/]+(?:/[^/]+)??)/resolve/(?P<rev>[^/]+)/(?P<path>.+)$")
_SPAN = re.compile(r"bytes=(\d+)-(\d*)")
_ORIGIN = re.compile(r"origin/(\S+?)(?:;|$)")
_BLOCK_BYTES = 64 << 10


@dataclass
class Request:
    """One request as it is answered."""

    method: str
    path: str
    """Without its query, unquoted. Redirected downloads are noted as `/cdn/<repository>/<file>`."""
    client: str
    """`HF_HUB_USER_AGENT_ORIGIN` of the client's environment, else its address."""
    authorized: bool
    """Whether a token came with it."""
    range: str | None
    status: int
    num_bytes: int
    """Bytes of the body that were sent so far."""
    size: int = 0
    """Bytes of the whole file that it asked for, or for a part of."""


@dataclass
class Fault:
    """What goes wrong with requests for a path; made by `HubServer.fail`."""

    pattern: str
    how: str
    method: str
    times: int | None
    after_bytes: int
    retry_after_s: int
    of_bytes: int
    cut_when_released: bool = False
    """Whether a hanging request is cut then, instead."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when a request met it; a hang has sent `after_bytes` by then."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set it to let a hanging request go on."""


@dataclass
class _Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=set)
    """Tokens that may read it where it is gated or private."""

    def commit(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class HubServer:
    """The server, running from `__enter__` to `__exit__`."""

    def __init__(self, *, page_size: int = 1000, handler: type[_Handler] | None = None) -> None:
        self._repositories: dict[str, _Repository] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._noted = threading.Condition(self._lock)
        self._page_size = page_size
        self.tokens: set[str] = set()
        """Tokens of users; any other is refused everywhere."""
        self.requests: list[Request] = []

        hub = self

        class Handler(handler or _Handler):  # type: ignore[misc]
            server_hub = hub

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self._faults:
            fault.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        *,
        branch: str = "main",
        gated: bool = False,
        private: bool = False,
        readers: tuple[str, ...] = (),
    ) -> str:
        """A new commit on a branch, of exactly these files; the repository is made if need be.

        Returns:
            The commit.
        """
        repository = self._repositories.setdefault(repo_id, _Repository())
        repository.gated, repository.private = gated, private
        repository.readers |= set(readers)
        self.tokens |= set(readers)
        digest = hashlib.sha1(f"{repo_id}/{branch}/{len(repository.commits)}".encode())
        for name in sorted(files):
            digest.update(name.encode() + b"\0" + files[name])
        repository.commits[digest.hexdigest()] = dict(files)
        repository.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def fail(
        self,
        pattern: str,
        how: str,
        *,
        method: str = "*",
        times: int | None = None,
        after_bytes: int = 0,
        retry_after_s: int = 1,
        of_bytes: int = 0,
    ) -> Fault:
        """Makes requests whose path matches fail.

        Args:
            pattern: `fnmatch` pattern of `Request.path`.
            how: A status (`"500"`; `"429"` with `Retry-After`), `"cut"` (the connection is closed too early),
                `"reset"` (it is reset), `"hang"` (until `released`) or `"garble"` (other bytes of the same
                length).
            method: `"GET"`, `"HEAD"`, or any.
            times: How many requests; all by default.
            after_bytes: Bytes of the body that go out before.
            retry_after_s: For 429.
            of_bytes: Only requests for ranges of at least so many bytes: not those for headers.
        """
        fault = Fault(pattern, how, method, times, after_bytes, retry_after_s, of_bytes)
        with self._lock:
            self._faults.append(fault)
        return fault

    def mend(self) -> None:
        """Takes all faults back."""
        with self._lock:
            for fault in self._faults:
                fault.released.set()
            self._faults.clear()

    def count(self, pattern: str = "*", *, method: str = "*", client: str = "*") -> int:
        """Number of requests whose path, method and client match."""
        return len(list(self._matching(pattern, method, client)))

    def num_bytes(self, pattern: str = "*", *, client: str = "*") -> int:
        """Bytes of bodies that were sent."""
        return sum(request.num_bytes for request in self._matching(pattern, "GET", client))

    def downloads(self) -> Counter[str]:
        """How often all of a file's bytes were sent, in one or several ranges, by `repository/file`."""
        sent: Counter[str] = Counter()
        sizes: dict[str, int] = {}
        for request in self._matching("*", "GET", "*"):
            if request.status not in (200, 206):
                continue
            if request.path.startswith("/cdn/"):
                name = request.path.removeprefix("/cdn/")
            elif match := _RESOLVE.match(request.path):
                name = f"{match['repo']}/{match['path']}"
            else:
                continue
            sent[name] += request.num_bytes
            sizes[name] = request.size
        return Counter({name: sent[name] // sizes[name] for name in sent if sizes[name] <= sent[name] > 0})

    def wait_for(self, num: int, pattern: str, timeout_s: float = 60.0) -> None:
        """Waits until `num` requests for paths that match have come."""
        with self._noted:
            came = self._noted.wait_for(
                lambda: sum(fnmatch.fnmatchcase(r.path, pattern) for r in self.requests) >= num, timeout_s
            )
        assert came, f"fewer than {num} requests for {pattern} in {timeout_s} s"

    def clients(self, pattern: str) -> set[str]:
        """Who has asked for paths that match."""
        return {request.client for request in self._matching(pattern, "*", "*")}

    def forget(self) -> None:
        """Starts counting anew."""
        with self._lock:
            self.requests.clear()

    def _matching(self, pattern: str, method: str, client: str) -> Iterator[Request]:
        with self._lock:
            requests = list(self.requests)
        for request in requests:
            if (
                fnmatch.fnmatchcase(request.path, pattern)
                and fnmatch.fnmatchcase(request.method, method)
                and fnmatch.fnmatchcase(request.client, client)
            ):
                yield request

    def _fault(self, method: str, path: str, asked: str | None) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and fnmatch.fnmatchcase(path, fault.pattern):
                    if fault.method not in ("*", method) or _asked_bytes(asked) < fault.of_bytes:
                        continue
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None


def _asked_bytes(asked: str | None) -> float:
    """Bytes of a range; all that there are without one."""
    match = _SPAN.fullmatch(asked or "")
    return int(match[2]) + 1 - int(match[1]) if match and match[2] else float("inf")


@dataclass
class _Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = False


def _refusal(status: int, code: str | None, text: str) -> _Answer:
    headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
    return _json({"error": text}, status, headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> _Answer:
    return _Answer(
        status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def _etag(name: str, data: bytes) -> str:
    if name.endswith(_LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _etag(name, data)}
    if name.endswith(_LFS):
        entry["lfs"] = {"oid": _etag(name, data), "size": len(data), "pointerSize": 134}
        entry["oid"] = hashlib.sha1(data).hexdigest()
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self._query = parse_qs(url.query)
        self._token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = unquote(url.path)
        fault = self.server_hub._fault(self.command, path, self.headers.get("Range"))
        if fault is not None and fault.how.isdecimal():
            fault.reached.set()
            answer = _refusal(int(fault.how), None, "made to fail")
            if fault.how == "429":
                answer.headers["Retry-After"] = str(fault.retry_after_s)
            self._send(path, answer, None)
            return
        self._send(path, self._answer(url.path), fault)

    def _answer(self, path: str) -> _Answer:
        if path.startswith("/cdn/"):
            return self._stored(path)
        if self._token is not None and self._token not in self.server_hub.tokens:
            return _refusal(401, None, "Invalid credentials in Authorization header")
        match = _API.match(path) or _RESOLVE.match(path)
        if match is None:
            return _refusal(404, None, f"nothing at {path}")
        repo_id = unquote(match["repo"])
        repository = self.server_hub._repositories.get(repo_id)
        may_read = repository is not None and self._token in repository.readers
        if repository is None or (repository.private and not may_read):
            # The hub doesn't tell strangers which repositories there are.
            return _refusal(401 if self._token is None else 404, "RepoNotFound", "Repository not found")
        revision = unquote(match["rev"] or "main")
        commit = repository.commit(revision)
        if commit is None:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if match.re is _API:
            return self._api(match, repo_id, repository, commit)
        if repository.gated and not may_read:
            return _refusal(
                401 if self._token is None else 403, "GatedRepo", f"Access to {repo_id} is restricted"
            )
        return self._resolved(unquote(match["path"]), repo_id, repository, commit)

    def _api(self, match: re.Match[str], repo_id: str, repository: _Repository, commit: str) -> _Answer:
        files = repository.commits[commit]
        if match["what"] == "tree":
            return self._tree(match["path"], files)
        if match["what"] == "paths-info":
            asked = parse_qs(self._body.decode())
            if self._body.startswith(b"{"):
                asked = json.loads(self._body)
            return _json([_entry(name, files[name]) for name in asked.get("paths", []) if name in files])
        siblings = [{"rfilename": name} for name in sorted(files)]
        if "blobs" in self._query:
            for sibling in siblings:
                entry = _entry(sibling["rfilename"], files[sibling["rfilename"]])
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {"sha256": entry["lfs"]["oid"], **entry["lfs"]}
        return _json(
            {
                "_id": "1",
                "id": repo_id,
                "modelId": repo_id,
                "sha": commit,
                "siblings": siblings,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
            }
        )

    def _tree(self, folder: str | None, files: dict[str, bytes]) -> _Answer:
        prefix = f"{unquote(folder)}/" if folder else ""
        inside = [name for name in sorted(files) if name.startswith(prefix)]
        folders = sorted(
            {
                prefix + "/".join(parts[:depth])
                for parts in (name.removeprefix(prefix).split("/") for name in inside)
                for depth in range(1, len(parts))
            }
        )
        entries = [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders]
        entries += [_entry(name, files[name]) for name in inside]
        if self._query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(prefix)]
        first = int(self._query.get("cursor", ["0"])[0])
        last = first + self.server_hub._page_size
        answer = _json(entries[first:last])
        if last < len(entries):
            kept = "&".join(f"{k}={quote(v[0])}" for k, v in self._query.items() if k != "cursor")
            path = urlsplit(self.path).path
            answer.headers["Link"] = f'<{self.server_hub.url}{path}?{kept}&cursor={last}>; rel="next"'
        return answer

    def _resolved(self, name: str, repo_id: str, repository: _Repository, commit: str) -> _Answer:
        data = repository.commits[commit].get(name)
        headers = {"X-Repo-Commit": commit}
        if data is None:
            answer = _refusal(404, "EntryNotFound", "Entry not found")
            answer.headers |= headers
            return answer
        etag = f'"{_etag(name, data)}"'
        if not name.endswith(_LFS):
            return _Answer(200, data, {**headers, "ETag": etag}, ranges=True)
        headers |= {"X-Linked-ETag": etag, "X-Linked-Size": str(len(data))}
        path = quote(f"/cdn/{repo_id}/{name}")
        host = f"http://localhost:{self.server_hub.port}"
        headers["Location"] = f"{host}{path}?commit={commit}&repo={quote(repo_id)}&Signature={SIGNATURE}"
        return _Answer(302, b"", headers)

    def _stored(self, path: str) -> _Answer:
        """What the storage behind a redirect gives: to whoever has the signature, and to no token."""
        if self._query.get("Signature") != [SIGNATURE]:
            return _refusal(403, None, "not signed")
        repo_id = self._query["repo"][0]
        name = unquote(path).removeprefix(f"/cdn/{repo_id}/")
        data = self.server_hub._repositories[repo_id].commits[self._query["commit"][0]][name]
        return _Answer(200, data, {"ETag": f'"{_etag(name, data)}"'}, ranges=True)

    def _send(self, path: str, answer: _Answer, fault: Fault | None) -> None:
        asked = self.headers.get("Range")
        body = answer.body
        if answer.ranges:
            answer.headers["Accept-Ranges"] = "bytes"
            match = _SPAN.fullmatch(asked or "")
            if match:
                start, end = int(match[1]), min(int(match[2] or len(body)), len(body) - 1) + 1
                if start >= len(body):
                    answer.status, answer.headers["Content-Range"], body = 416, f"bytes */{len(body)}", b""
                else:
                    answer.status = 206
                    answer.headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
                    body = body[start:end]
        if fault is not None and fault.how == "garble":
            fault.reached.set()
            body = bytes(byte ^ 0x55 for byte in body)
        # Before the client can have seen any of it, so that whoever waits for the client counts right.
        self._request = self._note(path, asked, answer.status, len(answer.body))
        try:
            self._transmit(answer, body, fault)
        except OSError:
            # The client went away.
            self.close_connection = True

    def _transmit(self, answer: _Answer, body: bytes, fault: Fault | None) -> None:
        if fault is None or fault.how == "garble":
            self._head(answer, len(body))
            self._write(body)
            return
        if fault.after_bytes and self.command != "HEAD":
            self._head(answer, len(body))
            self._write(body[: fault.after_bytes])
            self._break_off(fault)
        else:
            self._break_off(fault)
            self._head(answer, len(body))
        self._write(body[fault.after_bytes :])

    def _write(self, body: bytes) -> None:
        if self.command == "HEAD":
            return
        for start in range(0, len(body), _BLOCK_BYTES):
            block = body[start : start + _BLOCK_BYTES]
            self._request.num_bytes += len(block)
            self.wfile.write(block)
        self.wfile.flush()

    def _break_off(self, fault: Fault) -> None:
        """Ends the connection, or waits until the fault is taken back."""
        fault.reached.set()
        if fault.how == "hang":
            fault.released.wait()
            if not fault.cut_when_released:
                return
        if fault.how == "reset":
            # What closing does then, instead of ending in order.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        raise ConnectionAbortedError

    def _head(self, answer: _Answer, length: int) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _note(self, path: str, asked: str | None, status: int, size: int) -> Request:
        origin = _ORIGIN.search(self.headers.get("User-Agent") or "")
        request = Request(
            self.command,
            path,
            origin[1] if origin else self.client_address[0],
            self._token is not None,
            asked,
            status,
            0,
            size,
        )
        with self.server_hub._lock:
            self.server_hub.requests.append(request)
            self.server_hub._noted.notify_all()
        return request
