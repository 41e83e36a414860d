"""Copies of parts of Hugging Face tensors into local tensors, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_megatron.swap.tensors.mapping import Slices, TensorMap, TensorReader

T = TypeVar("T")

#: Number of pieces that are copied at the same time.
_NUM_CONCURRENT = 8
#: Size of a piece (bytes). The copies in flight need memory in addition to the tensors.
PIECE_BYTES = 2**24
#: Delay before a progress bar appears (seconds).
BAR_DELAY = 1.0


@dataclass(frozen=True)
class Copy:
    """Part of a Hugging Face tensor and its destination.

    Args:
        target: Destination, in the orientation of the Hugging Face tensor.
    """

    name: str
    slices: Slices
    target: Tensor

    def run(self, reader: TensorReader) -> int:
        """Fill the target, converted to its dtype, and return its size (bytes)."""
        with torch.no_grad():
            self.target.copy_(reader.read(self.name, self.slices))
        return self.target.nbytes


def copies_of(
    tensor: TensorMap,
    view: Tensor,
    offsets: Sequence[int],
    sizes: Sequence[int],
    reader: TensorReader,
) -> Iterator[Copy]:
    """List the copies that fill a box of a full tensor.

    Shapes: view ``sizes``.
    """
    for read in tensor.reads(offsets, sizes):
        rows = view.narrow(0, read.start, read.num_rows)
        rows = rows.t() if read.is_transposed else rows
        first, *rest = read.slices
        # Full rows are mapped into memory, even if only a part of each is needed.
        width = prod(reader.shape(read.name)[1:]) * view.element_size()
        step = max(PIECE_BYTES // max(width, 1), 1)
        for start in range(0, len(rows), step):
            target = rows[start : start + step]
            begin = first.start + start
            yield Copy(read.name, (slice(begin, begin + len(target)), *rest), target)


def copy_all(copies: Sequence[Copy], reader: TensorReader, shows_progress: bool = False) -> None:
    """Run copies, a few at a time in threads.

    Args:
        reader: Reader of the Hugging Face tensors, called from several threads.
        shows_progress: Whether to show a progress bar if the copies take long and standard error is
            a terminal.
    """
    total = sum(copy.target.nbytes for copy in copies)
    is_hidden = None if shows_progress else True
    with (
        tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="Reading weights",
            delay=BAR_DELAY,
            disable=is_hidden,
        ) as bar,
        ThreadPoolExecutor(_NUM_CONCURRENT, "weights", *_on_stream_of(copies)) as pool,
    ):
        # Parts that are far apart in a large model are in different files, which are read in
        # parallel.
        for num_bytes in pool.map(
            lambda copy: copy.run(reader), interleave(copies, _NUM_CONCURRENT)
        ):
            bar.update(num_bytes)


def _on_stream_of(copies: Sequence[Copy]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the initializer of new threads, which sets the CUDA stream, and its arguments.

    A thread starts with the default stream, which is not synchronized with other streams.
    """
    device = next((copy.target.device for copy in copies if copy.target.is_cuda), None)
    if device is None:
        return _nothing, ()
    return torch.cuda.set_stream, (torch.cuda.current_stream(device),)


def _nothing() -> None:
    """Do nothing, because the targets are on the CPU."""


def interleave(items: Sequence[T], num_runs: int) -> list[T]:
    """Interleave a sequence: cut it into equal runs, and take one item of each run alternately."""
    length = max(-(-len(items) // num_runs), 1)
    return [item for first in range(length) for item in items[first::length]]
