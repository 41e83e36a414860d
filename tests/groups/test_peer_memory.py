"""Peer memory grows on demand, and dispatched tokens reach only the ranks of their chosen experts."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.experts.transport.peer_transfer import Collectives
from lightning_megatron.groups import peer_memory
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.peer_memory import PeerMemory
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.token_buffer import TokenBuffer
from tests.world import run_world

CPU = torch.device("cpu")


def test_reservations_that_fit_share_one_region() -> None:
    memory = PeerMemory()
    first = memory.reserve(None, 64, CPU)
    assert memory.reserve(None, 48, CPU) is first
    larger = memory.reserve(None, 65, CPU)
    assert larger.memory.numel() == 65
    assert memory.reserve(None, 64, CPU) is larger
    memory.release()
    assert memory.reserve(None, 64, CPU) is not larger


def test_memory_reserved_in_inference_mode_is_no_inference_tensor() -> None:
    memory = PeerMemory()
    with torch.inference_mode():
        region = memory.reserve(None, 64, CPU)
    assert not region.memory.is_inference()


def test_views_of_a_region_are_cached_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_memory, "_REMEMBERED_VIEWS", 2)
    region = PeerMemory().reserve(None, 64, CPU)
    region.memory.copy_(torch.arange(64))
    first = region.view(8, (2, 3), torch.uint8)
    assert torch.equal(first, torch.arange(8, 14, dtype=torch.uint8).view(2, 3))
    assert region.view(8, (2, 3), torch.uint8) is first
    assert region.view(8, (1,), torch.int64).tolist() == [int.from_bytes(range(8, 16), "little")]
    for start in range(8):
        region.view(start, (1,), torch.uint8)
    assert len(region._views) <= 2
    assert torch.equal(region.view(8, (2, 3), torch.uint8), first)


def test_peer_memory_is_unavailable_on_cpu() -> None:
    assert PeerMemory().reason_unavailable(None, CPU) == "ranks are on cpu"


@pytest.mark.parametrize(
    "sizes", [(2, 3, 5, 2, 2, 4), (3, 1, 1, 1, 2, 2), (1, 0, 4, 2, 8, 8), (4, 7, 64, 8, 4, 0)]
)
def test_parts_of_a_token_buffer_are_adjacent_and_aligned_to_16_bytes(
    sizes: tuple[int, ...],
) -> None:
    names = ("num_ranks", "num_tokens", "width", "top_k", "element", "scale")
    buffer = TokenBuffer(**dict(zip(names, sizes, strict=True)))
    assert buffer.count == buffer.num_ranks * buffer.num_tokens
    assert 0 <= buffer.scales_at - buffer.count * buffer.width * buffer.element < 16
    assert (
        0 <= buffer.experts_at - buffer.scales_at - buffer.count * buffer.top_k * buffer.scale < 16
    )
    assert buffer.num_bytes == buffer.experts_at + buffer.count * buffer.top_k * 8
    assert buffer.scales_at % 16 == buffer.experts_at % 16 == 0


def _check_dispatch(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, ep=size))
    hidden = torch.arange(3.0).view(3, 1).expand(3, 4) + 10 * rank
    experts = torch.tensor([[0, 1], [3, -1], [-1, -1]])
    probabilities = torch.full((3, 2), 0.5 + rank)
    buffer = Collectives(mesh.ep, 2).dispatch(hidden, probabilities, experts)
    # On both ranks token 0 chose experts of the first rank, token 1 chose an expert of the
    # second rank, and token 2 chose none.
    expected = torch.full((6, 4), torch.nan)
    expected[[rank, 3 + rank]] = torch.tensor([[0.0], [10.0]]) + rank
    assert torch.equal(buffer.rows.nan_to_num(99.0), expected.nan_to_num(99.0))
    assert torch.equal(buffer.experts, experts.repeat(2, 1))
    assert torch.equal(buffer.scales, torch.tensor([0.5, 1.5]).repeat_interleave(6).view(6, 2))
    again = Collectives(mesh.ep, 2).dispatch(hidden, None, experts)
    assert again.region is buffer.region
    assert again.scales is None
    mesh.destroy()


def test_ranks_receive_only_tokens_that_chose_their_experts() -> None:
    run_world(_check_dispatch, 2)
