"""Documents of raw text: JSON lines, rows of Parquet and of datasets, or plain text with a document
per file, line or paragraph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lightning_megatron.data.input_files import (
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    Document,
    find_files,
    is_packed,
)
from lightning_megatron.data.row_files import FileRow, read_rows
from lightning_megatron.data.worker_pool import map_in_order

Result = TypeVar("Result")
#: Size at which a chunk ends (bytes).
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RawChunk:
    """Undecoded documents of one file; a worker process decodes them.

    Args:
        path: File of the documents.
        rows: Documents with their places.
    """

    path: str
    rows: tuple[FileRow, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes read, without additional empty lines between documents (bytes)."""
        # Each line was followed by at least one line feed.
        return sum(row.num_bytes + row.is_json for row in self.rows)


class TextFiles:
    """Files of raw text, read by suffix: JSON lines, Parquet, folders of datasets or plain text.

    ``.gz`` and ``.zst`` are decompressed. ``preprocess`` and ``TextDataModule`` read such files.

    Args:
        inputs: Files, directories and globs. The files of a directory or glob are sorted by name.

    Raises:
        UnsupportedError: If an input matches no file, or one with another suffix.
    """

    def __init__(self, inputs: Sequence[str | Path]) -> None:
        self.paths = find_files(inputs, "documents", (*ROW_SUFFIXES, *TEXT_SUFFIXES))

    @property
    def num_bytes(self) -> int | None:
        """Size of all files; None if one of them has an unknown number of bytes of text (bytes)."""
        has_unknown = any(map(is_packed, self.paths))
        return None if has_unknown else sum(path.stat().st_size for path in self.paths)

    def texts(self, document: Document, json_key: str) -> Iterator[tuple[str, str]]:
        """Yield the place, which is file and line, and the text of each document.

        Args:
            document: Unit of plain text that is a document.
            json_key: Key of the text in JSON lines, or its column.

        Raises:
            CorruptDataError: If a file is damaged, a line is not a JSON object with this key, or
                text is not UTF-8. The message names file and line.
        """
        for path in self.paths:
            for row in read_rows(path, document=document):
                yield row.place, row.text(json_key)

    def map_chunks(
        self, function: Callable[[RawChunk], Result], document: Document, workers: int = 1
    ) -> Iterator[Result]:
        """Yield the results of a function for chunks of whole documents, in order.

        Args:
            function: Picklable function.
            document: Unit of plain text that is a document.
            workers: Number of processes that call the function. It does not affect the result.

        Raises:
            CorruptDataError: If a file cannot be opened, or is a damaged compressed one.
        """
        return map_in_order(function, self.chunks(document), workers if workers > 1 else 0)

    def chunks(self, document: Document) -> Iterator[RawChunk]:
        """Yield the documents in chunks, each with documents of one file.

        Args:
            document: Unit of plain text that is a document.

        Raises:
            CorruptDataError: If a file cannot be opened, or is a damaged compressed one.
        """
        for path in self.paths:
            rows: list[FileRow] = []
            size = 0
            for row in read_rows(path, document=document):
                rows.append(row)
                size += row.num_bytes
                if size >= CHUNK_BYTES:
                    yield RawChunk(str(path), tuple(rows))
                    rows = []
                    size = 0
            if rows:
                yield RawChunk(str(path), tuple(rows))
