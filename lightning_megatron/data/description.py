"""Description of a token file in ``PREFIX.json``: its tokenizer, size and checksums."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.strict_json import (
    MAX_BYTES,
    parse_json,
    read_first_bytes,
    read_regular_file,
)

FORMAT = "lightning_megatron.corpus"
VERSION = 2
REMEDY = (
    "Write the corpus again with `lightning-megatron preprocess`, or move this file away: the "
    "corpus then has no known tokenizer and no checksum."
)
CHECKSUMS = ("bin_crc32", "idx_sha256", "fields_crc32")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CorpusDescription:
    """Fields of the description of a token file.

    The four fields about the tokenizer are None if the tokenizer is unknown. The three checksums
    are None in files of version 1.

    Args:
        tokenizer_fingerprint: Hash of the files that define the tokenizer's ids.
        vocab_size: Size of the vocabulary; all ids are smaller.
        eod: Id of the end-of-document token; None if the tokenizer has none.
        num_documents: Number of documents, empty ones included.
        num_tokens: Number of tokens of all documents.
        num_bytes: Size of the text in UTF-8, to compute bits per byte (bytes).
        bin_crc32: CRC-32 of ``.bin`` as 8 hexadecimal digits.
        idx_sha256: SHA-256 of ``.idx`` as 64 hexadecimal digits.
        fields_crc32: CRC-32 of all other fields as 8 hexadecimal digits.
    """

    tokenizer: str | None
    tokenizer_fingerprint: str | None
    vocab_size: int | None
    eod: int | None
    num_documents: int
    num_tokens: int
    num_bytes: int
    bin_crc32: str | None = dataclasses.field(default=None, compare=False)
    idx_sha256: str | None = dataclasses.field(default=None, compare=False)
    fields_crc32: str | None = dataclasses.field(default=None, compare=False)

    def checksum_of_fields(self) -> str:
        """Return the CRC-32 of all fields except ``fields_crc32``."""
        content = json.dumps(
            dataclasses.asdict(dataclasses.replace(self, fields_crc32=None)), sort_keys=True
        )
        return f"{zlib.crc32(content.encode()):08x}"


FIELDS = tuple(field.name for field in dataclasses.fields(CorpusDescription))


def description_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the description of a corpus."""
    return Path(f"{os.fspath(prefix)}.json")


def read_description(prefix: str | os.PathLike[str]) -> CorpusDescription | None:
    """Read the description of a corpus; None without one, as for corpora written by Megatron-Core.

    A file of JSON or JSON lines without any field of a description belongs to the user, and is
    ignored with a warning. ``TokenFile.check_checksums`` compares the checksums.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Raises:
        CorruptDataError: If a field is missing, unknown, of a wrong type or out of range, or the
            file is not JSON.
    """
    path = description_path(prefix)
    if not os.path.lexists(path):
        return None
    if _is_other_json(path):
        log.warning(
            "%s is ignored: it has no field of a description of the token file with this prefix.",
            path,
        )
        return None
    content = parse_json(read_regular_file(path, REMEDY), str(path), REMEDY)
    fields = check_fields(content, str(path))
    return CorpusDescription(**{name: fields[name] for name in FIELDS if name in fields})


def write_description(prefix: str | os.PathLike[str], description: CorpusDescription) -> None:
    """Write a description atomically.

    If a JSON file of the user has the same name and the tokenizer is unknown, the function writes
    nothing.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        description: Fields to write.

    Raises:
        CorruptDataError: If the file name belongs to another file, or a field is invalid.
    """
    path = description_path(prefix)
    if os.path.lexists(path) and not _is_replaceable(path):
        if description.tokenizer is None and _is_other_json(path):
            return
        raise CorruptDataError(
            f"{path} exists and is not a corpus description. Move it away, or choose another "
            "output."
        )
    content = content_of(description)
    check_fields(content, str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def content_of(description: CorpusDescription) -> dict[str, Any]:
    """Return the JSON object of a description, including the checksum of its fields."""
    complete = dataclasses.replace(description, fields_crc32=description.checksum_of_fields())
    return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(complete)}


