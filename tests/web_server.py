"""A plain web server on 127.0.0.1, with ranges and ETags or without, that counts and fails on demand.

with WebServer() as web:
    web.files["m/model.safetensors"] = weights
    # f"{web.url}/m"
"""

from __future__ import annotations

import hashlib
import html
from urllib.parse import quote, unquote

from tests.hub_server import HubServer, _Answer, _Handler, _refusal

__all__ = ["WebServer"]


class _WebHandler(_Handler):
    server_hub: WebServer

    def _answer(self, path: str) -> _Answer:
        web = self.server_hub
        name = unquote(path).removeprefix("/")
        if web.password and self.headers.get("Authorization") != web.password:
            return _refusal(401, None, "who are you?")
        if name.endswith("/") and web.has_listings:
            inside = sorted({n.removeprefix(name).partition("/")[0] for n in web.files if n.startswith(name)})
            rows = [f'<li><a href="{html.escape(quote(n))}">{html.escape(n)}</a></li>' for n in inside]
            page = f"<html><a href='../'>up</a><a href=/else>x</a>{''.join(rows)}</html>"
            return _Answer(
                200 if inside else 404, page.encode(), {"Content-Type": "text/html; charset=utf-8"}
            )
        data = web.files.get(name)
        if data is None:
            return _refusal(404, None, "nothing there")
        headers = {"Content-Type": web.content_type}
        if web.has_etags:
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if self.headers.get("If-Match") not in (None, headers["ETag"]):
                return _refusal(412, None, "another file")
        if web.has_dates:
            headers["Last-Modified"] = "Mon, 01 Jan 2024 00:00:00 GMT"
        return _Answer(200, data, headers, ranges=web.has_ranges)


class WebServer(HubServer):
    """The server, running from `__enter__` to `__exit__`; see `HubServer` for counting and failing."""

    def __init__(self) -> None:
        super().__init__(handler=_WebHandler)
        self.files: dict[str, bytes] = {}
        """By path; what is put here is served from then on."""
        self.has_ranges = True
        self.has_etags = True
        self.has_dates = False
        self.has_listings = True
        self.content_type = "application/octet-stream"
        self.password: str | None = None
        """The `Authorization` header that is wanted."""
