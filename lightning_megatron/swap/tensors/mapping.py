"""Maps between rows of Hugging Face tensors and full tensors of this package."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError

Slices: TypeAlias = tuple[slice, ...]
"""One slice for each dimension, with start and stop."""

_NUM_SHOWN = 6


class TensorReader(Protocol):
    """Protocol of readers that return parts of Hugging Face tensors."""

    def names(self) -> Collection[str]:
        """List the tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor (elements)."""

    def read(self, name: str, slices: Slices) -> Tensor:
        """Return a part of a tensor; the caller must not write into it."""


@dataclass(frozen=True)
class TensorsInMemory:
    """Reader of tensors in memory, such as a state dict."""

    tensors: Mapping[str, Tensor]

    def names(self) -> Collection[str]:
        """List the tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor (elements)."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str, slices: Slices) -> Tensor:
        """Return a view of a part of a tensor."""
        tensor = self.tensors[name].detach()
        if tensor.is_meta:
            raise CheckpointMismatchError(
                f"a tensor must have values to be loaded: {name!r} is on the meta device. Load it "
                "first, or read the folder of its safetensors files."
            )
        return tensor[slices]


@dataclass(frozen=True)
class Source:
    """Rows of a Hugging Face tensor that are contiguous in a full tensor.

    Row ``j`` of the source is row ``first + j // strip * step + j % strip`` of the Hugging Face
    tensor: equal strips at equal distances. The default is all rows of the tensor.

    Args:
        is_transposed: Whether rows of the source are columns of the Hugging Face tensor.
        first: Index of the first row in the Hugging Face tensor.
        strip: Number of adjacent rows in the Hugging Face tensor; None means all.
        step: Distance between the starts of two strips (rows of the Hugging Face tensor).
    """

    name: str
    num_rows: int
    is_transposed: bool = False
    first: int = 0
    strip: int | None = None
    step: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Cut the rows [start, stop) into runs of adjacent rows.

        Returns:
            First row in the source, first row in the Hugging Face tensor, and number of rows of
            every run.
        """
        strip = self.strip or self.num_rows
        while start < stop:
            number, inside = divmod(start, strip)
            size = min(strip - inside, stop - start)
            yield start, self.first + number * self.step + inside, size
            start += size


@dataclass(frozen=True)
class Read:
    """Part of a Hugging Face tensor and its destination.

    Args:
        start: First row of the part in the filled box (elements).
        num_rows: Number of rows in the box (elements).
    """

    name: str
    slices: Slices
    is_transposed: bool
    start: int
    num_rows: int


@dataclass(frozen=True)
class TensorMap:
    """Hugging Face tensors that make up a full tensor, one below the other.

    Args:
        shape: Full shape of the parameter, without padding (elements).
        dtype: Fixed dtype of the parameter; None means the dtype of the weights.

    Raises:
        ValueError: If the sources have more or fewer rows than the target.
    """

    target: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        num_rows = sum(source.num_rows for source in self.sources)
        if num_rows != self.shape[0]:
            raise ValueError(
                f"the sources of a tensor must have as many rows as the tensor: {self.target} has "
                f"{self.shape[0]}, its sources have {num_rows}. Correct the table."
            )

    @property
    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every Hugging Face tensor (elements)."""
        rows: dict[str, int] = {}
        for source in self.sources:
            rows[source.name] = rows.get(source.name, 0) + source.num_rows
        is_transposed = {source.name: source.is_transposed for source in self.sources}
        shapes = {name: (count, *self.shape[1:]) for name, count in rows.items()}
        return {
            name: shape[::-1] if is_transposed[name] else shape for name, shape in shapes.items()
        }

    def reads(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Read]:
        """List the reads that fill a box of the full tensor.

        Args:
            offsets: First index of the box in every dimension (elements).
            sizes: Extents of the box (elements).
        """
        start = offsets[0]
        stop = offsets[0] + sizes[0]
        before = 0
        rest = tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets[1:], sizes[1:], strict=True)
        )
        for source in self.sources:
            low = max(start, before)
            high = min(stop, before + source.num_rows)
            for here, there, size in source.pieces(low - before, high - before):
                slices = (slice(there, there + size), *rest)
                slices = slices[::-1] if source.is_transposed else slices
                yield Read(source.name, slices, source.is_transposed, before + here - start, size)
            before += source.num_rows

    def fill(
        self, view: Tensor, offsets: Sequence[int], sizes: Sequence[int], reader: TensorReader
    ) -> None:
        """Write a box of the full tensor into ``view`` in place, converted to its dtype.

        Shapes: view ``sizes``.
        """
        with torch.no_grad():
            for read in self.reads(offsets, sizes):
                part = reader.read(read.name, read.slices)
                view.narrow(0, read.start, read.num_rows).copy_(
                    part.t() if read.is_transposed else part
                )

    def full(self, reader: TensorReader, dtype: torch.dtype) -> Tensor:
        """Return the full tensor."""
        full = torch.empty(self.shape, dtype=dtype)
        self.fill(full, [0] * len(self.shape), self.shape, reader)
        return full

    def split(self, full: Tensor) -> dict[str, Tensor]:
        """Cut the full tensor into Hugging Face tensors; contiguous parts are views.

        Raises:
            ValueError: If ``full`` has another shape.
        """
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"the full tensor {self.target} must have shape {self.shape}: {tuple(full.shape)}."
            )
        tensors: dict[str, Tensor] = {}
        shapes = self.source_shapes
        start = 0
        for source in self.sources:
            rows = full.narrow(0, start, source.num_rows)
            start += source.num_rows
            source_rows = rows.t() if source.is_transposed else rows
            if source_rows.shape == shapes[source.name] and source.strip is None:
                tensors[source.name] = source_rows
                continue
            whole = tensors.setdefault(source.name, full.new_empty(shapes[source.name]))
            by_rows = whole.t() if source.is_transposed else whole
            for here, there, size in source.pieces(0, source.num_rows):
                by_rows.narrow(0, there, size).copy_(rows.narrow(0, here, size))
        return tensors


def joined(target: str, shape: tuple[int, ...], *names: str) -> TensorMap:
    """Map a full tensor whose rows are those of equally large tensors, one after the other."""
    num_rows = shape[0] // len(names)
    return TensorMap(target, shape, tuple(Source(name, num_rows) for name in names))


def joined_layers(
    target: str, shape: tuple[int, ...], *layers: str, has_bias: bool
) -> list[TensorMap]:
    """Map the weight, and perhaps the bias, of a layer that joins equally large layers.

    Args:
        shape: Shape of the weight (elements).
    """
    shapes = {"weight": shape, "bias": shape[:1]} if has_bias else {"weight": shape}
    tensors = []
    for kind, size in shapes.items():
        sources = (f"{layer}.{kind}" for layer in layers)
        tensors.append(joined(f"{target}.{kind}", size, *sources))
    return tensors


def named(names: Iterable[str]) -> str:
    """Return text with the first few names, sorted, and the number of the others."""
    ordered = sorted(names)
    shown = [repr(name) for name in ordered[:_NUM_SHOWN]]
    return ", ".join(
        [*shown, f"{len(ordered) - _NUM_SHOWN} more"] if len(ordered) > _NUM_SHOWN else shown
    )
