"""Fused Adam and AdamW: clipping, moments, main parameters and their half copies in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of
from lightning_megatron.shapes import Float

# Elements of a program, and of one iteration of its loop.
_CHUNK = 8192
_BLOCK = 2048
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Columns of a row of the table: addresses of parameter, gradient, two moments, step and half copy;
# size; number of the first program.
_ROW = tl.constexpr(8)


class AdamKernel:
    """Adam step over the slices of an optimizer group, with cached tables of their addresses.

    Equal to a step of ``torch.optim.AdamW(fused=True)`` (``Adam`` if the decay is not
    decoupled) on gradients multiplied by the coefficient, followed by a copy of every parameter
    to its half type. Bias corrections are computed in float64, everything else in float32.

    Moments in bfloat16 are rounded stochastically, with random bits that depend on the step and
    on the index of the element. With rounding to nearest, a second moment would never fall: a
    step changes it by less than half of the distance between neighbouring bfloat16 numbers.
    """

    def __init__(self) -> None:
        self._columns: list[list[int]] = []
        self._tables: dict[bool, _Table] = {}

    def __call__(
        self,
        parameters: Sequence[Float[Tensor, "..."]],
        gradients: Sequence[Float[Tensor, "..."]],
        averages: Sequence[Float[Tensor, "..."]],
        squares: Sequence[Float[Tensor, "..."]],
        steps: Sequence[Float[Tensor, ""]],
        halves: Sequence[Float[Tensor, "..."] | None],
        coefficient: Float[Tensor, ""] | None,
        numbers: Float[Tensor, "12"],
        *,
        has_decay: bool,
        is_decoupled: bool,
    ) -> None:
        """Update in place, without a synchronisation of host and device.

        A CUDA graph can capture a step whose tensors are those of an earlier step. Its replays read
        the current values of the tensors, including the settings.

        Shapes: the tensors of a slice have one shape, and all are contiguous.

        Args:
            gradients: Gradients of the parameters, of one dtype; not modified.
            averages: First moments, all in float32 or bfloat16, as the second ones.
            steps: Numbers of earlier steps, in float32 on the device; each is increased by 1.
            halves: Destinations of the rounded parameters, all of one half type, or all None.
            coefficient: Factor of the gradients, in float32 on the device; None means 1.
            numbers: Settings of the group in float32 on the device. Learning rate; logarithms of
                both decay rates of moments, each as a sum of two numbers; first decay rate and 1
                minus it; the same of the second; eps; factor of the weight decay, which is
                multiplied by the learning rate if the decay is decoupled; an unused number.
            is_decoupled: Whether the decay shrinks the parameters (AdamW); otherwise it is added to
                the gradients.
        """
        parameter = parameters[0]
        gradient = gradients[0]
        average = averages[0]
        half = halves[0]
        of_halves = [0] * len(halves)
        if half is not None:
            of_halves = _addresses(cast(Sequence[Tensor], halves))
        addresses = map(_addresses, (parameters, gradients, averages, squares, steps))
        sizes = list(map(Tensor.numel, parameters))
        self._find_tables([*addresses, of_halves, sizes], parameter.device)
        half_type = None if half is None else _TYPES[half.dtype]
        # Without a coefficient the pointer of any tensor is passed, which the kernel does not read.
        coefficient_at = parameter if coefficient is None else coefficient
        for is_aligned, table in self._tables.items():
            with on_device_of(parameter):
                _advance[(len(table.key),)](table.rows, table.scales, numbers, num_warps=1)
                _update[(table.num_programs,)](
                    table.rows, table.owners, table.scales,
                    coefficient_at, numbers,
                    GRADIENT=_TYPES[gradient.dtype], MOMENT=_TYPES[average.dtype],
                    NARROW=average.dtype != torch.float32,
                    HALF=half_type, HAS_COEFFICIENT=coefficient is not None,
                    HAS_DECAY=has_decay, DECOUPLED=is_decoupled,
                    ALIGNED=is_aligned, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip

    def _find_tables(self, columns: list[list[int]], device: torch.device) -> None:
        """Create the tables of the slices, unless their addresses and sizes have not changed."""
        if columns == self._columns:
            return
        # One table for aligned slices and one for others. In a common table, unaligned slices would
        # make all memory accesses narrow.
        keys: dict[bool, list[_Key]] = {}
        for row in zip(*columns, strict=True):
            parameter, gradient, average, square, _, half, _ = row
            is_aligned = (parameter | gradient | average | square | half) % 16 == 0
            keys.setdefault(is_aligned, []).append(row)
        known = self._tables
        self._columns = columns
        self._tables = {}
        for is_aligned, key in keys.items():
            self._tables[is_aligned] = _table_of(key, device, known.get(is_aligned))


_Key = tuple[int, ...]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    # Called for every slice in every step: map is faster than a comprehension.
    return list(map(Tensor.data_ptr, tensors))


@dataclass(frozen=True)
class _Table:
    """Addresses of slices on their device, and the assignment of programs to slices.

    Args:
        rows: Addresses and sizes on the device, with the number of the first program of every
            slice.
        owners: Index of the slice of every program.
        scales: Buffer for numbers that depend on the step of a slice: step size, 1 / correction of
            the root, step.
        num_programs: Number of programs that cover all slices.
    """

    key: list[_Key]
    rows: Tensor
    owners: Tensor
    scales: Tensor
    num_programs: int


def _table_of(key: list[_Key], device: torch.device, known: _Table | None) -> _Table:
    """Return the known table if it has these slices; otherwise create one.

    The host does not wait for the device.
    """
    if known is not None and known.key == key:
        return known
    counts = [ceil_div(size, _CHUNK) for *_, size in key]
    starts = [0, *accumulate(counts[:-1])]
    rows = torch.tensor(
        [(*row, start) for row, start in zip(key, starts, strict=True)],
        dtype=torch.int64,
    )
    owners = torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32),
        torch.tensor(counts),
    )

    def send(tensor: Tensor) -> Tensor:
        # Only copies from pinned memory do not block the host.
        if device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    sizes = [row[-1] for row in key]
    if known is not None and [row[-1] for row in known.key] == sizes:
        # Only addresses have changed, for example of converted gradients, which are new tensors in
        # every step.
        return _Table(key, send(rows), known.owners, known.scales, known.num_programs)
    scales = torch.empty((len(counts), 3), dtype=torch.float32, device=device)
    return _Table(key, send(rows), send(owners), scales, len(owners))


@triton.jit
def _advance(
    rows: tl.tensor,
    scales: tl.tensor,
    numbers: tl.tensor,
) -> None:
    """Increase the step of a slice, and compute the numbers that depend on the step only."""
    row = tl.program_id(0).to(tl.int64)
    step_at = tl.load(rows + row * _ROW + 4).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at) + 1.0
    tl.store(step_at, step)
    wide = step.to(tl.float64)
    # beta ** step, from the logarithm of beta in two parts.
    correction1 = 1.0 - tl.exp(wide * tl.load(numbers + 1) + wide * tl.load(numbers + 2))
    correction2 = 1.0 - tl.exp(wide * tl.load(numbers + 3) + wide * tl.load(numbers + 4))
    target = scales + row * 3
    tl.store(target, (tl.load(numbers) / correction1).to(tl.float32))
    tl.store(target + 1, (1.0 / tl.sqrt(correction2)).to(tl.float32))
    tl.store(target + 2, step)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Hash 32 bits; every bit of the result depends on all bits of x (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round(value: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Round float32 to bfloat16 stochastically.

    The 16 bits that bfloat16 lacks and 16 bits of noise are added. The number is rounded up if the
    sum carries.
    """
    bits = (value.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    # NaN must stay NaN: the addition could turn its bits into those of a number.
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def _update_block(
    parameters: tl.tensor,
    gradients: tl.tensor,
    averages: tl.tensor,
    squares: tl.tensor,
    halves: tl.tensor,
    offsets: tl.tensor,
    num_left: tl.tensor,
    coefficient: tl.tensor,
    step_size: tl.tensor,
    root_scale: tl.tensor,
    seed: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    HALF: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    """Update a block of elements.

    Only the last chunk of a slice is masked, because masks make memory accesses narrow.
    """
    inside = offsets < num_left if MASKED else None
    grad = tl.load(gradients + offsets, mask=inside).to(tl.float32) * coefficient
    parameter = tl.load(parameters + offsets, mask=inside)
    average = tl.load(averages + offsets, mask=inside).to(tl.float32)
    square = tl.load(squares + offsets, mask=inside).to(tl.float32)
    if HAS_DECAY:
        if DECOUPLED:
            parameter -= decay * parameter
        else:
            grad += decay * parameter
    average = beta1 * average + rest1 * grad
    square = beta2 * square + rest2 * grad * grad
    parameter -= step_size * average / (tl.sqrt(square) * root_scale + eps)
    tl.store(parameters + offsets, parameter, mask=inside)
    if HALF is not None:
        tl.store(halves + offsets, parameter.to(HALF), mask=inside)
    if NARROW:
        noise = _mix(offsets.to(tl.uint32) ^ seed)
        tl.store(averages + offsets, _round(average, noise & 0xFFFF), mask=inside)
        tl.store(squares + offsets, _round(square, noise >> 16), mask=inside)
    else:
        tl.store(averages + offsets, average, mask=inside)
        tl.store(squares + offsets, square, mask=inside)


@triton.jit
def _pointer(
    rows: tl.tensor,
    column: tl.constexpr,
    dtype: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    pointer = tl.load(rows + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _update(
    table: tl.tensor,
    owners: tl.tensor,
    scales: tl.tensor,
    coefficient_at: tl.tensor,
    numbers: tl.tensor,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    NARROW: tl.constexpr,
    HALF: tl.constexpr,
    HAS_COEFFICIENT: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one chunk of one slice."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    rows = table + owner.to(tl.int64) * _ROW
    chunk = program - tl.load(rows + 7)
    start = chunk * CHUNK
    num_left = tl.minimum(tl.load(rows + 6) - start, CHUNK).to(tl.int32)
    parameters = _pointer(rows, 0, tl.float32, ALIGNED) + start
    gradients = _pointer(rows, 1, GRADIENT, ALIGNED) + start
    averages = _pointer(rows, 2, MOMENT, ALIGNED) + start
    squares = _pointer(rows, 3, MOMENT, ALIGNED) + start
    # The pointer is not used if there is no half copy.
    halves = parameters if HALF is None else _pointer(rows, 5, HALF, ALIGNED) + start
    step_size = tl.load(scales + owner * 3)
    root_scale = tl.load(scales + owner * 3 + 1)
    step = tl.load(scales + owner * 3 + 2).to(tl.uint32)
    seed = _mix(_mix(_mix(step) + owner.to(tl.uint32)) + chunk.to(tl.uint32))
    coefficient = tl.load(coefficient_at) if HAS_COEFFICIENT else 1.0
    beta1 = tl.load(numbers + 5)
    rest1 = tl.load(numbers + 6)
    beta2 = tl.load(numbers + 7)
    rest2 = tl.load(numbers + 8)
    eps = tl.load(numbers + 9)
    decay = tl.load(numbers + 10)
    if num_left == CHUNK:
        for first in range(0, CHUNK, BLOCK):
            _update_block(
                parameters, gradients, averages, squares, halves, first + tl.arange(0, BLOCK),
                num_left, coefficient, step_size, root_scale, seed, beta1, rest1, beta2, rest2, eps,
                decay, HALF, NARROW, HAS_DECAY, DECOUPLED, MASKED=False,
            )  # fmt: skip
    else:
        for first in range(0, CHUNK, BLOCK):
            _update_block(
                parameters, gradients, averages, squares, halves, first + tl.arange(0, BLOCK),
                num_left, coefficient, step_size, root_scale, seed, beta1, rest1, beta2, rest2, eps,
                decay, HALF, NARROW, HAS_DECAY, DECOUPLED, MASKED=True,
            )  # fmt: skip
