"""S3 and the stores that speak like it, through s3fs."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from raywl.errors import NotFoundError, SourceError
from raywl.sources.base import RemoteFile
from raywl.sources.remote import FsspecRemote, LoopCalls, Probe, changed_error
from raywl.sources.store_errors import StoreWords
from raywl.sources.transfer import Interrupted, Limits, again

__all__ = ["S3Remote"]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?$')
_CONNECTIONS = 64
_CHANGED = {"PreconditionFailed", "412"}
_CHECKSUMS = {"ChecksumSHA256": "sha256", "ChecksumSHA1": "sha1", "ChecksumCRC32": "crc32"}


class S3Remote(FsspecRemote):
    """A folder of a bucket. Reads are conditional on the ETag that was listed."""

    def __init__(
        self, protocol: str, path: str, options: Mapping[str, Any], limits: Limits, words: StoreWords
    ) -> None:
        # Tries, pauses and Retry-After are raywl's own business: the client would multiply them.
        config = {
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
            "read_timeout": max(limits.stall_s, 1.0),
            **(options.get("config_kwargs") or {}),
        }
        super().__init__(protocol, path, {**options, "config_kwargs": config}, limits, words)
        self._fs.retries = 1
        self._bucket, _, self._prefix = self._path.partition("/")
        self._calls = LoopCalls(self._fs)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name

    def _list(self, folder: str) -> Sequence[RemoteFile]:
        prefix = self._key(folder)
        prefix = f"{prefix}/" if prefix else ""
        found: list[RemoteFile] = []
        num_keys = 0
        more: dict[str, str] = {}
        while True:
            with self._said("listing", transient=True):
                page = self._calls.call(
                    self._fs._call_s3(
                        "list_objects_v2", Bucket=self._bucket, Prefix=prefix, Delimiter="/", **more
                    )
                )
            for entry in page.get("Contents") or ():
                # Consoles make keys that end in a slash, so that a folder shows before anything is in it.
                if not entry["Key"].endswith("/"):
                    name = entry["Key"].removeprefix(prefix)
                    found.append(
                        RemoteFile(f"{folder}/{name}" if folder else name, entry["Size"], entry.get("ETag"))
                    )
            num_keys += len(page.get("Contents") or ()) + len(page.get("CommonPrefixes") or ())
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        if not num_keys:
            raise NotFoundError(
                self._words.ref,
                f"bucket {self._bucket!r} has no key below {prefix!r}",
                endpoint=self.endpoint,
            )
        return found

    def probe(self, name: str, nbytes: int) -> Probe:
        def look() -> Probe:
            file = RemoteFile(name, 0)
            with self._said(f"looking at {name}", transient=True):
                answer = self._calls.call(self._get(name, f"bytes=0-{nbytes - 1}", None))
            match = _RANGE.match(answer.get("ContentRange") or "")
            size = int(match[3]) if match else int(answer["ContentLength"])
            file = RemoteFile(name, size, answer.get("ETag"))
            return Probe(file, b"".join(self._blocks(file, answer, 0, min(nbytes, size), threading.Event())))

        try:
            return again(look, self._limits)
        except SourceError as error:
            # No range of an empty object can be had.
            if error.status != 416:
                raise
            return Probe(RemoteFile(name, 0), b"")

    async def _get(self, name: str, span: str, tag: str | None) -> Mapping[str, Any]:
        condition = {"IfMatch": tag} if tag else {}
        answer: Mapping[str, Any] = await self._fs._call_s3(
            "get_object", Bucket=self._bucket, Key=self._key(name), Range=span, **condition
        )
        return answer

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        with self._said(f"download of {file.name}", transient=True):
            try:
                answer = self._calls.call(self._get(file.name, f"bytes={start}-{end - 1}", file.tag), stop)
            except OSError as error:
                if _code_of(error) in _CHANGED | {"InvalidRange", "416"}:
                    raise changed_error(self._words.file(file.name), file, "another") from None
                raise
        yield from self._blocks(file, answer, start, end, stop)

    def _blocks(
        self, file: RemoteFile, answer: Mapping[str, Any], start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        """The answer's bytes, once it is known that they are those that were asked for."""
        body, tag = answer["Body"], answer.get("ETag")
        match = _RANGE.match(answer.get("ContentRange") or "")
        if tag != file.tag or (match and int(match[3]) != file.size):
            self._fs.loop.call_soon_threadsafe(body.close)
            told = f"{match[3] if match else answer.get('ContentLength')} bytes, ETag {tag}"
            raise changed_error(self._words.file(file.name), file, told)
        if (match and int(match[1]) != start) or int(answer["ContentLength"]) != end - start:
            self._fs.loop.call_soon_threadsafe(body.close)
            raise SourceError(
                self._words.file(file.name),
                f"bytes {start} to {end} were asked for, but {answer.get('ContentRange') or 'all'} came: the "
                "store doesn't give ranges",
                endpoint=self.endpoint,
            )
        done = start
        with self._said(f"download of {file.name}", transient=True):
            content = getattr(getattr(body, "_raw_stream", body), "content", None)
            stall_s = self._limits.stall_s
            for block in self._calls.blocks(body.read, body.close, end - start, stall_s, stop, content):
                done += len(block)
                yield block
        if done != end:
            broken = SourceError(
                self._words.file(file.name),
                f"the store broke off at byte {done} of {end}",
                endpoint=self.endpoint,
            )
            raise Interrupted(broken)

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        def look() -> Mapping[str, Any]:
            with self._said(f"looking at {file.name}", transient=True):
                found: Mapping[str, Any] = self._calls.call(
                    self._fs._call_s3(
                        "head_object", Bucket=self._bucket, Key=self._key(file.name), ChecksumMode="ENABLED"
                    )
                )
                return found

        about = again(look, self._limits)
        if (about["ContentLength"], about.get("ETag")) != (file.size, file.tag):
            told = f"{about['ContentLength']} bytes, ETag {about.get('ETag')}"
            raise changed_error(self._words.file(file.name), file, told)
        found = {}
        for key, name in _CHECKSUMS.items():
            # Of an object of several parts, it may be a hash of their hashes: those have a number behind.
            checksum = about.get(key)
            if checksum and about.get("ChecksumType") != "COMPOSITE" and "-" not in checksum:
                found[name] = base64.b64decode(checksum).hex()
        # The ETag of what came in one part is its MD5, unless a key of one's own encrypts it, or the store
        # has another notion of ETags.
        plain = about.get("ServerSideEncryption") in (None, "AES256") and not about.get(
            "SSECustomerAlgorithm"
        )
        if plain and _is_md5_expected() and (match := _MD5.match(file.tag or "")):
            found["md5"] = match[1]
        return found


def _is_md5_expected() -> bool:
    return os.environ.get("RAYWL_ETAG_IS_MD5", "1").lower() not in ("0", "off", "no", "false")


def _code_of(error: OSError) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response["Error"].get("Code")) if isinstance(response, Mapping) and "Error" in response else ""
