"""Documents of raw text: JSON lines, or plain text with a document per file, line or paragraph."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from lightning_megatron.data.worker_pool import map_in_order
from lightning_megatron.errors import CorruptDataError, UnsupportedError

Document = Literal["file", "line", "paragraph"]
Kind = Literal["json", "file", "line", "paragraph"]
Result = TypeVar("Result")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md")
#: Size at which a chunk ends (bytes).
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RawChunk:
    """Undecoded documents of one file; a worker process decodes them.

    Args:
        path: File of the documents.
        kind: Format of the file.
        lines: Line on which each document starts, counted from 1.
    """

    path: str
    kind: Kind
    lines: tuple[int, ...]
    documents: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes read, without additional empty lines between documents (bytes)."""
        size = sum(len(document) for document in self.documents)
        if self.kind == "file":
            return size
        # Each line or paragraph was followed by at least one line feed.
        return size + len(self.documents)

    def text(self, number: int, json_key: str) -> str:
        """Return the text of a document.

        Args:
            number: Index of the document in the chunk.

        Raises:
            CorruptDataError: If a line is not a JSON object with this key, or text is not UTF-8.
                The message names file and line.
        """
        key = json_key if self.kind == "json" else None
        return parse_text(self.documents[number], f"{self.path}:{self.lines[number]}", key)


class TextFiles:
    """Files of raw text: JSON lines by suffix, plain text otherwise; ``.gz`` is decompressed.

    Args:
        inputs: Files, directories and globs. The files of a directory or glob are sorted by name.

    Raises:
        UnsupportedError: If an input matches no file.
    """

    def __init__(self, inputs: Sequence[str | Path]) -> None:
        self.paths = [path for entry in inputs for path in _paths_of(entry)]

    @property
    def num_bytes(self) -> int | None:
        """Size of all files; None if a compressed one has an unknown number of bytes (bytes)."""
        is_packed = any(path.suffix == ".gz" for path in self.paths)
        return None if is_packed else sum(path.stat().st_size for path in self.paths)

    def texts(self, document: Document, json_key: str) -> Iterator[tuple[str, str]]:
        """Yield the place, which is file and line, and the text of each document.

        Args:
            document: Unit of plain text that is a document.
            json_key: Key of the text in JSON lines.

        Raises:
            CorruptDataError: If a file is damaged, a line is not a JSON object with this key, or
                text is not UTF-8. The message names file and line.
        """
        for chunk in self._chunks(document):
            for number, line in enumerate(chunk.lines):
                yield f"{chunk.path}:{line}", chunk.text(number, json_key)

    def map_chunks(
        self, function: Callable[[RawChunk], Result], document: Document, workers: int = 1
    ) -> Iterator[Result]:
        """Yield the results of a function for chunks of whole documents, in order.

        Args:
            function: Picklable function.
            document: Unit of plain text that is a document.
            workers: Number of processes that call the function. It does not affect the result.

        Raises:
            CorruptDataError: If a file cannot be opened, or is a damaged ``.gz``.
        """
        return map_in_order(function, self._chunks(document), workers if workers > 1 else 0)

    def _chunks(self, document: Document) -> Iterator[RawChunk]:
        for path in self.paths:
            kind: Kind = "json" if _plain_suffix(path) in JSON_SUFFIXES else document
            lines: list[int] = []
            documents: list[bytes] = []
            size = 0
            try:
                with _open(path) as file:
                    for line, content in _split(file, kind):
                        lines.append(line)
                        documents.append(content)
                        size += len(content)
                        if size >= CHUNK_BYTES:
                            yield RawChunk(str(path), kind, tuple(lines), tuple(documents))
                            lines = []
                            documents = []
                            size = 0
            except (OSError, EOFError, zlib.error) as error:
                raise _unreadable(path, error) from error
            if documents:
                yield RawChunk(str(path), kind, tuple(lines), tuple(documents))


def _paths_of(entry: str | Path) -> list[Path]:
    path = Path(entry)
    if path.is_dir():
        matches = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
    elif path.is_file():
        matches = [path]
    else:
        names = glob.glob(str(entry), recursive=True)
        matches = sorted(Path(name) for name in names if os.path.isfile(name))
    if not matches:
        raise UnsupportedError(
            f"no input was found at {str(entry)!r}. Give files, globs, or directories with "
            f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)} files (each may end in .gz)."
        )
    return matches


def read_lines(path: Path, offset: int = 0, number: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number, the content and the end offset of each non-empty line of a file.

    Args:
        path: File; ``.gz`` is decompressed.
        offset: Offset of the first line to read, in the decompressed file. A ``.gz`` file is
            decompressed from its beginning (bytes).
    """
    try:
        with _open(path) as file:
            file.seek(offset)
            yield from _lines(file, offset, number)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CorruptDataError:
    return CorruptDataError(f"{path} cannot be read to its end: {error}. Copy it again.")


def parse_text(content: bytes, place: str, json_key: str | None) -> str:
    """Return the text of a document.

    Args:
        json_key: Key of the text in JSON lines; None for plain text.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptDataError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}. Convert it to UTF-8."
        ) from None
    if json_key is None:
        return text
    try:
        entry = json.loads(text, object_pairs_hook=lambda pairs: _object_of(pairs, json_key))
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at character {error.pos + 1}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        raise CorruptDataError(
            f"{place} is not valid JSON: {reason}. Each line must be one JSON object."
        ) from None
    document = text_under(entry, place, json_key)
    try:
        document.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorruptDataError(
            f"{place} is not valid text: character {error.start + 1} is half of a surrogate pair. "
            "Repair the line."
        ) from None
    return document


def text_under(entry: Any, place: str, json_key: str) -> str:
    """Return the text of a JSON object."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get(json_key), str):
        keys = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise CorruptDataError(
            f"{place} has no text under the key {json_key!r}: {keys}. Name the key with --json-key."
        )
    text: str = entry[json_key]
    return text


def _object_of(pairs: list[tuple[str, Any]], json_key: str) -> dict[str, Any]:
    if sum(name == json_key for name, _ in pairs) > 1:
        raise ValueError(f"the key {json_key!r} occurs twice in one object")
    return dict(pairs)


def _lines(file: BinaryIO, offset: int, number: int) -> Iterator[tuple[int, bytes, int]]:
    for line in file:
        number += 1
        offset += len(line)
        content = line.rstrip(b"\r\n")
        # Empty lines are not documents; an empty document is written as {"text": ""}.
        if content.strip():
            yield number, content, offset


def _split(file: BinaryIO, kind: Kind) -> Iterator[tuple[int, bytes]]:
    if kind == "file":
        yield 1, file.read()
        return
    if kind != "paragraph":
        for number, content, _ in _lines(file, 0, 0):
            yield number, content
        return
    start = 1
    lines: list[bytes] = []
    for number, line in enumerate(file, start=1):
        if line.strip():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield start, b"".join(lines).rstrip(b"\r\n")
            lines = []
    if lines:
        yield start, b"".join(lines).rstrip(b"\r\n")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path))
    return open(path, "rb")


def _plain_suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _is_text(path: Path) -> bool:
    return _plain_suffix(path) in JSON_SUFFIXES + TEXT_SUFFIXES
