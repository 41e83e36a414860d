"""Adam and AdamW over many slices in one pass: clipping, moments, main parameters and their rounded copies."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.launch import ceil_div, on_device_of

# Elements of a program, and of one pass of its loop.
_CHUNK = 8192
_BLOCK = 2048
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Of a row of the table: parameter, gradient, two moments, step and rounded copy (addresses), size, first program.
_ROW = tl.constexpr(8)


class AdamKernel:
    """Update slices of one optimizer group, and remember where they are from one step to the next."""

    def __init__(self) -> None:
        self._columns: list[list[int]] = []
        self._tables: dict[bool, _Table] = {}

    def __call__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        halves: Sequence[Tensor | None],
        coefficient: Tensor | None,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        is_decoupled: bool,
    ) -> None:
        """Count a step, and update parameters, moments and rounded copies in place; the host does not wait.

        Equal to a step of ``torch.optim.AdamW(fused=True)`` (``Adam`` where the decay is not decoupled) on gradients
        multiplied by the coefficient, and a copy of every parameter into its half. Bias corrections are computed in
        float64, all else in float32. Moments of bfloat16 are rounded up or down with the probability that makes the
        mean exact, drawn from the step and the place of the element: rounded to nearest, a second moment would never
        fall, because a step changes it by less than half of what bfloat16 tells apart.

        Shapes: parameter, gradient, moments and half of a slice any, but equal; all contiguous. Steps and coefficient
        ``()``.

        Args:
            parameters: Main parameters in float32.
            gradients: Their gradients, of one dtype, which stay as they are.
            averages: First moments, all in float32 or bfloat16.
            squares: Second moments, of the same dtype.
            steps: Steps that were made, in float32 on the device.
            halves: Where the rounded parameters go, all of one half dtype, or all None.
            coefficient: What gradients are multiplied by, in float32 on the device; None means 1.
            lr: Learning rate.
            beta1: Decay of the first moments.
            beta2: Decay of the second moments.
            eps: Added to the root of the second moment.
            weight_decay: Strength of the decay.
            is_decoupled: Whether the decay shrinks parameters; otherwise it adds to the gradients.
        """
        log1, log2 = _two_floats(_log(beta1)), _two_floats(_log(beta2))
        parameter, gradient, average, half = parameters[0], gradients[0], averages[0], halves[0]
        self._find_tables(
            [
                *map(_addresses, (parameters, gradients, averages, squares, steps)),
                [0] * len(halves) if half is None else _addresses(cast(Sequence[Tensor], halves)),
                list(map(Tensor.numel, parameters)),
            ],
            parameter.device,
        )
        for is_aligned, table in self._tables.items():
            with on_device_of(parameter):
                _advance[(len(table.key),)](table.rows, table.scales, lr, *log1, *log2, num_warps=1)
                _update[(table.num_programs,)](
                    table.rows, table.owners, table.scales,
                    parameter if coefficient is None else coefficient,
                    beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps,
                    lr * weight_decay if is_decoupled else weight_decay,
                    GRADIENT=_TYPES[gradient.dtype], MOMENT=_TYPES[average.dtype],
                    NARROW=average.dtype != torch.float32,
                    HALF=None if half is None else _TYPES[half.dtype],
                    HAS_COEFFICIENT=coefficient is not None, HAS_DECAY=weight_decay != 0.0, DECOUPLED=is_decoupled,
                    ALIGNED=is_aligned, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip

    def _find_tables(self, columns: list[list[int]], device: torch.device) -> None:
        """Make the tables of slices with these addresses and sizes, unless they are those of the step before."""
        if columns == self._columns:
            return
        # Slices that begin between the borders of vectors would make all accesses narrow.
        keys: dict[bool, list[_Key]] = {}
        for row in zip(*columns, strict=True):
            parameter, gradient, average, square, _, half, _ = row
            keys.setdefault(not (parameter | gradient | average | square | half) & 15, []).append(row)
        known, self._columns = self._tables, columns
        self._tables = {aligned: _table_of(key, device, known.get(aligned)) for aligned, key in keys.items()}


_Key = tuple[int, ...]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """List where tensors begin. It is asked of every slice in every step."""
    return list(map(Tensor.data_ptr, tensors))


@dataclass(frozen=True)
class _Table:
    """Hold the addresses of slices on their device.

    Args:
        key: The addresses and sizes, on the host.
        rows: The same on the device, and the first program of every slice.
        owners: The slice of every program.
        scales: Room for what follows from the step of each slice: step size, 1 / correction of the root, step.
        num_programs: How many programs cover all slices.
    """

    key: list[_Key]
    rows: Tensor
    owners: Tensor
    scales: Tensor
    num_programs: int


def _table_of(key: list[_Key], device: torch.device, known: _Table | None) -> _Table:
    """Return the table that is known if it is that of these slices, else make theirs without a wait of the host."""
    if known is not None and known.key == key:
        return known
    counts = [ceil_div(size, _CHUNK) for *_, size in key]
    starts = [0, *accumulate(counts[:-1])]
    rows = torch.tensor([(*row, start) for row, start in zip(key, starts, strict=True)], dtype=torch.int64)
    owners = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))

    def send(tensor: Tensor) -> Tensor:
        # From pinned memory, so that the host does not wait for the device.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    if known is not None and [row[-1] for row in known.key] == [row[-1] for row in key]:
        # Only addresses have changed, as those of converted gradients do in every step.
        return _Table(key, send(rows), known.owners, known.scales, known.num_programs)
    scales = torch.empty((len(counts), 3), dtype=torch.float32, device=device)
    return _Table(key, send(rows), send(owners), scales, len(owners))


def _log(beta: float) -> float:
    # Of 0, a number whose exponential is 0.
    return math.log(beta) if beta > 0.0 else -1e30


def _two_floats(value: float) -> tuple[float, float]:
    """Split a number into two that float32 holds: kernels take no float64."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, value - high


