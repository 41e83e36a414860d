"""Counts, weights and gradients of clones moved between several ranks, all on one device here: whole
numbers, so that sums are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.kernels import triton as kernels
from lightning_megatron.plan.clone_memory import CloneMemory
from lightning_megatron.plan.cloning import ExpertPlaces
from tests.kernels.checks import Draw

#: Ranks, experts, places of a rank, rows and columns of both matrices of an expert.
PeerCloneCase = tuple[int, int, int, tuple[tuple[int, int], ...]]


def shared_memory(
    draw: Draw, num_ranks: int, num_bytes: int, value: int = 0xFF
) -> tuple[Tensor, Tensor]:
    """Return memory of some ranks, not numbers in any dtype, and its addresses."""
    shape = (num_ranks, -(-num_bytes // 128) * 128)
    memory = torch.full(shape, value, dtype=torch.uint8, device=draw.device)
    return memory, torch.tensor([part.data_ptr() for part in memory], device=draw.device)


def whole(draw: Draw, *shape: int) -> Tensor:
    return (draw.integers(7, *shape) - 3).float()


def drawn_owners(draw: Draw, layout: ExpertPlaces) -> Tensor:
    """Draw an expert of another rank for every place, or none; the first two places share one."""
    owners = draw.integers(layout.num_experts + 2, layout.num_places) - 2
    here = torch.arange(layout.num_places, device=draw.device) // layout.places
    owners[owners < 0] = -1
    owners[:2] = layout.num_experts - 1
    owners[torch.div(owners, layout.homes, rounding_mode="floor") == here] = -1
    return owners


def check_peer_clones(draw: Draw, cases: tuple[PeerCloneCase, ...]) -> None:
    """What moves lies where it belongs, and nothing else is touched."""
    for ranks, num_experts, places, shapes in cases:
        layout = ExpertPlaces(ranks, num_experts, places)
        what = f"{layout}, matrices {shapes}"
        check_counts(draw, layout, what)
        for _ in range(3):
            owners = drawn_owners(draw, layout)
            check_weights(draw, layout, shapes, owners, what)
            check_gradients(draw, layout, shapes, owners, what)


def check_counts(draw: Draw, layout: ExpertPlaces, what: str) -> None:
    size = layout.num_ranks * layout.num_experts
    memory, pointers = shared_memory(draw, layout.num_ranks, 4 * size)
    counts = draw.integers(9, layout.num_ranks, layout.num_experts)
    for rank, own in enumerate(counts):
        kernels.put_counts(own.cumsum(0).int(), pointers, rank)
    for rank, found in enumerate(memory.view(torch.int32)):
        assert torch.equal(found[:size].view(counts.shape).long(), counts), f"{what}: rank {rank}"
        assert (found[size:] == -1).all(), f"{what}: what lies behind on rank {rank}"


def check_weights(
    draw: Draw,
    layout: ExpertPlaces,
    shapes: tuple[tuple[int, int], ...],
    owners: Tensor,
    what: str,
) -> None:
    """Places of clones have the weights of their owners; the others are as they were."""
    parts = CloneMemory(layout.places, shapes, draw.dtype.itemsize)
    memory, pointers = shared_memory(draw, layout.num_ranks, parts.num_bytes)
    for shape, start in zip(shapes, parts.starts, strict=True):
        # With a gap of a row between the matrices, as flat buffers may have it.
        padded = whole(draw, layout.num_experts, shape[0] + 1, shape[1]).to(draw.dtype)
        weights = padded[:, :-1]
        for rank in range(layout.num_ranks):
            own = weights[rank * layout.homes :][: layout.homes]
            kernels.put_weights(own, owners, pointers, rank, start)
        expected = weights[owners.clamp(min=0)].clone()
        expected[owners < 0] = torch.nan
        for rank in range(layout.num_ranks):
            found = stack_of(memory[rank], start, (layout.places, *shape), draw.dtype)
            wanted = expected[rank * layout.places :][: layout.places]
            assert torch.equal(found.nan_to_num(99), wanted.nan_to_num(99)), (
                f"{what}: weights {shape} on rank {rank}, owners {owners.tolist()}"
            )


def check_gradients(
    draw: Draw,
    layout: ExpertPlaces,
    shapes: tuple[tuple[int, int], ...],
    owners: Tensor,
    what: str,
) -> None:
    """Homes get the gradients of their clones times the scale; those of empty places are NaN."""
    parts = CloneMemory(layout.places, shapes, 4)
    memory, pointers = shared_memory(draw, layout.num_ranks, parts.num_bytes)
    for shape, start in zip(shapes, parts.starts, strict=True):
        gradients = whole(draw, layout.num_places, *shape)
        gradients[owners < 0] = torch.nan
        for rank in range(layout.num_ranks):
            there = stack_of(memory[rank], start, (layout.places, *shape), torch.float32)
            there.copy_(gradients[rank * layout.places :][: layout.places])
        before = whole(draw, layout.num_experts, shape[0] + 1, shape[1]).to(draw.dtype)
        expected = before.double()
        for place, owner in enumerate(owners.tolist()):
            if owner >= 0:
                expected[owner, :-1] += 2 * gradients[place].double()
        sums = before.clone()
        for rank in range(layout.num_ranks):
            own = sums[rank * layout.homes :][: layout.homes, :-1]
            kernels.add_clone_gradients(own, owners, pointers, rank, start, 2.0)
        assert torch.equal(sums.double(), expected), f"{what}: gradients {shape}"


def stack_of(memory: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)
