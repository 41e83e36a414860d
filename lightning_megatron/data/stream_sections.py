"""Sections of a stream of rows, which do not depend on the position at which reading begins."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np

from lightning_megatron.data.row_files import BEGINNING, FilePosition, FileRow, read_rows
from lightning_megatron.data.row_tokens import EncodedRow, RowEncoder, RowTokens, row_number
from lightning_megatron.data.worker_pool import map_in_order

#: Number of rows that a process encodes at a time (rows).
_PIECE = 64


class SectionPosition(NamedTuple):
    """Position between two sections of a stream.

    Args:
        offset: Bytes of the current file before it; 0 in files without lines (bytes).
    """

    passes: int = 0
    sections: int = 0
    files: int = 0
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Section:
    """Consecutive rows of a stream, all of one pass over the files."""

    start: SectionPosition
    end: SectionPosition
    rows: RowTokens

    @property
    def ends_pass(self) -> bool:
        """Whether this section is the last one of its pass."""
        return self.end.passes > self.start.passes


class _Piece(NamedTuple):
    """Numbered rows to encode together, and the position after them if they end a section."""

    rows: tuple[tuple[int, FileRow], ...]
    end: SectionPosition | None


@dataclass(frozen=True)
class RowStream:
    """Endless passes over files of rows, divided into sections.

    Args:
        files: Files of rows.
        encoder: Picklable encoder of the rows.
        section_size: Rows of a section; the last section of a pass may have fewer (rows).
        seed: Seed of the order of the files in each pass; None keeps their order.
        num_workers: Worker processes that encode rows; 0 encodes in the process that reads.
    """

    files: tuple[Path, ...]
    encoder: RowEncoder
    section_size: int
    seed: int | None
    num_workers: int

    def sections(self, start: SectionPosition, stop: Event) -> Iterator[Section]:
        """Yield the sections from a position on, endlessly.

        Args:
            start: Position of the first section.
            stop: Event that stops reading.

        Raises:
            CorruptDataError: If a row cannot be encoded; the message names file and row.
        """
        rows: list[EncodedRow] = []
        encode = partial(_encoded, encoder=self.encoder)
        encoded = map_in_order(encode, self._pieces(start, stop), self.num_workers)
        for encoded_rows, end in encoded:
            rows += encoded_rows
            if end is not None:
                yield Section(start, end, RowTokens.of(rows))
                start = end
                rows = []

    def _pieces(self, start: SectionPosition, stop: Event) -> Iterator[_Piece]:
        while not stop.is_set():
            rows: list[tuple[int, FileRow]] = []
            num_read = 0
            sections = start.sections
            order = self._order(start.passes)
            for place, file in enumerate(order[start.files :], start.files):
                first = (
                    FilePosition(start.number, start.offset) if place == start.files else BEGINNING
                )
                for row in read_rows(self.files[file], first, self.encoder.document):
                    rows.append((row_number(file, row), row))
                    num_read += 1
                    ends = num_read == self.section_size
                    if ends or len(rows) == _PIECE:
                        sections += ends
                        position = SectionPosition(start.passes, sections, place, *row.end)
                        yield _Piece(tuple(rows), position if ends else None)
                        if stop.is_set():
                            return
                        rows = []
                        num_read = 0 if ends else num_read
            start = SectionPosition(start.passes + 1)
            yield _Piece(tuple(rows), start)

    def _order(self, number: int) -> list[int]:
        """Return the indices of the files in the order of a pass."""
        if self.seed is None:
            return list(range(len(self.files)))
        return np.random.RandomState([self.seed, number, 5]).permutation(len(self.files)).tolist()


class SectionReader:
    """Reader of the sections of a stream; with workers, a thread prefetches the next section."""

    def __init__(self, stream: RowStream, start: SectionPosition) -> None:
        self._stop = Event()
        self._sections = stream.sections(start, self._stop)
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[Section] | None = None
        if stream.num_workers:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-sections")

    def read(self) -> Section:
        """Return the next section."""
        # Read the first section here, so that the worker processes start in the main thread.
        section = next(self._sections) if self._next is None else self._next.result()
        if self._thread is not None:
            self._next = self._thread.submit(next, self._sections)
        return section

    def close(self) -> None:
        """Stop reading and end the workers."""
        self._stop.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._sections.close()  # type: ignore[attr-defined]


def _encoded(piece: _Piece, encoder: RowEncoder) -> tuple[list[EncodedRow], SectionPosition | None]:
    return [EncodedRow(number, encoder.encode_row(row)) for number, row in piece.rows], piece.end
