"""Tensors that a model class packs into one tensor, while its files store them separately."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.swap.tensors.mapping import Slices, Source, TensorMap, TensorReader


@dataclass(frozen=True)
class PackedRows:
    """Position of a tensor: another tensor, rows of it, or rows of an element of a stack.

    Args:
        index: Index in the first dimension of a stack; None if the tensor is not a stack.
        first: First row in the containing tensor (elements).
        num_rows: Number of rows; None means all (elements).
        step: Distance between two rows in the containing tensor (elements).
        is_transposed: Whether rows of the tensor are columns of the containing tensor, or of an
            element of the stack.
    """

    name: str
    index: int | None = None
    first: int = 0
    num_rows: int | None = None
    step: int = 1
    is_transposed: bool = False

    def shape(self, outer: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, from that of the tensor that contains it (elements)."""
        shape = outer if self.index is None else outer[1:]
        shape = shape[::-1] if self.is_transposed else shape
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])

    def slices(self, inner: Slices) -> Slices:
        """Return the slices of a part of the tensor in the tensor that contains it."""
        if inner:
            rows = inner[0]
            start = self.first + rows.start * self.step
            stop = max(start, self.first + (rows.stop - 1) * self.step + 1)
            rows_of_part = slice(start, stop) if self.step == 1 else slice(start, stop, self.step)
            inner = (rows_of_part, *inner[1:])
        stored = inner[::-1] if self.is_transposed else inner
        return stored if self.index is None else (slice(self.index, self.index + 1), *stored)

    def extract(self, part: Tensor) -> Tensor:
        """Return a part of the tensor as a view of ``part``, which was read with :meth:`slices`."""
        part = part if self.index is None else part[0]
        return part.t() if self.is_transposed else part


