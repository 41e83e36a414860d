"""Meshes of one process, the journal of their collectives, and memory that ranks share."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups import peer_memory
from lightning_megatron.groups.collectives import all_reduce_, broadcast_object
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.journal import Call, Journal
from lightning_megatron.groups.mesh import GROUP_NAMES, ParallelMesh
from lightning_megatron.groups.p2p import start_transfers
from lightning_megatron.groups.peer_memory import PeerMemory
from lightning_megatron.plan.token_buffer import TokenBuffer
from tests.worlds.test_collectives import PAIRS

CPU = torch.device("cpu")
LABEL = "replay of layers 3..4, backward, 2 collectives"


def test_a_single_mesh_needs_no_process_group_and_its_collectives_return_their_input() -> None:
    mesh = ParallelMesh.single(seed=3)
    assert copy.deepcopy(mesh) is mesh, "a copied module must stay in its groups"
    assert copy.deepcopy(mesh.tp) is mesh.tp
    assert not torch.distributed.is_initialized()
    assert all(mesh.on_cpu(name).size == 1 for name in GROUP_NAMES)
    assert mesh.random.seed == 3
    x = torch.randn(4, 8, 4)
    for pair in PAIRS.values():
        assert pair(x, mesh.tp) is x
    assert all_reduce_(x, mesh.tp) is x
    assert broadcast_object("same", mesh.tp) == "same"
    check_same_everywhere(mesh.tp, {"anything": 1})
    start_transfers([], [], mesh.tp).wait()
    mesh.destroy()


def test_a_replay_without_collectives_keeps_the_last_call() -> None:
    journal = Journal()
    journal.repeat([], LABEL)
    assert journal.last is None
    first = journal.note("all_reduce", "dp", (0, 1))
    journal.repeat([], LABEL)
    assert journal.last == Call(*first)


def test_a_replay_of_an_exchange_is_reported_as_an_exchange() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("exchange", "pp neighbours", (1,))
    journal.repeat(calls, LABEL)
    assert journal.last is not None
    assert journal.last.is_exchange
    assert not Call(LABEL, "tp", 1, (0, 1)).is_exchange


def test_nested_recordings_raise_and_leave_the_journal_usable() -> None:
    journal = Journal()
    with (
        pytest.raises(RuntimeError, match="must not be nested"),
        journal.recording(),
        journal.recording(),
    ):
        pass
    journal.note("all_reduce", "dp", (0, 1))
    assert journal.counts == {"dp": 1}


def test_a_replay_after_the_run_is_refused() -> None:
    journal = Journal()
    with journal.recording() as calls:
        journal.note("all_reduce", "dp", (0, 1))
    journal.end(["dp"])
    with pytest.raises(UnsupportedError, match="after the run"):
        journal.repeat(calls, LABEL)


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


@pytest.mark.parametrize("sizes", [(2, 3, 5, 2, 2, 4), (1, 0, 4, 2, 8, 8), (4, 7, 64, 8, 4, 0)])
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
