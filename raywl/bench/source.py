"""A web server that gives ranges of a folder's files at a rate, and counts: `python -m raywl.bench.source`.

Arguments: folder, address to listen at, bytes per second in all, and to each client (0: no limit).
Standard output: one line with the URL, then, for each line on standard input, one with the bytes that were
sent since the last one; `rates A B` sets the rates anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import threading
import time
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

__all__ = ["main"]

_RANGE = re.compile(r"bytes=(\d+)-(\d*)$")
_BLOCK_BYTES = 32 << 10
_BURST_S = 0.02


class _Pace:
    """Rates for all clients together and for each, and a count of what was sent."""

    def __init__(self) -> None:
        self.rates = (0.0, 0.0)
        self.sent_bytes = 0
        self._free_at_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def wait(self, client: str, nbytes: int) -> None:
        """Until these bytes may go."""
        with self._lock:
            self.sent_bytes += nbytes
            until_s = now_s = time.monotonic()
            for whose, rate in (("", self.rates[0]), (client, self.rates[1])):
                if rate:
                    free_s = max(self._free_at_s.get(whose, 0.0), now_s - _BURST_S) + nbytes / rate
                    self._free_at_s[whose] = free_s
                    until_s = max(until_s, free_s)
        if until_s > now_s:
            time.sleep(until_s - now_s)

    def take(self) -> int:
        """The bytes since the last call."""
        with self._lock:
            sent, self.sent_bytes = self.sent_bytes, 0
            return sent


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: str, pace: _Pace, *rest: object) -> None:
        self._folder, self._pace = folder, pace
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = unquote(urlsplit(self.path).path).strip("/")
        path = os.path.join(self._folder, os.path.basename(name))
        if not name:
            rows = "".join(
                f'<a href="{quote(n)}">{escape(n)}</a>\n' for n in sorted(os.listdir(self._folder))
            )
            self._send(200, rows.encode(), {"Content-Type": "text/html"}, body)
        elif not os.path.isfile(path):
            self._send(404, b"", {}, body)
        else:
            self._file(path, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, path: str, body: bool) -> None:
        info = os.stat(path)
        found = _RANGE.match(self.headers.get("Range") or "")
        start, end = 0, info.st_size
        if found:
            start, end = int(found[1]), min(end, int(found[2]) + 1 if found[2] else end)
        tag = hashlib.md5(f"{path} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()
        self.send_response(206 if found else 200)
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{tag}"', "Content-Length": str(end - start)}
        if found:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.st_size}"
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        with open(path, "rb", buffering=0) as file:
            while start < end:
                block = os.pread(file.fileno(), min(_BLOCK_BYTES, end - start), start)
                self._pace.wait(self.client_address[0], len(block))
                self.wfile.write(block)
                start += len(block)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        # A client that went away in the middle.
        pass


def main() -> None:
    """Serves until standard input ends."""
    folder, address, in_all, to_each = sys.argv[1:]
    pace = _Pace()
    pace.rates = float(in_all), float(to_each)
    server = _Server((address, 0), functools.partial(_Handler, folder, pace))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"url": f"http://{address}:{server.server_port}"}), flush=True)
    for line in sys.stdin:
        word, *rates = line.split()
        if word == "rates":
            pace.rates = float(rates[0]), float(rates[1])
        print(json.dumps({"sent_bytes": pace.take()}), flush=True)


if __name__ == "__main__":
    main()
