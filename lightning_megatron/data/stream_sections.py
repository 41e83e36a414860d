"""Sections of a stream of rows of files: the same ones from any place at which reading begins."""

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
from lightning_megatron.data.row_files import BEGINNING, FilePlace, FileRow, read_rows
from lightning_megatron.data.worker_pool import map_in_order

EncodeRow = Callable[[FileRow], EncodedText | None]
#: Rows that a process encodes at a time (rows).
_PIECE = 64


class StreamPlace(NamedTuple):
    """Place between two sections of a stream.

    Args:
        passes: Whole passes over the files before it.
        sections: Sections of its pass before it.
        files: Whole files of its pass before it.
        number: Lines or rows of its file before it.
        offset: Bytes of its file before it; 0 in files that are no lines (bytes).
    """

    passes: int = 0
    sections: int = 0
    files: int = 0
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Section:
    """Next rows of a stream, all of one pass over the files.

    Args:
        start: Place of its first row.
        end: Place of the next section.
        texts: Tokens of the rows that were not left out.
        num_read: Rows that were read (rows).
        num_cut: Rows that lost their end (rows).
    """

    start: StreamPlace
    end: StreamPlace
    texts: TextTokens
    num_read: int
    num_cut: int

    @classmethod
    def of(
        cls, start: StreamPlace, end: StreamPlace, found: Sequence[EncodedText | None]
    ) -> Section:
        """Join rows to a section.

        Args:
            start: Place of the first one.
            end: Place of the next section.
            found: Tokens of the rows; None for those that are left out.
        """
        kept = [text for text in found if text is not None]
        return cls(start, end, TextTokens.of(kept), len(found), sum(text.was_cut for text in kept))

    @property
    def ends_pass(self) -> bool:
        """Return whether no section of the same pass follows."""
        return self.end.passes > self.start.passes


class _Piece(NamedTuple):
    """Rows that are encoded together, and the place behind them if they end a section."""

    rows: tuple[FileRow, ...]
    end: StreamPlace | None


@dataclass(frozen=True)
class RowStream:
    """Passes over files of rows, cut into sections.

    Args:
        files: Files of rows.
        encode: Function from a row to its tokens, or to None if it is left out. It can be pickled.
        section_size: Rows of a section; the last one of a pass may have fewer (rows).
        seed: Seed of the order of the files in each pass; None keeps their order.
        num_workers: Processes that encode; 0 encodes in the process that reads.
    """

    files: tuple[Path, ...]
    encode: EncodeRow
    section_size: int
    seed: int | None
    num_workers: int

    def sections(self, start: StreamPlace, stop: Event) -> Iterator[Section]:
        """Yield the sections from a place on, without end.

        Args:
            start: Place of the first one.
            stop: Event that ends reading.

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

    def _pieces(self, start: StreamPlace, stop: Event) -> Iterator[_Piece]:
        while not stop.is_set():
            rows: list[FileRow] = []
            num_read = 0
            sections = start.sections
            order = self._order(start.passes)
            for at, path in enumerate(order[start.files :], start.files):
                first = FilePlace(start.number, start.offset) if at == start.files else BEGINNING
                for row in read_rows(path, first):
                    rows.append(row)
                    num_read += 1
                    ends = num_read == self.section_size
                    if ends or len(rows) == _PIECE:
                        sections += ends
                        place = StreamPlace(start.passes, sections, at, *row.end)
                        yield _Piece(tuple(rows), place if ends else None)
                        if stop.is_set():
                            return
                        rows = []
                        num_read = 0 if ends else num_read
            start = StreamPlace(start.passes + 1)
            yield _Piece(tuple(rows), start)

    def _order(self, number: int) -> list[Path]:
        """Return the files in the order of a pass."""
        if self.seed is None:
            return list(self.files)
        random = np.random.RandomState([self.seed, number, 5])
        return [self.files[at] for at in random.permutation(len(self.files))]


class SectionReader:
    """Sections of a stream from a place on; with workers the next one is read in the background.

    Args:
        stream: Stream of rows.
        start: Place of the first section.
    """

    def __init__(self, stream: RowStream, start: StreamPlace) -> None:
        self._stop = Event()
        self._sections = stream.sections(start, self._stop)
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[Section] | None = None
        if stream.num_workers:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-sections")

    def read(self) -> Section:
        """Return the next section."""
        # The first section is read here, because workers should start from the main thread.
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
) -> tuple[list[EncodedText | None], StreamPlace | None]:
    return [encode(row) for row in piece.rows], piece.end
