"""What ModelScope's client raises, said in raywl's own errors, without secrets."""

from __future__ import annotations

from collections.abc import Iterable

from raywl.errors import AuthError, NotFoundError, OfflineError, RaywlError, SourceError, some_of
from raywl.sources.hub_errors import through_proxy, without_secrets

__all__ = ["EXTRA", "modelscope_error", "needs_modelscope"]

EXTRA = "python -m pip install 'raywl[modelscope]'"
_MAX_TEXT = 300


def needs_modelscope(what: str) -> ImportError:
    """The error where the client isn't installed."""
    return ImportError(f"{what} needs the modelscope package; install the extra: {EXTRA}", name="modelscope")


def modelscope_error(
    error: BaseException,
    *,
    ref: str,
    endpoint: str | None,
    secrets: Iterable[str | None] = (),
    doing: str = "download",
) -> RaywlError | None:
    """The error to raise for one of the client's.

    Args:
        error: What the client raised.
        ref: Repository and revision that were asked for.
        endpoint: The server that was asked, if known.
        secrets: What no message may show.
        doing: What was being done.

    Returns:
        `None` for what is neither the server's nor the network's nor the disk's fault.
    """
    try:
        from modelscope_hub import errors
    except ImportError:
        return None
    if type(error).__name__ == "HTTPError" and isinstance(error.__cause__, errors.HubError):
        # The older of the client's interfaces wraps some of its own errors so.
        error = error.__cause__
    endpoint = None if endpoint is None else without_secrets(endpoint)
    secrets = tuple(secrets)
    if isinstance(error, errors.FileDownloadError) and getattr(error, "failed_files", None):
        failed = dict(error.failed_files)
        name = min(failed)
        others = f" (of {len(failed)} that failed: {some_of(sorted(failed))})" if len(failed) > 1 else ""
        doing = f"download of {name}{others}"
        told = modelscope_error(failed[name], ref=ref, endpoint=endpoint, secrets=secrets, doing=doing)
        return told or SourceError(ref, f"{doing} failed: {_text(failed[name], secrets)}", endpoint=endpoint)
    status = getattr(error, "status_code", None)
    text = _text(error, secrets)
    if isinstance(error, errors.CacheNotFound):
        return OfflineError(ref, f"{doing}: working offline, and the cache doesn't have it: {text}")
    if isinstance(error, errors.NotExistError):
        return NotFoundError(
            ref,
            f"{doing}: there is no such repository, revision or file, or it is private: {text}",
            endpoint=endpoint,
            status=status,
        )
    if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
        return AuthError(
            ref,
            f"{doing}: the server refused; give a token that may read the repository "
            f"(MODELSCOPE_API_TOKEN, or token=): {text}",
            endpoint=endpoint,
            status=status,
        )
    kinds = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    if isinstance(error, errors.NetworkError) or not kinds.isdisjoint(("requests", "urllib3")):
        why = f"the server can't be reached{through_proxy(endpoint)}: {type(error).__name__}: {text}"
        return SourceError(ref, f"{doing}: {why}", endpoint=endpoint)
    if isinstance(error, errors.HubError):
        return SourceError(ref, f"{doing} failed: {text}", endpoint=endpoint, status=status)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return SourceError(ref, f"{doing} failed: {error.strerror or text}{where}", endpoint=endpoint)
    return None


def _text(error: BaseException, secrets: Iterable[str | None]) -> str:
    lines = (getattr(error, "message", None) or str(error)).strip().splitlines()
    return without_secrets(lines[0] if lines else type(error).__name__, secrets)[:_MAX_TEXT]
