"""Read JSON from files that may be damaged or hostile: every fault is one error that names the file."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from lightning_megatron.errors import CorruptDataError

MAX_BYTES = 1 << 20
#: How many mappings and lists may be inside each other; real files have a handful.
MAX_DEPTH = 32


def read_start(path: Path, num_bytes: int, remedy: str = "") -> bytes:
    """Return the first bytes of a regular file.

    Args:
        path: The file; a link to a regular file is one.
        num_bytes: Bytes that are read at most.
        remedy: Sentence at the end of an error that says how to get a sound file.

    Raises:
        CorruptDataError: The path is missing, unreadable, a directory, a pipe or a device.
    """
    try:
        # the kind is asked for before opening: opening a pipe would wait for a writer
        if not stat.S_ISREG(path.stat().st_mode):
            raise CorruptDataError(f"{path} is not a regular file. {remedy}".rstrip())
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise CorruptDataError(f"{path} cannot be read: {error.strerror or error}. {remedy}".rstrip()) from error


def read_regular_file(path: Path, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of a small regular file.

    Args:
        path: The file; a link to a regular file is one.
        remedy: Sentence at the end of an error that says how to get a sound file.
        max_bytes: Largest size that is read.

    Raises:
        CorruptDataError: The path is missing, unreadable, a directory, a pipe or a device, or the file is too large.
    """
    content = read_start(path, max_bytes + 1, remedy)
    if len(content) > max_bytes:
        raise CorruptDataError(f"{path} has more than {max_bytes} bytes, which is not expected of it. {remedy}")
    return content


def read_json(path: Path, remedy: str, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a small JSON file; see `parse_json` for the rules.

    Raises:
        CorruptDataError: The file cannot be read, is too large, or is not strict JSON.
    """
    return parse_json(read_regular_file(path, remedy, max_bytes), str(path), remedy)


def parse_object(content: bytes, source: str, remedy: str) -> dict[str, Any]:
    """Return the object that strict JSON holds; see `parse_json` for the rules.

    Raises:
        CorruptDataError: The text breaks one of the rules, or holds another value.
    """
    value = parse_json(content, source, remedy)
    if not isinstance(value, dict):
        raise CorruptDataError(f"{source} must hold a JSON object: it holds a {type(value).__name__}. {remedy}")
    return value


def parse_json(content: bytes, source: str, remedy: str) -> Any:
    """Return the value of strict JSON: UTF-8, finite numbers, no key twice in an object, `MAX_DEPTH` levels.

    Args:
        content: The text in UTF-8.
        source: Name of the file in errors.
        remedy: Sentence at the end of an error.

    Raises:
        CorruptDataError: The text breaks one of the rules.
    """
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object_of,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # a half of a surrogate pair is legal JSON, but no text: not even an error could print it
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
        # too many digits of an integer is a ValueError, too, whose text speaks of Python
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
        inside = [one for values in level for one in values if isinstance(one, (dict, list))]
        level = [list(one.values()) if isinstance(one, dict) else one for one in inside]
    return any(isinstance(one, (dict, list)) for values in level for one in values)
