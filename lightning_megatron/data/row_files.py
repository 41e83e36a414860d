"""Rows of JSON lines, Parquet or folders of datasets, read from any position in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_megatron.data.input_files import Document, kind_of, read_pieces
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.strict_json import parse_object

#: Last sentence of an error about a row of a file.
REMEDY = "Repair the row, or remove it."
#: Number of Parquet rows to decode at a time (rows).
_ROWS_PER_BATCH = 1024


class FilePosition(NamedTuple):
    """Position between two rows of a file.

    Args:
        number: Number of lines before it in JSON lines and text, or of rows in other files.
        offset: Decompressed bytes before it in JSON lines and text, at which a reader can continue;
            0 in other files (bytes).
    """

    number: int = 0
    offset: int = 0


BEGINNING = FilePosition()


class FileRow(NamedTuple):
    """Row of a file, not yet parsed.

    Args:
        content: Line of JSON lines or document of plain text, or fields of a row of another file.
        end: Position after the row.
        is_json: Whether the content is a line of JSON lines.
    """

    place: str
    content: bytes | Mapping[str, Any]
    end: FilePosition
    is_json: bool = True

    def text(self, json_key: str) -> str:
        """Return the text of a document.

        Args:
            json_key: Key, or column, of the text in files of rows and JSON lines.

        Raises:
            CorruptDataError: If the row has no text with this key, or text is not UTF-8. The
                message names file and line.
        """
        if isinstance(self.content, bytes):
            return _parse_text(self.content, self.place, json_key if self.is_json else None)
        return _text_under(self.content, self.place, json_key)

    @property
    def num_bytes(self) -> int:
        """Size of the content (bytes)."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return sum(len(text) for text in self.content.values() if isinstance(text, str))

    def fields(self) -> dict[str, Any]:
        """Return the fields that have a value.

        Raises:
            CorruptDataError: If a line is not a JSON object.
        """
        content = self.content
        if isinstance(content, bytes):
            content = parse_object(content, self.place, REMEDY)
        # Parquet has a value for every column and field; missing values are None.
        return {name: value for name, value in content.items() if value is not None}


def read_rows(
    path: Path, start: FilePosition = BEGINNING, document: Document = "file"
) -> Iterator[FileRow]:
    """Yield the rows of a file from a position on.

    Args:
        path: File of JSON lines or plain text (also ``.gz``, ``.zst``) or Parquet, or folder of
            ``save_to_disk``.
        document: Unit of plain text that is a row.
    """
    kind = kind_of(path, document)
    if kind != "row":
        for piece in read_pieces(path, kind, start.offset, start.number):
            end = FilePosition(piece.end_line, piece.end)
            yield FileRow(f"{path}:{piece.line}", piece.content, end, kind == "json")
        return
    read = dataset_rows if path.is_dir() else _parquet_rows
    for number, row in enumerate(read(path, start.number), start.number + 1):
        yield FileRow(f"{path}, row {number}", row, FilePosition(number), False)


def _parquet_rows(path: Path, skipped: int) -> Iterator[Mapping[str, Any]]:
    parquet = import_extra("pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(path) as file:
            groups = list(range(file.num_row_groups))
            # Skip row groups before the first row without decoding them.
            while groups and file.metadata.row_group(groups[0]).num_rows <= skipped:
                skipped -= file.metadata.row_group(groups.pop(0)).num_rows
            # Older versions of pyarrow refuse an empty list.
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=groups) if groups else ():
                yield from batch.slice(skipped).to_pylist()
                skipped = max(skipped - len(batch), 0)
    # Errors of this package are subclasses of ValueError, and keep their messages.
    except (CorruptDataError, UnsupportedError):
        raise
    # pyarrow raises ValueError and OSError for damaged files.
    except (ValueError, OSError) as error:
        raise CorruptDataError(
            f"{path} cannot be read as Parquet: {error}. Copy it again."
        ) from error


def dataset_rows(path: Path, skipped: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a folder, in order.

    Args:
        path: Folder that ``Dataset.save_to_disk`` has written.
        skipped: Number of rows to skip at the start (rows).
    """
    datasets = import_extra("datasets", "datasets")
    try:
        # The folder may record a format such as "torch".
        dataset = datasets.load_from_disk(str(path)).with_format(None)
        # Arrow files are memory-mapped, so a dataset may be larger than the memory.
        if skipped < len(dataset):
            yield from dataset.select(range(skipped, len(dataset)))
    # pyarrow and datasets raise these exceptions for damaged and missing files.
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{path} cannot be read as a folder of datasets: {error}. Copy it again, or save it "
            "again by save_to_disk."
        ) from error


def _parse_text(content: bytes, place: str, json_key: str | None) -> str:
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
    document = _text_under(entry, place, json_key)
    try:
        document.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorruptDataError(
            f"{place} is not valid text: character {error.start + 1} is half of a surrogate pair. "
            "Repair the line."
        ) from None
    return document


def _text_under(entry: Any, place: str, json_key: str) -> str:
    """Return the text of a JSON object."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get(json_key), str):
        keys = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise CorruptDataError(
            f"{place} has no text under the key {json_key!r}: {keys}. Name the key with --json_key."
        )
    text: str = entry[json_key]
    return text


def _object_of(pairs: list[tuple[str, Any]], json_key: str) -> dict[str, Any]:
    if sum(name == json_key for name, _ in pairs) > 1:
        raise ValueError(f"the key {json_key!r} occurs twice in one object")
    return dict(pairs)
