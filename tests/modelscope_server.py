"""ModelScope on 127.0.0.1: real HTTP, speaking what its client asks; counts, and fails on demand.

    with ModelScopeServer() as server:
        server.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        # MODELSCOPE_ENDPOINT=server.url

What is counted and fails goes by these paths: `/api/v1/models/<repository>/repo/files` for listings,
`/api/v1/models/<repository>/file/<name>` for a file, and `/cdn/<repository>/<name>` for the bytes of a large
one, which come from another host by a signed URL.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.hub_server import SIGNATURE, HubServer, _Answer, _etag, _Handler, _json

__all__ = ["ModelScopeServer"]

_API = re.compile(
    r"^/api/v1/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>repo/files|revisions|file/(?P<path>.+)))?$"
)
_LFS = (".safetensors", ".bin", ".model")
_STARTED_S = 1_750_000_000


class ModelScopeServer(HubServer):
    """The server, running from `__enter__` to `__exit__`."""

    def __init__(self, *, resolves_commits: bool = True) -> None:
        """
        Args:
            resolves_commits: Whether a commit is a revision that may be asked for.
        """
        super().__init__()
        self.resolves_commits = resolves_commits

        class Handler(_ModelScopeHandler):
            server_hub = self

        self._server.RequestHandlerClass = Handler

    def add(self, repo_id: str, files: dict[str, bytes], *, branch: str = "master", **options: Any) -> str:
        return super().add(repo_id, files, branch=branch, **options)

    def downloads(self) -> Counter[str]:
        """How often each file's bytes were asked for, by `repository/file`."""
        found: Counter[str] = Counter()
        for request in self._matching("*", "GET", "*"):
            match = _API.match(request.path)
            if request.status in (200, 206) and request.path.startswith("/cdn/"):
                found[request.path.removeprefix("/cdn/")] += 1
            elif request.status in (200, 206) and match is not None and match["path"]:
                found[f"{match['repo']}/{match['path']}"] += 1
        return found

    def listings(self) -> int:
        """How often the files of a repository were listed."""
        return self.count("/api/v1/models/*/repo/files", method="GET")


def _refusal(status: int, code: int, text: str) -> _Answer:
    return _json({"Code": code, "Message": text, "Success": False, "RequestId": "1"}, status)


def _said(data: Any) -> _Answer:
    return _json({"Code": 200, "Data": data, "Message": "success", "Success": True, "RequestId": "1"})


class _ModelScopeHandler(_Handler):
    server_hub: ModelScopeServer

    def _handle(self) -> None:
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        if url.path.endswith("/repo") and "FilePath" in asked:
            # So that requests for files can be told apart by path.
            folder = url.path.removesuffix("/repo")
            self.path = f"{folder}/file/{quote(asked['FilePath'][0])}?{url.query}"
        super()._handle()

    def _answer(self, path: str) -> _Answer:
        if path.startswith("/cdn/"):
            return self._stored(path)
        if path == "/api/v1/repos/internalAccelerationInfo":
            return _said({"InternalRegionQueryAddress": ""})
        match = _API.match(path)
        if match is None:
            return _refusal(404, 404, f"nothing at {path}")
        if self._token is not None and self._token not in self.server_hub.tokens:
            return _refusal(401, 10010103001, "token is invalid")
        repo_id = unquote(match["repo"])
        repository = self.server_hub._repositories.get(repo_id)
        if repository is None or (repository.private and self._token not in repository.readers):
            return _refusal(404, 10010205001, f"model {repo_id} not found")
        if repository.gated and self._token not in repository.readers:
            return _refusal(403, 10010303003, f"access to {repo_id} is restricted")
        if match["what"] is None:
            return _said({"Name": repo_id.partition("/")[2], "Path": repo_id.partition("/")[0]})
        if match["what"] == "revisions":
            branches = [{"Revision": name, "CreatedAt": _STARTED_S} for name in repository.refs]
            return _said({"RevisionMap": {"Branches": branches, "Tags": []}})
        revision = self._query.get("Revision", ["master"])[0]
        commit = repository.commit(revision)
        if commit is None or (revision == commit and not self.server_hub.resolves_commits):
            return _refusal(404, 10010205002, f"revision {revision} not found")
        if match["what"] == "repo/files":
            return _said(self._listing(list(repository.commits.items()), commit))
        return self._file(unquote(match["path"]), repo_id, repository.commits[commit], commit)

    def _listing(self, commits: list[tuple[str, dict[str, bytes]]], commit: str) -> dict[str, Any]:
        files = dict(commits)[commit]
        root = self._query.get("Root", [""])[0].strip("/")
        prefix = f"{root}/" if root else ""
        names = [name for name in sorted(files) if name.startswith(prefix)]
        folders = {
            "/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)
        }
        entries = [{"Path": name, "Name": name, "Type": "tree", "Size": 0} for name in sorted(folders)]
        for name in names:
            since, number = self._last_change(commits, commit, name)
            entries.append(
                {
                    "Path": name,
                    "Name": name.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(files[name]),
                    "Sha256": _etag("x.bin", files[name]),
                    "IsLFS": name.endswith(_LFS),
                    "Revision": since,
                    "CommittedDate": _STARTED_S + number,
                }
            )
        if self._query.get("Recursive", ["False"])[0].lower() != "true":
            entries = [entry for entry in entries if "/" not in entry["Path"].removeprefix(prefix)]
        # The full commit is not among what the real one says of the last one.
        return {"Files": entries, "IsVisual": 0, "LatestCommitter": {"Id": "", "ShortId": commit[:8]}}

    def _last_change(
        self, commits: list[tuple[str, dict[str, bytes]]], commit: str, name: str
    ) -> tuple[str, int]:
        """The commit since which a file is what it is, going by the order in which they were added."""
        end = [key for key, _ in commits].index(commit)
        first = end
        while first > 0 and commits[first - 1][1].get(name) == commits[end][1][name]:
            first -= 1
        return commits[first][0], first

    def _file(self, name: str, repo_id: str, files: dict[str, bytes], commit: str) -> _Answer:
        if name not in files:
            return _refusal(404, 10010205003, f"file {name} not found")
        data = files[name]
        if not name.endswith(_LFS):
            return _Answer(200, data, {"ETag": f'"{_etag(name, data)}"'}, ranges=True)
        path = quote(f"/cdn/{repo_id}/{name}")
        host = f"http://localhost:{self.server_hub.port}"
        target = f"{host}{path}?commit={commit}&repo={quote(repo_id)}&Signature={SIGNATURE}"
        return _Answer(302, b"", {"Location": target, "X-Linked-ETag": f'"{_etag(name, data)}"'})