@triton.jit
def _advance(
    rows: tl.tensor,
    scales: tl.tensor,
    lr: tl.tensor,
    log1_high: tl.tensor,
    log1_low: tl.tensor,
    log2_high: tl.tensor,
    log2_low: tl.tensor,
) -> None:
    """Count the step of a slice, and compute what depends on it alone."""
    row = tl.program_id(0).to(tl.int64)
    step_at = tl.load(rows + row * _ROW + 4).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at) + 1.0
    tl.store(step_at, step)
    wide = step.to(tl.float64)
    correction1 = 1.0 - tl.exp(wide * log1_high + wide * log1_low)
    correction2 = 1.0 - tl.exp(wide * log2_high + wide * log2_low)
    target = scales + row * 3
    tl.store(target, (lr / correction1).to(tl.float32))
    tl.store(target + 1, (1.0 / tl.sqrt(correction2)).to(tl.float32))
    tl.store(target + 2, step)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Spread 32 bits evenly; every bit of the result depends on all (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round(value: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Round float32 to bfloat16 up if what is cut off, 16 bits, and 16 random bits together exceed them."""
    bits = (value.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    # Not a number stays so, whatever its bits are.
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
    """Update a block of elements; a mask, which makes accesses narrow, only at the end of a slice."""
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
def _pointer(rows: tl.tensor, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    pointer = tl.load(rows + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _update(
    table: tl.tensor,
    owners: tl.tensor,
    scales: tl.tensor,
    coefficient_at: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
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
    # Without a copy its pointer is not used.
    halves = parameters if HALF is None else _pointer(rows, 5, HALF, ALIGNED) + start
    step_size = tl.load(scales + owner * 3)
    root_scale = tl.load(scales + owner * 3 + 1)
    step = tl.load(scales + owner * 3 + 2).to(tl.uint32)
    seed = _mix(_mix(_mix(step) + owner.to(tl.uint32)) + chunk.to(tl.uint32))
    coefficient = tl.load(coefficient_at) if HAS_COEFFICIENT else 1.0
    if num_left == CHUNK:
        for first in range(0, CHUNK, BLOCK):
            _update_block(
                parameters, gradients, averages, squares, halves, first + tl.arange(0, BLOCK), num_left, coefficient,
                step_size, root_scale, seed, beta1, rest1, beta2, rest2, eps, decay, HALF, NARROW, HAS_DECAY,
                DECOUPLED, MASKED=False,
            )  # fmt: skip
    else:
        for first in range(0, CHUNK, BLOCK):
            _update_block(
                parameters, gradients, averages, squares, halves, first + tl.arange(0, BLOCK), num_left, coefficient,
                step_size, root_scale, seed, beta1, rest1, beta2, rest2, eps, decay, HALF, NARROW, HAS_DECAY,
                DECOUPLED, MASKED=True,
            )  # fmt: skip