def _is_replaceable(path: Path) -> bool:
    """Return whether a file is empty or a description, intact or damaged."""
    start = _start_of(path)
    return start is not None and (not start or FORMAT.encode() in start)


def _is_other_json(path: Path) -> bool:
    """Return whether a file is JSON or JSON lines without any field of a description."""
    start = _start_of(path) or b""
    for text in (start, start.partition(b"\n")[0]):
        try:
            value = parse_json(text, str(path), REMEDY)
        except CorruptDataError:
            continue
        return (
            isinstance(value, dict)
            and bool(value)
            and not {"format", "version", *FIELDS} & set(value)
        )
    return False


def _start_of(path: Path) -> bytes | None:
    """Return the first bytes of a regular file; None if it cannot be read."""
    try:
        # A file with this name may be the raw text of the corpus, and larger than the memory.
        return read_first_bytes(path, MAX_BYTES)
    except CorruptDataError:
        return None


def check_fields(content: Any, source: str) -> dict[str, Any]:
    """Validate the names, types and ranges of a description's fields, and return the fields.

    Args:
        content: Parsed JSON.
        source: Name of the file, for errors.

    Raises:
        CorruptDataError: If a field is missing, unknown, of a wrong type or out of range.
    """
    if not isinstance(content, dict):
        raise CorruptDataError(
            f"{source} must be one JSON object: it is {_shown(content)}. {REMEDY}"
        )
    if content.get("format") != FORMAT:
        raise CorruptDataError(
            f"{source}: format must be {FORMAT!r}: it is {_shown(content.get('format'))}. {REMEDY}"
        )
    version = content.get("version")
    if type(version) is not int or version not in (1, VERSION):
        raise CorruptDataError(
            f"{source}: version must be 1 or {VERSION}: it is {_shown(version)}. {REMEDY}"
        )
    expected = {"format", "version", *FIELDS} - (set(CHECKSUMS) if version == 1 else set())
    if set(content) != expected:
        missing = sorted(expected - set(content))
        unknown = sorted(set(content) - expected)
        raise CorruptDataError(
            f"{source}: version {version} has the fields {', '.join(sorted(expected))}: missing "
            f"are {missing}, unknown are {_shown(unknown)}. {REMEDY}"
        )
    for name, (rule, holds) in _rules(content, version).items():
        if not holds(content[name]):
            raise CorruptDataError(
                f"{source}: {name} must be {rule}: it is {_shown(content[name])}. {REMEDY}"
            )
    return content


def _rules(content: dict[str, Any], version: int) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    has_tokenizer = version == 1 or content["tokenizer"] is not None
    vocab_size = content["vocab_size"] if type(content["vocab_size"]) is int else 0
    text = ("a text of 1 to 4096 characters", lambda v: isinstance(v, str) and 0 < len(v) <= 4096)
    unknown: tuple[str, Callable[[Any], bool]] = ("null where tokenizer is", lambda v: v is None)
    eod_rule, is_eod = _integer(0, vocab_size - 1)
    rules = {
        "tokenizer": text,
        "tokenizer_fingerprint": text,
        "vocab_size": _integer(1, 2**31),
        "eod": (f"null or {eod_rule}", lambda v: v is None or is_eod(v)),
    }
    if not has_tokenizer:
        rules = dict.fromkeys(rules, unknown)
    for count in ("num_documents", "num_tokens", "num_bytes"):
        rules[count] = _integer(0, 2**63 - 1)
    if version != 1:
        for name in CHECKSUMS:
            rules[name] = _digits(64 if "sha256" in name else 8)
    return rules


def _integer(low: int, high: int) -> tuple[str, Callable[[Any], bool]]:
    # `type` instead of `isinstance`, because True is an instance of int.
    return (
        f"a whole number in [{low}, {high}]",
        lambda value: type(value) is int and low <= value <= high,
    )


def _digits(count: int) -> tuple[str, Callable[[Any], bool]]:
    def holds(value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{count}}}", value) is not None

    return f"{count} hexadecimal digits", holds


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
