"""JSON that other people's files hold: limited in size and depth, every key once, no number that is not finite."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import IO, Any

from lightning_megatron.errors import CorruptDataError

#: How many mappings and lists may be inside each other; real files have three or four.
MAX_DEPTH = 32


def read_json(file: IO[bytes], where: str, max_bytes: int) -> dict[str, Any]:
    """Read the mapping that a whole file holds.

    Args:
        file: The file, at its beginning; no more than ``max_bytes`` + 1 are read of it.
        where: Its path, for errors.
        max_bytes: The largest that is read (bytes).

    Raises:
        CorruptDataError: If it is larger, or as :func:`parse_json` says.
    """
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CorruptDataError(
            f"a file of JSON must have at most {max_bytes:,} bytes: {where} has more. It is none that was meant to be "
            "read here. Use the file that belongs there."
        )
    return parse_json(content, where)


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Return the mapping that JSON text describes.

    Equal to ``json.loads``, which also takes a key twice (the last one counts), any depth, NaN, infinity, and numbers
    that are too large for a float.

    Args:
        content: The text in UTF-8.
        where: Where it is from, for errors.

    Raises:
        CorruptDataError: If it is not JSON, no mapping, too deep, or has a key twice or a number that is not finite.
    """
    try:
        found = json.loads(
            content.decode(), object_pairs_hook=_each_key_once, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CorruptDataError(
            f"a file must hold JSON where its format says so: {where} does not ({reason}). It is damaged or of another "
            "format. Use a copy that is whole."
        ) from error
    if not isinstance(found, dict):
        raise CorruptDataError(
            f"the JSON of a file must be a mapping: {where} has a {type(found).__name__}. It is damaged or of another "
            "format. Use a copy that is whole."
        )
    if _is_deeper(found, MAX_DEPTH):
        raise CorruptDataError(
            f"mappings and lists of a file may be inside each other {MAX_DEPTH} times: those of {where} are deeper. "
            "No format that is read here has that. Use a copy that is whole."
        )
    return found


def _each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        count = Counter(name for name, _ in pairs)
        twice = next(name for name, times in count.items() if times > 1)
        raise ValueError(f"it has {twice[:100]!r} twice")
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:30]} is too large for a number")
    return number


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for values in inside for one in values if isinstance(one, (dict, list))]
    return bool(level)
