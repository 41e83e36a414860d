"""Numbered samples of a stream, of which only a few sections are in memory at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.chat_samples import ConversationRows
from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.data.packing import pack_once
from lightning_megatron.data.stream_sections import (
    RowStream,
    Section,
    SectionPosition,
    SectionReader,
)
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError


class StreamCounts(NamedTuple):
    """Counts of the rows, tokens and samples of a pass over a stream so far.

    Args:
        num_read: Rows of files that were read (rows).
        num_cut: Rows of files whose end was cut off (rows).
        num_left_out: Rows of files that were too long or too short, and were left out (rows).
        num_tokens: Tokens of the remaining rows (tokens).
        num_answers: Tokens of answers among them (tokens).
        num_samples: Packed rows of these tokens (samples).
    """

    num_read: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_answers: int = 0
    num_samples: int = 0

    def after(self, section: Section, num_samples: int) -> StreamCounts:
        """Return the counts after one more section.

        Args:
            section: The section.
            num_samples: Number of packed rows of the section (samples).
        """
        texts = section.texts
        num_kept = len(texts.bounds) - 1
        added = (
            section.num_read,
            section.num_cut,
            section.num_read - num_kept,
            int(texts.bounds[-1]),
            int(texts.is_answer.sum()),
            num_samples,
        )
        return StreamCounts(*(one + more for one, more in zip(self, added, strict=True)))

    def with_samples(self, summary: str, seq_length: int) -> str:
        """Return a summary of the rows of files, with the number of packed rows added.

        Args:
            summary: Numbers of rows that were read and left out.
            seq_length: Tokens that a packed row predicts (tokens).
        """
        full = self.num_tokens / max(self.num_samples * (seq_length + 1), 1)
        return f"{summary}, in {self.num_samples} rows, which are {full:.1%} full"


class RowMessages(Protocol):
    """Log and error messages about the rows of a stream."""

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many rows were read and left out.

        Args:
            counts: Counts of a pass.
            seq_length: Tokens that a row predicts (tokens).
        """

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for a pass without any row to train on.

        Args:
            names: Names of the files.
            counts: Counts of the pass.
            seq_length: Tokens that a row predicts (tokens).
        """


@dataclass(frozen=True)
class SectionStart:
    """State of a stream before a section, from which reading can continue.

    Args:
        position: Position of the section.
        first: Number of the first sample of the section.
        counts: Counts of the current pass before the section.
    """

    position: SectionPosition = SectionPosition()
    first: int = 0
    counts: StreamCounts = StreamCounts()

    def state(self) -> dict[str, int]:
        """Return all fields as whole numbers, for a checkpoint."""
        return {**self.position._asdict(), **self.counts._asdict(), "first": self.first}

    @classmethod
    def of(cls, state: Any) -> SectionStart:
        """Restore the state of a checkpoint.

        Args:
            state: Return value of :meth:`state`.

        Raises:
            CheckpointMismatchError: If :meth:`state` did not return this value.
        """
        names = {*SectionPosition._fields, *StreamCounts._fields, "first"}
        if not (
            isinstance(state, Mapping)
            and set(state) == names
            and all(type(value) is int and 0 <= value < 2**63 for value in state.values())
        ):
            raise CheckpointMismatchError(
                f"the stream in the data position of a checkpoint must have {sorted(names)} as "
                f"whole numbers of at least 0: it is {ascii(state)[:80]}. Use another checkpoint."
            )
        return cls(
            SectionPosition(**{name: state[name] for name in SectionPosition._fields}),
            state["first"],
            StreamCounts(**{name: state[name] for name in StreamCounts._fields}),
        )


class _LoadedSection(NamedTuple):
    """Section in memory: the number of its first sample, and its packed rows."""

    first: int
    rows: ConversationRows


class StreamedSamples:
    """Packed rows of a stream, which are read with ascending numbers.

    Sample n depends only on the files, the seed and n. A smaller number than the last one can be
    read again, which rereads the stream from the start of its section.

    Args:
        stream: Stream of rows of files; each row is a conversation or a document.
        messages: Log and error messages about these rows.
        seq_length: Tokens that a packed row predicts (tokens).
        num_windows: Windows of a packed row; 0 puts one conversation or document into each row.
        most_pieces: Largest number of conversations or documents, and gaps, in a packed row.
        key: Fields that identify files, tokenizer and options.
        report: Function that takes a line about the rows that were read, and whether rows were cut
            or left out.
        num_samples: Samples of the run; None means that the run has a number of passes instead
            (samples).
    """

    def __init__(
        self,
        stream: RowStream,
        messages: RowMessages,
        seq_length: int,
        num_windows: int,
        most_pieces: int,
        key: Mapping[str, Any],
        report: Callable[[str, bool], None],
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.most_documents = most_pieces if num_windows else 1
        self.order_key = cache_key({"stream": dict(key)})
        self._stream = stream
        self._messages = messages
        self._num_windows = num_windows
        self._report = report
        self._num_samples = num_samples
        #: Starts of the sections that were read, and of the next one.
        self._starts = [SectionStart()]
        self._loaded: list[_LoadedSection] = []
        self._reader: SectionReader | None = None
        #: Number of passes whose end was reported.
        self._num_reported = 0
        #: Whether a report has said that rows were cut or left out.
        self._reported_loss = False

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the number of samples of a stream is unknown")
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        found = self._section_of(index)
        return found.rows[index - found.first]

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each conversation and gap in a row, in order."""
        found = self._section_of(index)
        return found.rows.lengths(index - found.first)

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers.

        Args:
            index: Number of the row.
        """
        found = self._section_of(index)
        return found.rows.is_answer(index - found.first)

    def pass_of(self, index: int) -> int:
        """Return the number of the pass over the files to which a row belongs.

        Args:
            index: Number of the row.
        """
        while index >= self._starts[-1].first:
            self._read_next()
        return self._start_of(index).position.passes

    def is_in_pass(self, index: int, number: int) -> bool:
        """Return whether a row belongs to a pass, without reading sections of later passes.

        Args:
            index: Number of the row, which must not belong to an earlier pass.
            number: Number of the pass.
        """
        while index >= self._starts[-1].first and self._starts[-1].position.passes <= number:
            self._read_next()
        return self._start_of(index).position.passes == number

    def free_before(self, index: int) -> None:
        """Free the memory of sections that end before a row.

        Args:
            index: Number of the row.
        """
        while len(self._loaded) > 1 and self._loaded[1].first <= index:
            del self._loaded[0]

    def state_at(self, index: int) -> dict[str, int]:
        """Return the state from which a restored stream continues with a row.

        Args:
            index: Number of a row that was read, or of the next row.
        """
        return self._start_of(index).state()

    def restore(self, state: Any) -> None:
        """Continue from the section of a checkpoint.

        Args:
            state: Return value of :meth:`state_at`.

        Raises:
            CheckpointMismatchError: If :meth:`state_at` did not return this value.
        """
        self.close()
        self._starts = [SectionStart(), SectionStart.of(state)]
        self._num_reported = self._starts[-1].position.passes

    def end_summary(self, num_samples: int) -> str | None:
        """Return a line about the unfinished pass and the unused rows of a run; None without both.

        Args:
            num_samples: Samples that were trained on (samples).
        """
        last = self._starts[-1]
        left = max(last.first - num_samples, 0)
        lines = []
        if last.counts.num_read:
            name = self._pass_name(last.position.passes)
            lines.append(f"{name} stopped: {self._summary(last.counts)}.")
        if left:
            lines.append(f"{left} rows of {self._names} were read and not trained on.")
        return " ".join(lines) or None

    def close(self) -> None:
        """Stop reading, and stop the worker processes."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._loaded = []

    def _start_of(self, index: int) -> SectionStart:
        return self._starts[bisect_right(self._starts, index, key=lambda one: one.first) - 1]

    def _section_of(self, index: int) -> _LoadedSection:
        if index < (self._loaded[0].first if self._loaded else self._starts[-1].first):
            self.close()
            del self._starts[bisect_right(self._starts, index, key=lambda one: one.first) :]
        while index >= self._starts[-1].first:
            self._read_next()
        return self._loaded[bisect_right(self._loaded, index, key=lambda one: one.first) - 1]

    def _read_next(self) -> None:
        start = self._starts[-1]
        if self._reader is None:
            self._reader = SectionReader(self._stream, start.position)
        section = self._reader.read()
        position = section.start
        random = None
        if self._stream.seed is not None:
            # The first section of a pass is shuffled like a pass without streaming.
            key = [self._stream.seed, position.passes, 4, position.sections]
            random = np.random.RandomState(key if position.sections else key[:3])
        index = pack_once(
            np.diff(section.texts.bounds),
            self.seq_length,
            random,
            self._num_windows > 0,
            max(self._num_windows, 1),
            self.most_documents,
        )
        rows = ConversationRows(section.texts, index)
        counts = start.counts.after(section, len(rows))
        self._report_counts(position, section.ends_pass, counts)
        self._loaded.append(_LoadedSection(start.first, rows))
        after = StreamCounts() if section.ends_pass else counts
        self._starts.append(SectionStart(section.end, start.first + len(rows), after))

    def _report_counts(
        self, position: SectionPosition, ends_pass: bool, counts: StreamCounts
    ) -> None:
        """Report the end of a pass, and the first section with rows that were cut or left out."""
        has_loss = counts.num_cut + counts.num_left_out > 0
        if ends_pass and not counts.num_samples:
            raise self._messages.empty_error(self._names, counts, self.seq_length)
        name = self._pass_name(position.passes)
        if ends_pass and position.passes >= self._num_reported:
            self._num_reported = position.passes + 1
            self._report(f"{name} ended: {self._summary(counts)}.", has_loss)
        elif has_loss and not self._reported_loss:
            self._report(f"{name} so far: {self._summary(counts)}.", True)
        self._reported_loss = self._reported_loss or has_loss

    def _summary(self, counts: StreamCounts) -> str:
        return counts.with_samples(self._messages.summary(counts, self.seq_length), self.seq_length)

    def _pass_name(self, passes: int) -> str:
        return f"Pass {passes + 1} over {self._names}"

    @property
    def _names(self) -> str:
        files = self._stream.files
        return f"{files[0]} and {len(files) - 1} more files" if len(files) > 1 else str(files[0])
