"""Samples of a stream, numbered from 0, of which the sections around the last one are in memory."""

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
    SectionReader,
    StreamPlace,
)
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError


class StreamCounts(NamedTuple):
    """Account of what a pass over a stream has read so far.

    Args:
        num_read: Rows of files that were read (rows).
        num_cut: Rows of files that lost their end (rows).
        num_left_out: Rows of files that were too long or empty (rows).
        num_tokens: Tokens of the others (tokens).
        num_answers: Tokens of answers among them (tokens).
        num_samples: Packed rows that they make (samples).
    """

    num_read: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_answers: int = 0
    num_samples: int = 0

    def after(self, section: Section, num_samples: int) -> StreamCounts:
        """Return the account after one more section.

        Args:
            section: The section.
            num_samples: Rows that it makes (samples).
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

    def line(self, account: str, seq_length: int) -> str:
        """Return the account in words.

        Args:
            account: What was read and left out, in words.
            seq_length: Tokens that a row predicts (tokens).
        """
        full = self.num_tokens / max(self.num_samples * (seq_length + 1), 1)
        return f"{account}, in {self.num_samples} rows, which are full to {full:.1%}"


class RowKind(Protocol):
    """Words for what the rows of a stream are."""

    def account(self, counts: StreamCounts, seq_length: int) -> str:
        """Return in words what was read and left out.

        Args:
            counts: Account of a pass.
            seq_length: Tokens that a row predicts (tokens).
        """

    def nothing_left(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error of a pass that leaves nothing to train on.

        Args:
            names: Files.
            counts: Account of the pass.
            seq_length: Tokens that a row predicts (tokens).
        """


@dataclass(frozen=True)
class SectionStart:
    """What is known before a section is read: enough to go on from there.

    Args:
        place: Place of the section.
        first: Number of its first sample.
        counts: Account of its pass before it.
    """

    place: StreamPlace = StreamPlace()
    first: int = 0
    counts: StreamCounts = StreamCounts()

    def state(self) -> dict[str, int]:
        """Return the fields as whole numbers, for a checkpoint."""
        return {**self.place._asdict(), **self.counts._asdict(), "first": self.first}

    @classmethod
    def of(cls, state: Any) -> SectionStart:
        """Return the start that a checkpoint has.

        Args:
            state: Fields that :meth:`state` returned.

        Raises:
            CheckpointMismatchError: If they are no such fields.
        """
        names = {*StreamPlace._fields, *StreamCounts._fields, "first"}
        if not (
            isinstance(state, Mapping)
            and set(state) == names
            and all(type(value) is int and 0 <= value < 2**63 for value in state.values())
        ):
            raise CheckpointMismatchError(
                f"the stream in the data position of a checkpoint must have {sorted(names)} as "
                f"whole numbers from 0 on: it is {ascii(state)[:80]}. Use another checkpoint."
            )
        return cls(
            StreamPlace(**{name: state[name] for name in StreamPlace._fields}),
            state["first"],
            StreamCounts(**{name: state[name] for name in StreamCounts._fields}),
        )


class _Read(NamedTuple):
    """Section in memory: the number of its first sample, and its rows."""

    first: int
    rows: ConversationRows


