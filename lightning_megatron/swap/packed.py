"""Tensors that a class of models has packed into one, and its files each by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.swap.mapping import Slices, TensorReader


@dataclass(frozen=True)
class Place:
    """Say where a tensor is: it is another one, or rows of one, or rows of an element of a stack.

    Args:
        name: The tensor that it is in.
        index: Its index in the first dimension, where that counts tensors; None if it does not.
        first: Its first row (elements).
        num_rows: Its rows; None means all (elements).
    """

    name: str
    index: int | None = None
    first: int = 0
    num_rows: int | None = None

    def shape(self, outer: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that is here, from that of the one that it is in (elements)."""
        shape = outer if self.index is None else outer[1:]
        return shape if self.num_rows is None else (self.num_rows, *shape[1:])

    def slices(self, inner: Slices) -> Slices:
        """Return where a part of the tensor is in the one that it is in."""
        rows = slice(self.first + inner[0].start, self.first + inner[0].stop) if inner else None
        inner = inner if rows is None else (rows, *inner[1:])
        return inner if self.index is None else (slice(self.index, self.index + 1), *inner)


@dataclass(frozen=True)
class Packed:
    """Say which tensors of files are one of the class.

    The parts lie one below the other. If their names have a number that its own has not, such as that of an expert,
    the tensor is a stack of these, ordered by that number.

    Args:
        name: The tensor, with one ``{}`` for its layer.
        parts: Its parts, with one ``{}`` for the layer, and one for the number.
    """

    name: str
    parts: tuple[str, ...]

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(re.escape(one).replace(r"\{\}", r"(\d+)")) for one in (self.name, *self.parts))

    @property
    def is_stack(self) -> bool:
        """Tell whether the first dimension of the tensor counts what its parts make."""
        return self.parts[0].count("{}") > self.name.count("{}")

    def is_name(self, name: str) -> bool:
        """Tell whether a name is the tensor's in some layer."""
        return self._patterns[0].fullmatch(name) is not None

    def unpacked(self, name: str, key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Place]]:
        """List the parts of a tensor and where they are.

        Args:
            name: Its name in the class, which must be this one's of some layer.
            key: Its name where it is read.
            shape: Its shape (elements).

        Raises:
            CheckpointMismatchError: If it cannot be cut into them.
        """
        match = self._patterns[0].fullmatch(name)
        assert match is not None, "only tensors of this name are unpacked"
        counts, num_parts = shape[: int(self.is_stack)], len(self.parts)
        rows = shape[len(counts) : len(counts) + 1]
        if len(counts) < self.is_stack or not rows or rows[0] % num_parts:
            what = "experts and equally many rows" if self.is_stack else "equally many rows"
            raise CheckpointMismatchError(
                f"a tensor of {num_parts} parts must have {what} for each: {key!r} has shape {shape}. It cannot be "
                "cut. Load the weights that belong to the configuration."
            )
        size = rows[0] // num_parts
        for index in range(counts[0]) if self.is_stack else (None,):
            numbers = match.groups() if index is None else (*match.groups(), index)
            for number, part in enumerate(self.parts):
                yield part.format(*numbers), Place(key, index, number * size, size)

    def place(self, part: str) -> tuple[str, int, int] | None:
        """Return the tensor that a part belongs to, the index there, and the number of the part; None if it is none."""
        for number, pattern in enumerate(self._patterns[1:]):
            match = pattern.fullmatch(part)
            if match is not None:
                numbers = match.groups()
                return self.name.format(*numbers), int(numbers[-1]) if self.is_stack else 0, number
        return None


def places(name: str, key: str, reader: TensorReader, rules: Iterable[Packed]) -> Iterator[tuple[str, Place]]:
    """List the tensors of files that a tensor is and where they are; by default it is one.

    Args:
        name: Its name in the class or in its files.
        key: Its name where it is read.
        reader: Where that is.
        rules: Which tensors of the class are packed.

    Raises:
        CheckpointMismatchError: If it cannot be cut into them.
    """
    rule = next((one for one in rules if one.is_name(name)), None)
    if rule is None:
        yield name, Place(key)
    else:
        yield from rule.unpacked(name, key, reader.shape(key))


def pack(tensors: Mapping[str, Tensor], rules: Iterable[Packed]) -> dict[str, Tensor]:
    """Return the tensors of the class, made of all those of its files."""
    found: dict[str, Tensor] = {}
    parts: dict[tuple[str, bool], dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        hit = next(((rule, place) for rule in rules if (place := rule.place(name)) is not None), None)
        if hit is None:
            found[name] = tensor
        else:
            rule, (whole, index, number) = hit
            parts.setdefault((whole, rule.is_stack), {})[index, number] = tensor
    for (name, is_stack), pieces in parts.items():
        indices = sorted({index for index, _ in pieces})
        rows = [torch.cat([pieces[key] for key in sorted(pieces) if key[0] == index]) for index in indices]
        found[name] = torch.stack(rows) if is_stack else rows[0]
    return found
