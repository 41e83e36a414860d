"""Numbered samples of a stream, of which only a few sections are in memory at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.data.row_tokens import RowTokens, StreamCounts
from lightning_megatron.data.stream_sections import RowStream, SectionPosition, SectionReader
from lightning_megatron.errors import CheckpointMismatchError


@dataclass(frozen=True)
class SectionStart:
    """State of a stream before a section, from which reading can continue."""

    position: SectionPosition = SectionPosition()
    first: int = 0
    counts: StreamCounts = StreamCounts()

    def state(self) -> dict[str, int]:
        """Return all fields as whole numbers, for a checkpoint."""
        return {**self.position._asdict(), **self.counts._asdict(), "first": self.first}

    @classmethod
    def of(cls, state: Any) -> SectionStart:
        """Restore the state of a checkpoint."""
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
        position = SectionPosition(*map(state.__getitem__, SectionPosition._fields))
        counts = StreamCounts(*map(state.__getitem__, StreamCounts._fields))
        return cls(position, state["first"], counts)


Found = TypeVar("Found", bound=Sized)


@dataclass(frozen=True, eq=False)
class _LoadedSection(Generic[Found]):
    """Section in memory: the number of its first sample, and its samples."""

    first: int
    samples: Found


class StreamedSamples(ABC, Generic[Found]):
    """Samples of a stream, which are read with ascending numbers.

    Sample n depends only on the files, the seed and n. A smaller number than the last one can be
    read again, which rereads the stream from the start of its section. A subclass makes samples of
    the rows of a section.

    Args:
        stream: Stream of rows of files.
        key: Fields that identify files, tokenizer and options.
        report: Function that takes a line about the rows that were read, and whether rows were cut
            or left out.
        num_samples: Samples of the run; None means that the run has a number of passes instead
            (samples).
    """

    def __init__(
        self,
        stream: RowStream,
        key: Mapping[str, Any],
        report: Callable[[str, bool], None],
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = stream.encoder.seq_length
        self.order_key = cache_key({"stream": dict(key)})
        self._stream = stream
        self._report = report
        self._num_samples = num_samples
        #: Starts of the sections that were read, and of the next one.
        self._starts = [SectionStart()]
        self._loaded: list[_LoadedSection[Found]] = []
        self._reader: SectionReader | None = None
        #: Number of passes whose end was reported.
        self._num_reported = 0
        #: Whether a report has said that rows were cut or left out.
        self._reported_loss = False

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the number of samples of a stream is unknown")
        return self._num_samples

    def in_section(self, index: int) -> tuple[Found, int]:
        """Return the samples of the section that has a sample, and its number among them."""
        if index < (self._loaded[0].first if self._loaded else self._starts[-1].first):
            self.close()
            del self._starts[bisect_right(self._starts, index, key=lambda section: section.first) :]
        while index >= self._starts[-1].first:
            self._read_next()
        section = self._loaded[
            bisect_right(self._loaded, index, key=lambda section: section.first) - 1
        ]
        return section.samples, index - section.first

    def pass_of(self, index: int) -> int:
        """Return the number of the pass over the files to which a row belongs."""
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
        """Free the memory of sections that end before a row."""
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
        return self._starts[
            bisect_right(self._starts, index, key=lambda section: section.first) - 1
        ]

    @abstractmethod
    def samples_of(self, rows: RowTokens, random: np.random.RandomState | None) -> Found:
        """Return the samples of a section.

        Args:
            random: Random number generator that shuffles rows and samples; None keeps their order.
        """

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
        samples = self.samples_of(section.rows, random)
        counts = start.counts.after(section.rows, len(samples))
        self._report_counts(position, section.ends_pass, counts)
        self._loaded.append(_LoadedSection(start.first, samples))
        after = StreamCounts() if section.ends_pass else counts
        self._starts.append(SectionStart(section.end, start.first + len(samples), after))

    def _report_counts(
        self, position: SectionPosition, ends_pass: bool, counts: StreamCounts
    ) -> None:
        """Report the end of a pass, and the first section with rows that were cut or left out."""
        has_loss = counts.num_cut + counts.num_left_out > 0
        if ends_pass and not counts.num_samples:
            raise self._stream.encoder.empty_error(self._names, counts)
        name = self._pass_name(position.passes)
        if ends_pass and position.passes >= self._num_reported:
            self._num_reported = position.passes + 1
            self._report(f"{name} ended: {self._summary(counts)}.", has_loss)
        elif has_loss and not self._reported_loss:
            self._report(f"{name} so far: {self._summary(counts)}.", True)
        self._reported_loss = self._reported_loss or has_loss

    def _summary(self, counts: StreamCounts) -> str:
        return self._stream.encoder.summary(counts)

    def _pass_name(self, passes: int) -> str:
        return f"Pass {passes + 1} over {self._names}"

    @property
    def _names(self) -> str:
        files = self._stream.files
        return f"{files[0]} and {len(files) - 1} more files" if len(files) > 1 else str(files[0])
