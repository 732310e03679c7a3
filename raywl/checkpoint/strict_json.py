"""JSON as strict as the safetensors library's parser: what one reader refuses, the other does too."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from raywl.errors import CorruptFileError

__all__ = ["parse_json"]

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is not an integer")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return value


def parse_json(raw: bytes, path: str, what: str, *, offset: int = 0) -> Any:
    """Parses UTF-8 JSON: no key twice, no NaN, no half of a surrogate pair, no abysmal nesting.

    Args:
        raw: The text.
        path: How messages name the file.
        what: How they name the text: header, index.
        offset: Where the text starts in the file.

    Raises:
        CorruptFileError: It is none of that.
    """
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_finite,
            parse_float=_finite,
            # A hook for each integer costs as much as all the rest.
            parse_int=_integer if "-0" in text else None,
        )
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except _DuplicateKey as error:
        raise CorruptFileError(path, str(error), f"is in the {what} twice") from None
    except UnicodeDecodeError as error:
        raise CorruptFileError(path, None, f"{what} is not UTF-8 at byte {offset + error.start}") from None
    except UnicodeEncodeError:
        raise CorruptFileError(path, None, f"{what} has half a surrogate pair: not valid Unicode") from None
    except RecursionError:
        raise CorruptFileError(path, None, f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CorruptFileError(path, None, f"{what} is not JSON: {error}") from None
    return value
