"""Tensors that a model class packs into one, but that its files store separately."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.swap.tensors.mapping import Slices, TensorReader


@dataclass(frozen=True)
class PackedRows:
    """Position of a tensor: another tensor, rows of it, or rows of an element of a stack.

    Args:
        name: Name of the containing tensor.
        index: Index in the first dimension of a stack; None if the tensor is no stack.
        first: First row in the containing tensor (elements).
        num_rows: Number of rows; None means all (elements).
    """

    name: str
    index: int | None = None
    first: int = 0
    num_rows: int | None = None

    def shape(self, outer: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, from that of the tensor that contains it (elements)."""
        shape = outer if self.index is None else outer[1:]
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])

    def slices(self, inner: Slices) -> Slices:
        """Return the slices of a part of the tensor in the tensor that contains it."""
        rows = slice(self.first + inner[0].start, self.first + inner[0].stop) if inner else None
        inner = inner if rows is None else (rows, *inner[1:])
        return inner if self.index is None else (slice(self.index, self.index + 1), *inner)


@dataclass(frozen=True)
class Packed:
    """Rule for tensors of files that form one tensor of the class.

    The parts are concatenated along the first dimension. If the names of the parts contain a
    further number, such as that of an expert, the tensor is a stack of the parts, ordered by that
    number.

    Args:
        name: Name of the tensor, with one ``{}`` for the layer.
        parts: Names of the parts, with one ``{}`` for the layer, and one for the number.
    """

    name: str
    parts: tuple[str, ...]

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(
            re.compile(re.escape(one).replace(r"\{\}", r"(\d+)"))
            for one in (self.name, *self.parts)
        )

    @property
    def is_stack(self) -> bool:
        """Return whether the first dimension of the tensor counts stacked parts."""
        return self.parts[0].count("{}") > self.name.count("{}")

    def is_name(self, name: str) -> bool:
        """Return whether a name is the tensor's name in some layer."""
        return self._patterns[0].fullmatch(name) is not None

    def unpacked(
        self, name: str, key: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, PackedRows]]:
        """List the parts of a tensor with their positions.

        Args:
            name: Name in the class, which must be this rule's name in some layer.
            key: Name of the tensor in the reader.
            shape: Shape of the tensor (elements).

        Raises:
            CheckpointMismatchError: If the tensor cannot be cut into its parts.
        """
        match = self._patterns[0].fullmatch(name)
        assert match is not None, "only tensors of this name are unpacked"
        counts = shape[: int(self.is_stack)]
        num_parts = len(self.parts)
        rows = shape[len(counts) : len(counts) + 1]
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
                yield part.format(*numbers), PackedRows(key, index, number * size, size)

    def position_of(self, part: str) -> tuple[str, int, int] | None:
        """Return the tensor, index and number of a part; None if the name is no part."""
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
        reader: Reader of the tensors.
        rules: Rules of the packed tensors of the class.

    Raises:
        CheckpointMismatchError: If the tensor cannot be cut into its parts.
    """
    rule = next((one for one in rules if one.is_name(name)), None)
    if rule is None:
        yield name, PackedRows(key)
    else:
        yield from rule.unpacked(name, key, reader.shape(key))


def pack(tensors: Mapping[str, Tensor], rules: Iterable[Packed]) -> dict[str, Tensor]:
    """Pack the files' tensors into the tensors of the class."""
    found: dict[str, Tensor] = {}
    parts: dict[tuple[str, bool], dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        hit = next(
            (
                (rule, position)
                for rule in rules
                if (position := rule.position_of(name)) is not None
            ),
            None,
        )
        if hit is None:
            found[name] = tensor
        else:
            rule, (whole, index, number) = hit
            parts.setdefault((whole, rule.is_stack), {})[index, number] = tensor
    for (name, is_stack), pieces in parts.items():
        indices = sorted({index for index, _ in pieces})
        rows = [
            torch.cat([pieces[key] for key in sorted(pieces) if key[0] == index])
            for index in indices
        ]
        found[name] = torch.stack(rows) if is_stack else rows[0]
    return found
