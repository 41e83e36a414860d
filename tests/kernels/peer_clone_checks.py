"""Checks of kernels that move counts, weights and gradients of clones between several ranks. All
ranks are on one device, and all numbers are integers, so that sums are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.kernels import triton as kernels
from lightning_megatron.plan.expert_clones import CloneMemory, ExpertPlaces
from tests.kernels.checks import Draw

#: Ranks, experts, places per rank, rows and columns of both matrices of an expert.
PeerCloneCase = tuple[int, int, int, tuple[tuple[int, int], ...]]


def shared_memory(
    draw: Draw, num_ranks: int, num_bytes: int, value: int = 0xFF
) -> tuple[Tensor, Tensor]:
    """Return memory of several ranks, whose bytes are NaN by default, and its addresses."""
    shape = (num_ranks, -(-num_bytes // 128) * 128)
    memory = torch.full(shape, value, dtype=torch.uint8, device=draw.device)
    return memory, torch.tensor([part.data_ptr() for part in memory], device=draw.device)


def draw_integers(draw: Draw, *shape: int) -> Tensor:
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
    """Check that counts, weights and gradients arrive without a change of other memory."""
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
    for rank, rank_counts in enumerate(counts):
        kernels.put_counts(rank_counts.cumsum(0).int(), pointers, rank)
    for rank, numbers in enumerate(memory.view(torch.int32)):
        assert torch.equal(numbers[:size].view(counts.shape).long(), counts), f"{what}: rank {rank}"
        assert (numbers[size:] == -1).all(), f"{what}: memory behind the counts on rank {rank}"


def check_weights(
    draw: Draw, layout: ExpertPlaces, shapes: tuple[tuple[int, int], ...], owners: Tensor, what: str
) -> None:
    """Check that places of clones get the weights of their owners, and other places stay as is."""
    parts = CloneMemory(layout.places, shapes, draw.dtype.itemsize)
    memory, pointers = shared_memory(draw, layout.num_ranks, parts.num_bytes)
    for shape, start in zip(shapes, parts.starts, strict=True):
        # A gap of one row lies between the matrices, as it may in flat buffers.
        padded = draw_integers(draw, layout.num_experts, shape[0] + 1, shape[1]).to(draw.dtype)
        weights = padded[:, :-1]
        for rank in range(layout.num_ranks):
            rank_weights = weights[rank * layout.homes :][: layout.homes]
            kernels.put_weights(rank_weights, owners, pointers, rank, start)
        expected = weights[owners.clamp(min=0)].clone()
        expected[owners < 0] = torch.nan
        for rank in range(layout.num_ranks):
            actual = stack_of(memory[rank], start, (layout.places, *shape), draw.dtype)
            rank_expected = expected[rank * layout.places :][: layout.places]
            assert torch.equal(actual.nan_to_num(99), rank_expected.nan_to_num(99)), (
                f"{what}: weights {shape} on rank {rank}, owners {owners.tolist()}"
            )


def check_gradients(
    draw: Draw, layout: ExpertPlaces, shapes: tuple[tuple[int, int], ...], owners: Tensor, what: str
) -> None:
    """Check that owners get the scaled gradients of their clones; empty places hold NaN."""
    parts = CloneMemory(layout.places, shapes, 4)
    memory, pointers = shared_memory(draw, layout.num_ranks, parts.num_bytes)
    for shape, start in zip(shapes, parts.starts, strict=True):
        gradients = draw_integers(draw, layout.num_places, *shape)
        gradients[owners < 0] = torch.nan
        for rank in range(layout.num_ranks):
            clones = stack_of(memory[rank], start, (layout.places, *shape), torch.float32)
            clones.copy_(gradients[rank * layout.places :][: layout.places])
        before = draw_integers(draw, layout.num_experts, shape[0] + 1, shape[1]).to(draw.dtype)
        expected = before.double()
        for place, owner in enumerate(owners.tolist()):
            if owner >= 0:
                expected[owner, :-1] += 2 * gradients[place].double()
        sums = before.clone()
        for rank in range(layout.num_ranks):
            rank_sums = sums[rank * layout.homes :][: layout.homes, :-1]
            kernels.add_clone_gradients(rank_sums, owners, pointers, rank, start, 2.0)
        assert torch.equal(sums.double(), expected), f"{what}: gradients {shape}"


def stack_of(memory: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)