class StreamedSamples:
    """Packed rows of a stream by their numbers, which rise.

    Sample n depends on the files, the seed and n alone. Numbers that were passed can be read again,
    from the start of their section on.

    Args:
        stream: Stream of rows of files, each a conversation or a document.
        kind: Words for these.
        seq_length: Tokens that a packed row predicts (tokens).
        num_windows: Windows of a row that has as many of them as fit; 0 puts one into a row.
        most_pieces: Largest number of them, and of gaps, in a row.
        key: Fields that name files, tokenizer and options.
        tell: Function that is called with a line about what was read, and whether something was
            cut or left out.
        num_samples: Samples of a run; None means that passes bound it (samples).
    """

    def __init__(
        self,
        stream: RowStream,
        kind: RowKind,
        seq_length: int,
        num_windows: int,
        most_pieces: int,
        key: Mapping[str, Any],
        tell: Callable[[str, bool], None],
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.most_documents = most_pieces if num_windows else 1
        self.order_key = cache_key({"stream": dict(key)})
        self._stream = stream
        self._kind = kind
        self._num_windows = num_windows
        self._tell = tell
        self._num_samples = num_samples
        #: Starts of the sections that were read, and of the next one.
        self._starts = [SectionStart()]
        self._read: list[_Read] = []
        self._reader: SectionReader | None = None
        self._num_told = 0
        self._told_loss = False

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the number of samples of a stream is unknown")
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        found = self._section_of(index)
        return found.rows[index - found.first]

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each conversation and gap in a row, in their order."""
        found = self._section_of(index)
        return found.rows.lengths(index - found.first)

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of a row belong to answers.

        Args:
            index: Number of the row.
        """
        found = self._section_of(index)
        return found.rows.is_answer(index - found.first)

    def pass_of(self, index: int) -> int:
        """Return the number of the pass over the files that a row belongs to.

        Args:
            index: Number of the row.
        """
        while index >= self._starts[-1].first:
            self._read_next()
        return self._start_of(index).place.passes

    def is_in_pass(self, index: int, number: int) -> bool:
        """Return whether a row belongs to a pass, without reading a section of a later one.

        Args:
            index: Number of the row, not before the pass.
            number: Number of the pass.
        """
        while index >= self._starts[-1].first and self._starts[-1].place.passes <= number:
            self._read_next()
        return self._start_of(index).place.passes == number

    def forget_before(self, index: int) -> None:
        """Free the memory of sections that end before a row.

        Args:
            index: Number of the row.
        """
        while len(self._read) > 1 and self._read[1].first <= index:
            del self._read[0]

    def state_at(self, index: int) -> dict[str, int]:
        """Return what a checkpoint needs to go on with a row that was read or is the next one.

        Args:
            index: Number of the row.
        """
        return self._start_of(index).state()

    def restore(self, state: Any) -> None:
        """Go on from the section of a checkpoint.

        Args:
            state: State that :meth:`state_at` returned.

        Raises:
            CheckpointMismatchError: If it is another one.
        """
        self.close()
        self._starts = [SectionStart(), SectionStart.of(state)]
        self._num_told = self._starts[-1].place.passes

    def rest_line(self, num_samples: int) -> str | None:
        """Return a line about what a run leaves over; None if it ends with a pass.

        Args:
            num_samples: Samples that were trained on (samples).
        """
        last = self._starts[-1]
        left = max(last.first - num_samples, 0)
        lines = []
        if last.counts.num_read:
            name = self._pass_name(last.place.passes)
            lines.append(f"{name} stopped: {self._line(last.counts)}.")
        if left:
            lines.append(f"{left} rows of {self._names} were read and not trained on.")
        return " ".join(lines) or None

    def close(self) -> None:
        """Stop reading and end the workers."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._read = []

    def _start_of(self, index: int) -> SectionStart:
        return self._starts[bisect_right(self._starts, index, key=lambda one: one.first) - 1]

    def _section_of(self, index: int) -> _Read:
        if index < (self._read[0].first if self._read else self._starts[-1].first):
            self.close()
            del self._starts[bisect_right(self._starts, index, key=lambda one: one.first) :]
        while index >= self._starts[-1].first:
            self._read_next()
        return self._read[bisect_right(self._read, index, key=lambda one: one.first) - 1]

    def _read_next(self) -> None:
        start = self._starts[-1]
        if self._reader is None:
            self._reader = SectionReader(self._stream, start.place)
        section = self._reader.read()
        place = section.start
        random = None
        if self._stream.seed is not None:
            # The first section of a pass has the draws of a pass that is no stream.
            key = [self._stream.seed, place.passes, 4, place.sections]
            random = np.random.RandomState(key if place.sections else key[:3])
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
        self._report(place, section.ends_pass, counts)
        self._read.append(_Read(start.first, rows))
        after = StreamCounts() if section.ends_pass else counts
        self._starts.append(SectionStart(section.end, start.first + len(rows), after))

    def _report(self, place: StreamPlace, ends_pass: bool, counts: StreamCounts) -> None:
        """Tell about the end of a pass, and about the first conversation that lost something."""
        has_loss = counts.num_cut + counts.num_left_out > 0
        if ends_pass and not counts.num_samples:
            raise self._kind.nothing_left(self._names, counts, self.seq_length)
        name = self._pass_name(place.passes)
        if ends_pass and place.passes >= self._num_told:
            self._num_told = place.passes + 1
            self._tell(f"{name} ended: {self._line(counts)}.", has_loss)
        elif has_loss and not self._told_loss:
            self._tell(f"{name} so far: {self._line(counts)}.", True)
        self._told_loss = self._told_loss or has_loss

    def _line(self, counts: StreamCounts) -> str:
        return counts.line(self._kind.account(counts, self.seq_length), self.seq_length)

    def _pass_name(self, passes: int) -> str:
        return f"Pass {passes + 1} over {self._names}"

    @property
    def _names(self) -> str:
        files = self._stream.files
        return f"{files[0]} and {len(files) - 1} more files" if len(files) > 1 else str(files[0])
