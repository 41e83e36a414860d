"""Layers and models as lists of segments with declared inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.cuda_graphs import SegmentScope, expanded_scopes
from lightning_megatron.user_code import is_compiled


@dataclass(frozen=True, eq=False)
class Segment:
    """One piece of a forward pass.

    Values passed from segment to segment are tensors, plain values, None, or tuples and frozen
    dataclasses of these.

    Args:
        name: Name of the segment.
        run: Function from the values of ``reads``, in order, to the value of ``writes``, or to a
            tuple of several.
        reads: Names of the input values.
        writes: Names of the output values.
        is_static: Whether all sizes follow from input shapes, without a copy from device to host,
            so that a CUDA graph can capture the segment.
        scopes: Scopes of the segment's work, usually one.
        modules: Modules whose parameters the segment reads.
        starts_transfer: Whether the written values contain started transfers, for which the
            segments that read these values wait.
        parts: Function that returns the list of segments that ``run`` runs; None if there is none.
        stays_whole: Whether :meth:`SegmentList.expand` keeps the segment although it has parts,
            because ``run`` does more than run its parts.
        keeps_only_inputs: Whether the backward pass reads nothing of the forward pass but the
            values of ``reads``, because it recomputes the rest.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_static: bool = True
    scopes: tuple[SegmentScope, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    starts_transfer: bool = False
    parts: Callable[[], SegmentList] | None = None
    stays_whole: bool = False
    keeps_only_inputs: bool = False


class SegmentList:
    """Sequence of segments that releases every value after its last read.

    Args:
        segments: Segments in execution order.
        inputs: Names of the input values.
        outputs: Names of the values to return.
        begin: Function that every call runs first, such as a seek of the random streams.

    Raises:
        ValueError: If a segment reads a value that no earlier one writes, or none writes an output.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.segments = tuple(segments)
        self.inputs = inputs
        self.outputs = outputs
        self._begin = begin
        self._check()
        names = dict.fromkeys(
            [*inputs, *(name for segment in self.segments for name in segment.writes)]
        )
        places = {name: place for place, name in enumerate(names)}

        def at(chosen: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(places[name] for name in chosen)

        self._room = (None,) * (len(names) - len(inputs))
        self._results = at(outputs)
        self._only_result = self._results[0] if len(outputs) == 1 else None
        self._steps = tuple(
            (
                segment.run,
                at(segment.reads),
                _span_of(at(segment.reads)),
                at(segment.writes),
                _span_of(at(segment.writes)),
                at(dropped),
            )
            for segment, dropped in zip(self.segments, [*self._last_reads(), ()], strict=False)
        )

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __call__(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run all segments and return the outputs.

        Args:
            values: Input values, in the order of their names.

        Raises:
            ValueError: If there are fewer or more values than names.
        """
        if len(values) != len(self.inputs):
            raise ValueError(
                f"a list of segments must get one value for each of its inputs {self.inputs}: "
                f"{len(values)} were given. Pass None for inputs that are not used."
            )
        if self._begin is not None:
            self._begin()
        # This code runs in every pass of every block. Indices and slices are faster than names.
        held = [*values, *self._room]
        del values
        for run, reads, read_span, writes, write_span, dropped in self._steps:
            result = run(
                *([held[place] for place in reads] if read_span is None else held[read_span])
            )
            if len(writes) == 1:
                held[writes[0]] = result
            elif write_span is not None and len(result) == len(writes):
                held[write_span] = result
            else:
                for place, value in zip(writes, result, strict=True):
                    held[place] = value
            # A remaining reference would keep a value's memory until the end of the list.
            del result
            for place in dropped:
                held[place] = None
        if self._only_result is not None:
            return (held[self._only_result],)
        return tuple([held[place] for place in self._results])

    def run_and_record(self, values: tuple[Any, ...], between: list[Any]) -> tuple[Any, ...]:
        """Run all segments, record the values between them, and return the outputs of a call.

        Args:
            values: Input values, in the order of their names.
            between: List to which the values that all segments but the last write are appended.
        """
        if self._begin is not None:
            self._begin()
        held = dict(zip(self.inputs, values, strict=True))
        for segment in self.segments:
            result = segment.run(*[held[name] for name in segment.reads])
            written = (result,) if len(segment.writes) == 1 else tuple(result)
            held.update(zip(segment.writes, written, strict=True))
            if segment is not self.segments[-1]:
                between += written
        return tuple([held[name] for name in self.outputs])

    @property
    def is_static(self) -> bool:
        """Return whether all segments are static, so that a CUDA graph can capture the list."""
        return all(segment.is_static for segment in self.segments)

    @property
    def keeps_only_inputs(self) -> bool:
        """Return whether backward passes read only the inputs of the segments."""
        return all(segment.keeps_only_inputs for segment in self.segments)

    @property
    def scopes(self) -> tuple[SegmentScope, ...]:
        """Return the scopes of all segments, each once."""
        return tuple(dict.fromkeys(scope for segment in self for scope in segment.scopes))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that the segments read, each once."""
        return tuple(
            dict.fromkeys(
                parameter
                for segment in self.segments
                for module in segment.modules
                for parameter in module.parameters()
            )
        )

    def expand(self, keeps_whole: Callable[[nn.Module], bool] = is_compiled) -> SegmentList:
        """Replace every segment that has parts by its parts, and return the new list.

        Equal to this list, gradients included, except that the modules of replaced segments are not
        called, so their hooks do not run. The names of the parts, and of values between them, begin
        with the name of the segment.

        Args:
            keeps_whole: Function that returns whether a module must be called as a whole. Its
                segment is then kept; it is static if all its parts are, and has all their scopes.
        """
        segments = [part for segment in self.segments for part in _expand(segment, keeps_whole)]
        return SegmentList(_after(self._begin, segments), self.inputs, self.outputs)

    def _check(self) -> None:
        known = set(self.inputs)
        for segment in self.segments:
            missing = [name for name in segment.reads if name not in known]
            if missing:
                raise ValueError(
                    "a segment must read inputs of the list or values of earlier segments: "
                    f"{segment.name!r} reads {missing}, but available are {sorted(known)}. Move it "
                    "after the segment that writes this value."
                )
            known.update(segment.writes)
        missing = [name for name in self.outputs if name not in known]
        if missing:
            raise ValueError(
                f"each output must be written by a segment: no segment writes {missing}, they "
                f"write {sorted(known)}. Use these names."
            )

    def _last_reads(self) -> Iterator[tuple[str, ...]]:
        """Yield, for each segment but the last, the names of values that no later one reads."""
        live = set(self.inputs)
        for number, segment in enumerate(self.segments[:-1]):
            live.update(segment.writes)
            later = [name for segment in self.segments[number + 1 :] for name in segment.reads]
            needed = {*self.outputs, *later}
            yield tuple(sorted(live - needed))
            live &= needed


def _span_of(places: tuple[int, ...]) -> slice | None:
    """Return the slice of consecutive places; None if the places are not consecutive."""
    first = places[0]
    is_range = places == tuple(range(first, first + len(places)))
    return slice(first, first + len(places)) if is_range else None


def names_from_outside(segments: Iterable[Segment], outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the values that segments read and no earlier segment writes.

    Args:
        segments: Segments in execution order.
        outputs: Names of values that are read after the last segment.
    """
    names = dict[str, None]()
    written = set[str]()
    for segment in segments:
        names.update(dict.fromkeys(name for name in segment.reads if name not in written))
        written.update(segment.writes)
    names.update(dict.fromkeys(name for name in outputs if name not in written))
    return tuple(names)


def split(
    segments: SegmentList,
    scopes: Collection[str] = ("all",),
    cuts: Collection[str] = (),
    keeps_whole: Callable[[nn.Module], bool] = is_compiled,
) -> list[SegmentList]:
    """Split a list into static runs and eager pieces, which follow each other.

    Each piece is a list: its ``inputs`` are the values that it reads from outside, its ``outputs``
    the values that a later piece or the caller reads. ``is_static`` distinguishes static runs from
    eager pieces. Running the pieces one after the other equals ``segments.expand(keeps_whole)``.

    A transfer starts and ends in one piece, together with the segments between start and end; the
    piece is eager if one of these segments is. Segments that keep only their inputs for the
    backward pass are not in one static run with segments that keep more.

    Args:
        segments: List of a chunk or of a layer.
        scopes: Scopes whose static segments go into static runs; ``all`` means every scope.
        cuts: Names of segments of the expanded list after which a static run ends. During a
            transfer the run ends after the transfer.
        keeps_whole: Function that returns whether a module must be called as a whole.

    Raises:
        UnsupportedError: If a scope or a cut is unknown.
    """
    captured_scopes = expanded_scopes(scopes)
    expanded = segments.expand(keeps_whole)
    unknown = sorted(set(cuts) - {segment.name for segment in expanded})
    if unknown:
        raise UnsupportedError(
            f"a cut must name a segment of the list: {unknown} are not among "
            f"{[segment.name for segment in expanded]}. A cut is the name of the segment before it."
        )
    marked = [
        replace(segment, is_static=segment.is_static and captured_scopes.issuperset(segment.scopes))
        for segment in expanded
    ]
    pieces: list[list[Segment]] = []
    is_ended = True
    for group in _indivisible(marked):
        if is_ended or _kind_of(pieces[-1]) != _kind_of(group):
            pieces.append(group)
        else:
            pieces[-1] += group
        is_ended = _are_static(group) and any(segment.name in cuts for segment in group)
    return _with_surfaces(pieces, segments.outputs)


def _are_static(segments: Sequence[Segment]) -> bool:
    return all(segment.is_static for segment in segments)


def _kind_of(segments: Sequence[Segment]) -> tuple[bool, bool]:
    """Return whether segments are static, and whether static ones keep only their inputs."""
    is_static = _are_static(segments)
    return is_static, is_static and all(segment.keeps_only_inputs for segment in segments)


def _indivisible(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield groups of segments between which no transfer is under way."""
    group: list[Segment] = []
    last = 0
    for number, segment in enumerate(segments):
        group.append(segment)
        if segment.starts_transfer:
            readers = [
                later
                for later in range(number + 1, len(segments))
                if not set(segments[later].reads).isdisjoint(segment.writes)
            ]
            last = max(last, *readers)
        if number >= last:
            yield group
            group = []


def _with_surfaces(
    pieces: Sequence[Sequence[Segment]], outputs: tuple[str, ...]
) -> list[SegmentList]:
    """Return pieces as lists, with the names that they read from outside and that others read."""
    lists: list[SegmentList] = []
    needed = set(outputs)
    for piece in reversed(pieces):
        written = dict.fromkeys(name for segment in piece for name in segment.writes)
        kept = tuple(name for name in written if name in needed)
        inputs = names_from_outside(piece, ())
        lists.insert(0, SegmentList(piece, inputs, kept))
        needed = needed.difference(written).union(inputs)
    return lists


def _expand(segment: Segment, keeps_whole: Callable[[nn.Module], bool]) -> Iterator[Segment]:
    """Yield the renamed parts of a segment; the segment itself if it stays whole."""
    if segment.parts is None:
        yield segment
        return
    parts = segment.parts().expand(keeps_whole)
    if segment.stays_whole or any(map(keeps_whole, segment.modules)):
        yield replace(segment, parts=None, is_static=parts.is_static, scopes=parts.scopes)
        return
    names = dict(zip(parts.inputs, segment.reads, strict=True))
    results = dict(zip(parts.outputs, segment.writes, strict=True))
    last_write = {name: part for part in parts for name in part.writes}
    written = set[str]()
    for part in parts:
        reads = tuple(names[name] for name in part.reads)
        if any(names[name] in written and name not in results for name in part.reads):
            raise ValueError(
                f"the parts of a segment must read its inputs before they write its outputs of the "
                f"same name: {part.name!r} of {segment.name!r} reads {list(reads)} after "
                f"{sorted(written)} were written. Give the output another name."
            )
        for name in part.writes:
            is_result = name in results and last_write[name] is part
            names[name] = results[name] if is_result else f"{segment.name}.{name}"
            written.update({results[name]} if is_result else ())
        writes = tuple(names[name] for name in part.writes)
        yield replace(part, name=f"{segment.name}.{part.name}", reads=reads, writes=writes)


def _after(begin: Callable[[], None] | None, segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments with ``begin`` run at the start of the first one."""
    if begin is None or not segments:
        return list(segments)
    first = replace(segments[0], run=partial(_run_after, begin, segments[0].run))
    return [first, *segments[1:]]


def _run_after(begin: Callable[[], None], run: Callable[..., Any], *values: Any) -> Any:
    begin()
    return run(*values)