@dataclass(frozen=True)
class Packed:
    """Rule for tensors of files that form one tensor of the class.

    The parts are concatenated along the first dimension, or their rows alternate. If the names of
    the parts contain a further number, such as that of an expert, the tensor is a stack of the
    parts, ordered by that number.

    Args:
        name: Name of the tensor, with one ``{}`` for the layer.
        parts: Names of the parts, with one ``{}`` for the layer, and one for the number.
        interleaved: Whether rows of the parts alternate: the first row of each part, then the
            second row of each part, and so on.
        is_transposed: Whether the tensor, or each element of the stack, has rows of the parts as
            columns.
        is_in_files: Whether files also store the packed tensor. The names of the parts are then
            used only in the table.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool = False
    is_transposed: bool = False
    is_in_files: bool = False

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(
            re.compile(re.escape(pattern).replace(r"\{\}", r"(\d+)"))
            for pattern in (self.name, *self.parts)
        )

    @property
    def is_stack(self) -> bool:
        """Return whether the first dimension of the tensor counts stacked parts."""
        return self.parts[0].count("{}") > self.name.count("{}")

    def is_name(self, name: str) -> bool:
        """Return whether a name is the tensor's name in some layer."""
        return self._patterns[0].fullmatch(name) is not None

    def unpack(
        self, name: str, key: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, PackedRows]]:
        """List the parts of a tensor with their positions."""
        match = self._patterns[0].fullmatch(name)
        assert match is not None, "only tensors of this name are unpacked"
        counts = shape[: int(self.is_stack)]
        num_parts = len(self.parts)
        rows = shape[len(counts) :][:: -1 if self.is_transposed else 1][:1]
        if len(counts) < self.is_stack or not rows or rows[0] % num_parts:
            what = "experts and equally many rows" if self.is_stack else "equally many rows"
            raise CheckpointMismatchError(
                f"a tensor of {num_parts} parts must have {what} for each: {key!r} has shape "
                f"{shape}. Load the weights that belong to the configuration."
            )
        size = rows[0] // num_parts
        for index in range(counts[0]) if self.is_stack else (None,):
            numbers = match.groups() if index is None else (*match.groups(), index)
            for number, part in enumerate(self.parts):
                first, step = (number, num_parts) if self.interleaved else (number * size, 1)
                rows_of_part = PackedRows(key, index, first, size, step, self.is_transposed)
                yield part.format(*numbers), rows_of_part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts, in order, to the tensor or to an element of the stack."""
        whole = (
            torch.stack(tuple(parts), 1).flatten(0, 1)
            if self.interleaved
            else torch.cat(tuple(parts))
        )
        return whole.t() if self.is_transposed else whole

    def position_of(self, part: str) -> tuple[str, int, int] | None:
        """Return the tensor, index and number of a part; None if the name is not a part."""
        for number, pattern in enumerate(self._patterns[1:]):
            match = pattern.fullmatch(part)
            if match is not None:
                numbers = match.groups()
                return self.name.format(*numbers), int(numbers[-1]) if self.is_stack else 0, number
        return None


def packed_rows(
    name: str, key: str, reader: TensorReader, rules: Iterable[Packed]
) -> Iterator[tuple[str, PackedRows]]:
    """List the files' tensors that make up a tensor, with their positions.

    Args:
        name: Name of the tensor in the class or in its files.
        key: Name of the tensor in the reader.
    """
    rule = next((candidate for candidate in rules if candidate.is_name(name)), None)
    if rule is None:
        yield name, PackedRows(key)
    else:
        yield from rule.unpack(name, key, reader.shape(key))


def pack(tensors: Mapping[str, Tensor], rules: Iterable[Packed]) -> dict[str, Tensor]:
    """Pack the files' tensors into the tensors of the class."""
    packed: dict[str, Tensor] = {}
    rules = tuple(rules)
    parts: dict[tuple[str, Packed], dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        match = find_packed(name, rules)
        if match is None:
            packed[name] = tensor
        else:
            whole, rule, index, number = match
            parts.setdefault((whole, rule), {})[index, number] = tensor
    for (name, rule), pieces in parts.items():
        rows = []
        for _, keys in groupby(sorted(pieces), key=itemgetter(0)):
            rows.append(rule.join([pieces[key] for key in keys]))
        packed[name] = torch.stack(rows) if rule.is_stack else rows[0]
    return packed


def pack_for_files(
    tensors: Iterable[tuple[str, Tensor]], names: Iterable[str], rules: Iterable[Packed]
) -> Iterator[tuple[str, Tensor]]:
    """Pack the tensors that files store packed, each as soon as all parts are known."""
    rules = tuple(rule for rule in rules if rule.is_in_files)
    hits = (find_packed(name, rules) for name in names)
    missing = Counter(match[0] for match in hits if match is not None)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = find_packed(name, rules)
        if match is None:
            yield name, tensor
            continue
        whole = match[0]
        parts.setdefault(whole, {})[name] = tensor
        if len(parts[whole]) == missing[whole]:
            yield from pack(parts.pop(whole), rules).items()


def find_packed(name: str, rules: Iterable[Packed]) -> tuple[str, Packed, int, int] | None:
    """Return the tensor that contains a part, its rule, and the index and number of the part."""
    for rule in rules:
        position = rule.position_of(name)
        if position is not None:
            whole, index, number = position
            return whole, rule, index, number
    return None


def whole_of(name: str, rules: Iterable[Packed]) -> str:
    """Return the name of the class's tensor that contains a tensor of files."""
    match = find_packed(name, rules)
    return name if match is None else match[0]


@dataclass(frozen=True)
class ClassParameter:
    """Parameter of a Hugging Face class that contains rows of a full tensor.

    Args:
        name: Name of the parameter; for one tensor of a stack, the name of the stack and the index
            of the tensor.
    """

    name: str
    sources: tuple[Source, ...]

    @property
    def num_rows(self) -> int:
        """Count the rows (elements)."""
        return sum(source.num_rows for source in self.sources)


def class_parameters_of(
    tensor: TensorMap, packed: Iterable[Packed] = ()
) -> tuple[ClassParameter, ...]:
    """List the Hugging Face parameters that make up a full tensor, from the first row to the last.

    A joined layer has one parameter for each of its layers. A tensor that the class has packed or
    reordered has a single parameter.
    """
    rules = tuple(packed)
    groups = groupby(tensor.sources, key=lambda source: _class_name(source.name, rules))
    return tuple(ClassParameter(name, tuple(sources)) for name, sources in groups)


def class_table(table: Iterable[TensorMap], packed: Iterable[Packed] = ()) -> tuple[TensorMap, ...]:
    """Convert a table to one with the parameters of the Hugging Face class as targets."""
    rules = tuple(packed)
    return tuple(
        replace(
            tensor,
            target=parameter.name,
            shape=(parameter.num_rows, *tensor.shape[1:]),
            sources=parameter.sources,
        )
        for tensor in table
        for parameter in class_parameters_of(tensor, rules)
    )


def _class_name(source: str, rules: tuple[Packed, ...]) -> str:
    match = find_packed(source, rules)
    if match is None:
        return source
    whole, rule, index, _ = match
    return f"{whole}.{index}" if rule.is_stack else whole
