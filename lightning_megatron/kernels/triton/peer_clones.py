"""Counts, weights and gradients of clones in the memory of other GPUs.

Ranks write counts and weights to other ranks, and read gradients from them. Which matrices move is
read from the plan on the device, so that launches depend on shapes only.
:class:`~lightning_megatron.plan.expert_clones.CloneMemory` defines the memory layout of matrices.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import on_device_of, power_of_two
from lightning_megatron.shapes import Float, Int

# Elements of a matrix in one iteration of a program: two accesses of 16 bytes for every thread,
# which are in flight together.
_WEIGHTS = 4096
_GRADIENTS = 2048
# Programs that share each matrix: eight for every multiprocessor of an H200.
_PROGRAMS = 1056
_WARPS = 8


def put_counts(ends: Int[Tensor, "experts"], pointers: Int[Tensor, "ranks"], rank: int) -> None:
    """Write the counts of this rank's selections into its row on every rank, as int32.

    Shapes: the memory of a rank has ``ranks * experts`` counts.

    Args:
        ends: End (exclusive) of the selections of every expert of the layer, sorted by expert.
    """
    num_experts = ends.shape[0]
    with on_device_of(ends):
        _put_counts[(pointers.shape[0],)](
            ends, pointers, rank, num_experts, PADDED=power_of_two(num_experts)
        )


def put_weights(
    weights: Float[Tensor, "homes out_local in_local"],
    owners: Int[Tensor, "all_places"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    start: int,
) -> None:
    """Write the weight of every home with a clone into the place of the clone.

    Args:
        start: Offset of the stack of these matrices (bytes).
    """
    homes = weights.shape[0]
    size = weights[0].numel()
    with on_device_of(weights):
        _put_weights[(_PROGRAMS,)](
            weights, owners, pointers, rank, start, homes, weights.stride(0), size,
            owners.shape[0] // pointers.shape[0], owners.shape[0], BLOCK=_WEIGHTS,
            num_warps=_WARPS,
        )  # fmt: skip


def add_clone_gradients(
    sums: Float[Tensor, "homes out_local in_local"],
    owners: Int[Tensor, "all_places"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    start: int,
    scale: float = 1.0,
) -> None:
    """Add the gradients of all clones of every home, in the order of places.

    The gradients are float32. Homes without a clone are not changed.

    Args:
        start: Offset of the stack of these gradients (bytes).
    """
    homes = sums.shape[0]
    size = sums[0].numel()
    with on_device_of(sums):
        _add_clone_gradients[(_PROGRAMS,)](
            sums, owners, pointers, rank, start, homes, sums.stride(0), size,
            owners.shape[0] // pointers.shape[0], owners.shape[0], scale, BLOCK=_GRADIENTS,
            num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _put_counts(
    ends: tl.tensor, pointers: tl.tensor, rank: tl.tensor, num_experts: tl.tensor,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.arange(0, PADDED)
    inside = expert < num_experts
    end = tl.load(ends + expert, mask=inside, other=0)
    before = tl.load(ends + expert - 1, mask=inside & (expert > 0), other=0)
    base = tl.multiple_of(tl.load(pointers + tl.program_id(0)), 16)
    target = base.to(tl.pointer_type(tl.int32)) + rank * num_experts
    tl.store(target + expert, (end - before).to(tl.int32), mask=inside)


@triton.jit
def _put_weights(
    weights: tl.tensor, owners: tl.tensor, pointers: tl.tensor, rank: tl.tensor,
    start: tl.tensor, homes: tl.tensor, stride: tl.tensor, size: tl.tensor, places: tl.tensor,
    num_places: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0) * BLOCK
    for place in range(num_places):
        local = tl.load(owners + place) - rank * homes
        if (local >= 0) & (local < homes):
            base = tl.load(pointers + place // places) + start
            stack = tl.multiple_of(base.to(tl.pointer_type(weights.dtype.element_ty)), 16)
            target = stack + (place % places).to(tl.int64) * size
            source = weights + local * stride
            for at in range(first, size, tl.num_programs(0) * BLOCK):
                element = at + tl.arange(0, BLOCK)
                value = tl.load(source + element, mask=element < size)
                tl.store(target + element, value, mask=element < size)


@triton.jit
def _add_clone_gradients(
    sums: tl.tensor, owners: tl.tensor, pointers: tl.tensor, rank: tl.tensor, start: tl.tensor,
    homes: tl.tensor, stride: tl.tensor, size: tl.tensor, places: tl.tensor,
    num_places: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0) * BLOCK
    for place in range(num_places):
        owner = tl.load(owners + place)
        local = owner - rank * homes
        if (local >= 0) & (local < homes):
            num_before = 0
            for earlier in range(place):
                num_before += (tl.load(owners + earlier) == owner).to(tl.int32)
            if num_before == 0:
                target = sums + local * stride
                for at in range(first, size, tl.num_programs(0) * BLOCK):
                    element = at + tl.arange(0, BLOCK)
                    inside = element < size
                    # The sum stays in registers until all gradients are added: another thread of
                    # the program may read an element than the one that has written it.
                    total = tl.load(target + element, mask=inside)
                    for later in range(place, num_places):
                        if tl.load(owners + later) == owner:
                            base = tl.load(pointers + later // places) + start
                            stack = tl.multiple_of(base.to(tl.pointer_type(tl.float32)), 16)
                            source = stack + (later % places).to(tl.int64) * size
                            more = tl.load(source + element, mask=inside) * scale
                            total = (total + more).to(total.dtype)
                    tl.store(target + element, total, mask=inside)
