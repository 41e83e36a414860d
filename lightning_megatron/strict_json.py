"""Strict parser of JSON from untrusted or damaged files, with one type of error."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from lightning_megatron.errors import CorruptDataError

#: Default limit of a file's size.
MAX_BYTES = 1 << 20
#: Limit of nested objects and arrays; real files have a handful of levels.
MAX_DEPTH = 32
#: Limit of commas and colons, which bounds the time of parsing; the largest tokenizers have
#: 1.5 million.
MAX_SIGNS = 1 << 22


def read_first_bytes(path: Path, num_bytes: int, remedy: str = "") -> bytes:
    """Return the first bytes of a regular file.

    Args:
        path: Regular file, or a link to one.
        num_bytes: Largest number of bytes to read.
        remedy: Last sentence of an error, with a way to obtain an intact file.
    """
    try:
        # Check the kind before opening: opening a pipe would block until a writer appears.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CorruptDataError(f"{path} is not a regular file. {remedy}".rstrip())
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise CorruptDataError(
            f"{path} cannot be read: {error.strerror or error}. {remedy}".rstrip()
        ) from error


def read_regular_file(path: Path, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of a small regular file.

    Args:
        path: Regular file, or a link to one.
        remedy: Last sentence of an error, with a way to obtain an intact file.
        max_bytes: Largest accepted size.
    """
    content = read_first_bytes(path, max_bytes + 1, remedy)
    if len(content) > max_bytes:
        raise CorruptDataError(
            f"{path} has more than {max_bytes} bytes, which is not expected of it. {remedy}"
        )
    return content


def read_json(path: Path, remedy: str, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a small JSON file, which is refused if it is not strict JSON in UTF-8.

    Args:
        path: Regular file, or a link to one.
        remedy: Last sentence of an error, with a way to obtain an intact file.
        max_bytes: Largest accepted size.

    Raises:
        CorruptDataError: If the file cannot be read, is larger, or breaks a rule of ``parse_json``.
    """
    return parse_json(read_regular_file(path, remedy, max_bytes), str(path), remedy)


def parse_object(content: bytes, source: str, remedy: str) -> dict[str, Any]:
    """Return the object of a JSON text that obeys the rules of ``parse_json``."""
    value = parse_json(content, source, remedy)
    if not isinstance(value, dict):
        raise CorruptDataError(
            f"{source} must hold a JSON object: it holds a {type(value).__name__}. {remedy}"
        )
    return value


def parse_json(content: bytes, source: str, remedy: str) -> Any:
    """Return the value of a strict JSON text.

    The text must be UTF-8 and must not have too many values. Numbers must be finite, keys unique
    within an object, and nesting at most ``MAX_DEPTH`` levels deep.

    Args:
        content: Text in UTF-8.
        source: Name of the file in errors.
        remedy: Last sentence of an error.
    """
    try:
        if content.count(b",") + content.count(b":") > MAX_SIGNS:
            raise ValueError("it has too many values")
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object_of,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # JSON allows half of a surrogate pair, but UTF-8 cannot encode it: not even an error
        # message could print such a text.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        if _is_deeper(value, MAX_DEPTH):
            raise RecursionError
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except UnicodeEncodeError:
        reason = "a text holds half of a surrogate pair"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        # Python also raises ValueError for integers of too many digits, with a text about Python.
        reason = "an integer has too many digits" if "integer string" in str(error) else str(error)
    else:
        return value
    raise CorruptDataError(f"{source} is not valid JSON: {reason}. {remedy}")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        count = Counter(name for name, _ in pairs)
        repeated = next(name for name, times in count.items() if times > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [[value]]
    for _ in range(depth):
        inside = [item for items in level for item in items if isinstance(item, (dict, list))]
        level = [list(item.values()) if isinstance(item, dict) else item for item in inside]
    return any(isinstance(item, (dict, list)) for items in level for item in items)
