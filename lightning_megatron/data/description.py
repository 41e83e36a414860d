"""Description of a token file in ``PREFIX.json``: its tokenizer, size and checksums."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Annotated, Any

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.settings import Pattern, Range, coerce_fields, shown
from lightning_megatron.strict_json import (
    MAX_BYTES,
    parse_json,
    parse_object,
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


_Text = Annotated[str, Pattern(".{1,4096}", "of 1 to 4096 characters")]
_Crc32 = Annotated[str, Pattern("[0-9a-f]{8}", "of 8 hexadecimal digits")]
_Sha256 = Annotated[str, Pattern("[0-9a-f]{64}", "of 64 hexadecimal digits")]
_Count = Annotated[int, Range(minimum=0, maximum=2**63 - 1)]


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
        bin_crc32: CRC-32 of ``.bin``.
        idx_sha256: SHA-256 of ``.idx``.
        fields_crc32: CRC-32 of all other fields.
    """

    tokenizer: _Text | None
    tokenizer_fingerprint: _Text | None
    vocab_size: Annotated[int, Range(minimum=1, maximum=2**31)] | None
    eod: _Count | None
    num_documents: _Count
    num_tokens: _Count
    num_bytes: _Count
    bin_crc32: _Crc32 | None = dataclasses.field(default=None, compare=False)
    idx_sha256: _Sha256 | None = dataclasses.field(default=None, compare=False)
    fields_crc32: _Crc32 | None = dataclasses.field(default=None, compare=False)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer, under the name that it has in a tokenizer."""
        return self.tokenizer_fingerprint

    def checksum_of_fields(self) -> str:
        """Return the CRC-32 of all fields except ``fields_crc32``."""
        content = json.dumps(
            dataclasses.asdict(dataclasses.replace(self, fields_crc32=None)), sort_keys=True
        )
        return f"{zlib.crc32(content.encode()):08x}"

    def check(self, source: str) -> None:
        """Check the types and ranges of the fields, and that those of the tokenizer fit together.

        Args:
            source: Name of the file, for errors.
        """
        try:
            coerce_fields(self, f"{source}: ")
        except ParallelPlanError as error:
            raise CorruptDataError(f"{error} {REMEDY}") from error
        required = (self.tokenizer, self.tokenizer_fingerprint, self.vocab_size)
        is_known = None not in required
        is_unknown = self.eod is None and set(required) == {None}
        if not (is_known or is_unknown):
            raise CorruptDataError(
                f"{source}: tokenizer, tokenizer_fingerprint and vocab_size must all be given, or "
                f"all be null as well as eod: they are {required} and {self.eod}. {REMEDY}"
            )
        if self.eod is not None and self.eod >= (self.vocab_size or 0):
            raise CorruptDataError(
                f"{source}: eod must be below vocab_size ({self.vocab_size}): it is {self.eod}. "
                f"{REMEDY}"
            )


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
    return _described(parse_object(read_regular_file(path, REMEDY), str(path), REMEDY), str(path))


def write_description(prefix: str | os.PathLike[str], description: CorpusDescription) -> None:
    """Write a description atomically.

    If a JSON file of the user has the same name and the tokenizer is unknown, the function writes
    nothing.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        description: Fields to write.
    """
    path = description_path(prefix)
    if os.path.lexists(path) and not _is_replaceable(path):
        if description.tokenizer is None and _is_other_json(path):
            return
        raise CorruptDataError(
            f"{path} exists and is not a corpus description. Move it away, or choose another "
            "output."
        )
    complete = dataclasses.replace(description, fields_crc32=description.checksum_of_fields())
    complete.check(str(path))
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(complete)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


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


def _described(content: dict[str, Any], source: str) -> CorpusDescription:
    """Return the description in the object of a file, after a check of its names and values."""
    given = {name: content.get(name) for name in ("format", "version")}
    if given["format"] != FORMAT or type(given["version"]) is not int:
        raise CorruptDataError(
            f"{source}: format must be {FORMAT!r}, and version a whole number: they are "
            f"{shown(given['format'])} and {shown(given['version'])}. {REMEDY}"
        )
    version = given["version"]
    if version not in (1, VERSION):
        raise CorruptDataError(
            f"{source}: version must be 1 or {VERSION}: it is {shown(version)}. {REMEDY}"
        )
    newer = CHECKSUMS if version == 1 else ()
    expected = {"format", "version", *FIELDS} - set(newer)
    if set(content) != expected:
        missing = sorted(expected - set(content))
        unknown = sorted(set(content) - expected)
        raise CorruptDataError(
            f"{source}: version {version} has the fields {', '.join(sorted(expected))}: missing "
            f"are {missing}, unknown are {shown(unknown)}. {REMEDY}"
        )
    required = ("tokenizer",) if version == 1 else CHECKSUMS
    absent = [name for name in required if content[name] is None]
    if absent:
        raise CorruptDataError(
            f"{source}: {', '.join(absent)} of version {version} must be text: it is null. {REMEDY}"
        )
    description = CorpusDescription(**{n: content[n] for n in FIELDS if n in content})
    description.check(source)
    return description
