"""What the hub's client raises, said in raywl's own errors, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from raywl.errors import AuthError, NotFoundError, OfflineError, RaywlError, SourceError

__all__ = ["hub_error", "through_proxy", "without_secrets"]

_QUERY = re.compile(r"(\w+://[^\s?'\"<>]+)\?[^\s'\"<>]*")
_USERINFO = re.compile(r"(\w+://)[^\s/@'\"<>]+@")
_MAX_TEXT = 300


def without_secrets(text: str, secrets: Iterable[str | None] = ()) -> str:
    """`text` without tokens, passwords of URLs, and their queries, which sign storage URLs."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return _USERINFO.sub(r"\1", _QUERY.sub(r"\1", text))


def through_proxy(endpoint: str | None) -> str:
    """What to say of the proxy that the environment has for an endpoint; empty where it has none."""
    host = urlsplit(endpoint or "").hostname
    proxies = getproxies()
    proxy = proxies.get(urlsplit(endpoint or "").scheme) or proxies.get("all")
    if host is None or not proxy or proxy_bypass(host):
        return ""
    return f" (through the proxy {without_secrets(proxy)})"


def hub_error(
    error: BaseException,
    *,
    repo_id: str,
    revision: str,
    endpoint: str,
    secrets: Iterable[str | None],
    file: str | None = None,
) -> RaywlError | None:
    """The error to raise for one of the client's.

    Args:
        error: What the client raised.
        repo_id: The repository that was asked for.
        revision: Its revision.
        endpoint: The hub that was asked.
        secrets: What no message may show.
        file: The file that was being fetched, if any.

    Returns:
        `None` for what is neither the hub's nor the network's nor the disk's fault.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        # How the client says that it could not ask the hub and that its cache doesn't help either.
        error = error.__cause__
    ref = f"{repo_id}@{revision}"
    endpoint = without_secrets(endpoint)
    doing = f"download of {file}" if file else "look-up"
    if isinstance(error, OfflineModeIsEnabled):
        return OfflineError(
            ref,
            f"{doing}: huggingface_hub was imported with HF_HUB_OFFLINE set, and so stays offline",
            endpoint=endpoint,
        )
    if isinstance(error, HfHubHTTPError) and getattr(error, "response", None) is not None:
        return _answered(error.response, ref, repo_id, revision, endpoint, doing, tuple(secrets))
    text = without_secrets(_first_line(error), secrets)
    if any(kind.__name__ in ("TransportError", "TooManyRedirects") for kind in type(error).__mro__):
        how = f"{through_proxy(endpoint)}: {type(error).__name__}: {text}"
        return SourceError(ref, f"{doing}: the hub can't be reached{how}", endpoint=endpoint)
    if isinstance(error, json.JSONDecodeError):
        return SourceError(
            ref,
            f"{doing}: what answers there is no hub (a proxy, a sign-in page?): no JSON, "
            f"but {error.doc[:40]!r}",
            endpoint=endpoint,
        )
    if isinstance(error, OSError):
        reason = error.strerror or text
        where = f" ({error.filename})" if error.filename else ""
        return SourceError(ref, f"{doing} failed: {reason}{where}", endpoint=endpoint)
    return None


def _answered(
    response: Any,
    ref: str,
    repo_id: str,
    revision: str,
    endpoint: str,
    doing: str,
    secrets: tuple[str | None, ...],
) -> RaywlError:
    status: int = response.status_code
    code = response.headers.get("X-Error-Code")
    said = without_secrets(response.headers.get("X-Error-Message") or "", secrets)[:_MAX_TEXT]
    said = f": {said}" if said else ""
    if code == "GatedRepo":
        return AuthError(
            ref,
            f"{doing}: the repository is gated; accept its conditions at {endpoint}/{repo_id}, and give the "
            "token of an account that has access (HF_TOKEN, or token=)",
            endpoint=endpoint,
            status=status,
        )
    if code == "RepoNotFound":
        return NotFoundError(
            ref,
            f"{doing}: there is no such repository (nor a local path by that name), or it is private and "
            "the token, if any, doesn't open it",
            endpoint=endpoint,
            status=status,
        )
    if code == "RevisionNotFound":
        return NotFoundError(
            ref, f"{doing}: the repository has no revision {revision!r}", endpoint=endpoint, status=status
        )
    if status == 407:
        told = f"{doing}: the proxy refused{said}; give user and password in its URL{through_proxy(endpoint)}"
        return AuthError(ref, told, endpoint=endpoint, status=status)
    if status in (401, 403):
        return AuthError(
            ref,
            f"{doing}: the hub refused{said}; give a token that is valid and may read the repository "
            "(HF_TOKEN, or token=)",
            endpoint=endpoint,
            status=status,
        )
    if status == 404:
        return NotFoundError(ref, f"{doing}: not found{said}", endpoint=endpoint, status=status)
    after = response.headers.get("Retry-After")
    wait = f"; try again after {after} s" if after and after.isdecimal() else ""
    return SourceError(ref, f"{doing}: the hub failed{said}{wait}", endpoint=endpoint, status=status)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:_MAX_TEXT]
