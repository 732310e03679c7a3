"""What stores raise, said in raywl's own errors, without secrets."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raywl.errors import AuthError, NotFoundError, RaywlError, SourceError
from raywl.sources.hub_errors import through_proxy, without_secrets
from raywl.sources.transfer import retry_after_s

__all__ = ["StoreWords", "harmless", "secrets_of", "status_error", "store_error"]

_MAX_TEXT = 300
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_UNKNOWN_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"}
_SKEWED = {"RequestTimeTooSkewed"}
_HARMLESS = {
    "anon", "asynchronous", "block_size", "cache_regions", "config_kwargs", "connect_timeout",
    "default_block_size", "encoded", "endpoint_url", "max_concurrency", "project", "read_timeout",
    "region_name", "requester_pays", "size_policy", "use_ssl", "verify", "version_aware",
}  # fmt: skip
"""Options that hold no secret; what isn't known is taken for one."""


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Texts among storage options that no message may show."""
    found: list[str] = []
    for name, value in options.items():
        if name in _HARMLESS:
            continue
        if isinstance(value, Mapping):
            found += secrets_of(value)
        elif isinstance(value, str | bytes) and len(value) > 3:
            found.append(value if isinstance(value, str) else value.decode(errors="replace"))
    return found


def harmless(options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options without those that may be secret."""
    found = {name: value for name, value in options.items() if name in _HARMLESS}
    inner = {name: value for name, value in options.items() if name == "client_kwargs"}
    return found | {name: harmless(value) for name, value in inner.items() if isinstance(value, Mapping)}


@dataclass(frozen=True)
class StoreWords:
    """How messages name a store."""

    ref: str
    """The checkpoint's URL, without secrets."""
    bucket: str | None = None
    endpoint: str | None = None
    remedy: str = "give storage_options, or set the credentials in the environment"
    """What to do where the store wants other credentials."""
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def file(self, name: str) -> str:
        """A file's URL."""
        return f"{self.ref}/{name}" if name else self.ref

    def clean(self, text: str) -> str:
        """A text in one line, without secrets."""
        line = " ".join(text.split())
        return without_secrets(line, self.secrets)[:_MAX_TEXT]


def store_error(
    error: BaseException, words: StoreWords, doing: str
) -> tuple[RaywlError | None, float | None]:
    """The error to raise for one of a store's.

    Args:
        error: What fsspec, the store's client or the network raised.
        words: How to name the store.
        doing: What was being done.

    Returns:
        The error, `None` for what is no fault of the store or the network; and after how many seconds the
        store wants to be asked again, if it says so.
    """
    if isinstance(error, RaywlError):
        return error, None
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
            return _answered(response, words, doing)
        # aiohttp's and requests' errors, and those of Google's and Microsoft's clients.
        status = next((getattr(one, name, None) for name in ("status", "status_code", "code")), None)
        if isinstance(status, int) and 400 <= status < 600:
            headers = getattr(one, "headers", None) or {}
            said = words.clean(str(getattr(one, "message", "") or ""))
            return status_error(status, "", said, words, doing), retry_after_s(headers.get("Retry-After"))
    return _unanswered(error, words, doing), None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _answered(response: Mapping[str, Any], words: StoreWords, doing: str) -> tuple[RaywlError, float | None]:
    """What S3 and those like it say."""
    about = response.get("ResponseMetadata") or {}
    code, said = (
        str(response["Error"].get("Code") or ""),
        words.clean(str(response["Error"].get("Message") or "")),
    )
    status = int(about.get("HTTPStatusCode") or (code if code.isdecimal() else 0))
    wait_s = retry_after_s((about.get("HTTPHeaders") or {}).get("retry-after"))
    return status_error(status, code, said, words, doing), wait_s


def status_error(status: int, code: str, said: str, words: StoreWords, doing: str) -> RaywlError:
    """The error for an answer of a store.

    Args:
        status: HTTP's.
        code: The store's own, if any.
        said: Its text, clean.
        words: How to name the store.
        doing: What was being done.
    """
    where: dict[str, Any] = {"endpoint": words.endpoint, "status": status or None}
    tail = f" ({code}: {said})" if code and said and not code.isdecimal() else f": {said}" if said else ""
    if code in _EXPIRED:
        return AuthError(words.ref, f"{doing}: the credentials have expired{tail}; get new ones, and "
                         f"{words.remedy}", **where)  # fmt: skip
    if code in _UNKNOWN_KEY:
        return AuthError(
            words.ref, f"{doing}: the store doesn't know these credentials{tail}; {words.remedy}", **where
        )
    if code in _SKEWED:
        return AuthError(words.ref, f"{doing}: this machine's clock is off{tail}; set it", **where)
    if code == "NoSuchBucket":
        return NotFoundError(
            words.ref, f"{doing}: there is no bucket {words.bucket!r}{_elsewhere(words)}", **where
        )
    if status == 407:
        remedy = f"give user and password in its URL{through_proxy(words.endpoint)}"
        return AuthError(words.ref, f"{doing}: the proxy refused{tail}; {remedy}", **where)
    if status in (401, 403):
        return AuthError(words.ref, f"{doing}: the store refused{tail}; {words.remedy}", **where)
    if status in (404, 410) or code == "NoSuchKey":
        return NotFoundError(words.ref, f"{doing}: not found{tail}", **where)
    if status in (301, 307, 400) and words.bucket:
        return SourceError(
            words.ref,
            f"{doing}: the store can't answer that{tail}; is it the right endpoint and region for bucket "
            f"{words.bucket!r}, and are the credentials valid?",
            **where,
        )
    return SourceError(words.ref, f"{doing}: the store failed{tail}", **where)


def _elsewhere(words: StoreWords) -> str:
    return f" at {words.endpoint}" if words.endpoint else ""


def _unanswered(error: BaseException, words: StoreWords, doing: str) -> RaywlError | None:
    """What happens where there is no answer, or none that can be read."""
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    text = words.clean(str(error))
    where: dict[str, Any] = {"endpoint": words.endpoint}
    if {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
    } & names:
        return AuthError(
            words.ref, f"{doing}: no credentials were found ({text}); {words.remedy}, or anon=True", **where
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(words.ref, f"{doing}: there is nothing there", **where)
    if isinstance(error, PermissionError):
        return AuthError(words.ref, f"{doing}: the store refused: {text}; {words.remedy}", **where)
    if {"ResponseParserError", "InvalidURL"} & names:
        return SourceError(
            words.ref,
            f"{doing}: what answers there is no such store (a proxy, a sign-in page?): {text}",
            **where,
        )
    if "ParamValidationError" in names or "InvalidS3AddressingStyleError" in names:
        return SourceError(words.ref, f"{doing}: {text}", **where)
    if any(isinstance(one, socket.gaierror) or "DNS" in type(one).__name__ for one in _chain(error)):
        how = f"{through_proxy(words.endpoint)}: {text}"
        return SourceError(words.ref, f"{doing}: the host's name can't be resolved{how}", **where)
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return SourceError(words.ref, f"{doing}: no answer in time: {type(error).__name__} {text}", **where)
    network = (
        "ClientError",
        "HTTPClientError",
        "ConnectionError",
        "IncompleteRead",
        "BotoCoreError",
        "OSError",
    )
    if any(name in names for name in network):
        how = f"{through_proxy(words.endpoint)}: {type(error).__name__}: {text}"
        return SourceError(words.ref, f"{doing}: the store can't be reached{how}", **where)
    return None
