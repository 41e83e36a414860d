"""Sections of a stream of rows, which do not depend on the position at which reading begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np

from lightning_megatron.data.conversation_encoder import EncodedText, TextTokens
from lightning_megatron.data.row_files import BEGINNING, FilePosition, FileRow, read_rows
from lightning_megatron.data.worker_pool import map_in_order

EncodeRow = Callable[[FileRow], EncodedText | None]
#: Number of rows that a process encodes at a time (rows).
_PIECE = 64


class SectionPosition(NamedTuple):
    """Position between two sections of a stream.

    Args:
        passes: Whole passes over the files before it.
        sections: Sections of the current pass before it.
        files: Whole files of the current pass before it.
        number: Lines or rows of the current file before it.
        offset: Bytes of the current file before it; 0 in files without lines (bytes).
    """

    passes: int = 0
    sections: int = 0
    files: int = 0
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Section:
    """Consecutive rows of a stream, all of one pass over the files.

    Args:
        start: Position of the first row.
        end: Position of the next section.
        texts: Tokens of the rows that were not left out.
        num_read: Number of rows that were read (rows).
        num_cut: Number of rows whose end was cut off (rows).
    """

    start: SectionPosition
    end: SectionPosition
    texts: TextTokens
    num_read: int
    num_cut: int

    @classmethod
    def of(
        cls, start: SectionPosition, end: SectionPosition, found: Sequence[EncodedText | None]
    ) -> Section:
        """Return the section of encoded rows.

        Args:
            start: Position of the first row.
            end: Position of the next section.
            found: Tokens of each row; None for a row that is left out.
        """
        kept = [text for text in found if text is not None]
        return cls(start, end, TextTokens.of(kept), len(found), sum(text.was_cut for text in kept))

    @property
    def ends_pass(self) -> bool:
        """Whether this section is the last one of its pass."""
        return self.end.passes > self.start.passes


class _Piece(NamedTuple):
    """Rows that are encoded together, and the position after them if they end a section."""

    rows: tuple[FileRow, ...]
    end: SectionPosition | None


@dataclass(frozen=True)
class RowStream:
    """Endless passes over files of rows, divided into sections.

    Args:
        files: Files of rows.
        encode: Function that returns the tokens of a row, or None to leave the row out. It must be
            picklable.
        section_size: Rows of a section; the last section of a pass may have fewer (rows).
        seed: Seed of the order of the files in each pass; None keeps their order.
        num_workers: Worker processes that encode rows; 0 encodes in the process that reads.
    """

    files: tuple[Path, ...]
    encode: EncodeRow
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
        texts: list[EncodedText | None] = []
        encoded = map_in_order(
            partial(_encoded, encode=self.encode), self._pieces(start, stop), self.num_workers
        )
        for found, end in encoded:
            texts += found
            if end is not None:
                yield Section.of(start, end, texts)
                start = end
                texts = []

    def _pieces(self, start: SectionPosition, stop: Event) -> Iterator[_Piece]:
        while not stop.is_set():
            rows: list[FileRow] = []
            num_read = 0
            sections = start.sections
            order = self._order(start.passes)
            for at, path in enumerate(order[start.files :], start.files):
                first = FilePosition(start.number, start.offset) if at == start.files else BEGINNING
                for row in read_rows(path, first):
                    rows.append(row)
                    num_read += 1
                    ends = num_read == self.section_size
                    if ends or len(rows) == _PIECE:
                        sections += ends
                        position = SectionPosition(start.passes, sections, at, *row.end)
                        yield _Piece(tuple(rows), position if ends else None)
                        if stop.is_set():
                            return
                        rows = []
                        num_read = 0 if ends else num_read
            start = SectionPosition(start.passes + 1)
            yield _Piece(tuple(rows), start)

    def _order(self, number: int) -> list[Path]:
        """Return the files in the order of a pass."""
        if self.seed is None:
            return list(self.files)
        random = np.random.RandomState([self.seed, number, 5])
        return [self.files[at] for at in random.permutation(len(self.files))]


class SectionReader:
    """Reader of the sections of a stream; with workers, a thread prefetches the next section.

    Args:
        stream: Stream of rows.
        start: Position of the first section.
    """

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


def _encoded(
    piece: _Piece, encode: EncodeRow
) -> tuple[list[EncodedText | None], SectionPosition | None]:
    return [encode(row) for row in piece.rows], piece.end
