"""Meshes of one process, the journal of their collectives, memory that ranks share, and values of
moved batches that the host knows.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from benchmarks.scale import layout_of, mesh_without_connections, steps_of
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups import host_values, peer_memory
from lightning_megatron.groups.collectives import all_reduce_, broadcast_object
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.groups.journal import Call, Journal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.nccl_options import GROUP_NAMES
from lightning_megatron.groups.peer_memory import PeerMemory
from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.plan.experts import TokenBuffer
from tests.worlds.test_collectives import PAIRS

CPU = torch.device("cpu")
LABEL = "replay of layers 3..4, backward, 2 collectives"


def test_a_single_mesh_needs_no_process_group_and_its_collectives_return_their_input() -> None:
    mesh = ParallelMesh.single(seed=3)
    assert copy.deepcopy(mesh) is mesh, "a copied module must stay in its groups"
    assert copy.deepcopy(mesh.tp) is mesh.tp
    assert not torch.distributed.is_initialized()
    assert all(getattr(mesh, f"{name}_cpu").size == 1 for name in GROUP_NAMES)
    assert mesh.random.seed == 3
    x = torch.randn(4, 8, 4)
    for pair in PAIRS.values():
        assert pair(x, mesh.tp) is x
    assert all_reduce_(x, mesh.tp) is x
    assert broadcast_object("same", mesh.tp) == "same"
    check_same_everywhere(mesh.tp, {"anything": 1})
    start_transfers([], [], mesh.tp).wait()
    mesh.destroy()


def test_a_rank_of_16384_creates_its_own_groups_alone_and_sums_over_lines() -> None:
    for rank in (0, 9001):
        mesh, created = mesh_without_connections(layout_of(16384), rank)
        sizes = [size for backend, size in created if backend == "nccl"]
        assert sizes[:7] == [8, 128, 16, 64, 16, 16384, 128]
        assert len(created) < 40
        assert [line.size for line in mesh.world_cpu.lines] == [128, 128]
        assert all(rank in line.ranks for line in mesh.world_cpu.lines)
        assert steps_of(mesh.world_cpu) == 508
        assert steps_of(mesh.checkpoint_cpu) == 508


def test_replays_keep_the_last_call_are_reported_by_kind_and_are_refused_after_the_run() -> None:
    journal = Journal()
    journal.repeat([], LABEL)
    assert journal.last is None
    first = journal.note("all_reduce", "dp", (0, 1))
    journal.repeat([], LABEL)
    assert journal.last == Call(*first)
    with journal.recording() as calls:
        journal.note("exchange", "pp neighbours", (1,))
    journal.repeat(calls, LABEL)
    assert journal.last.is_exchange
    assert not Call(LABEL, "tp", 1, (0, 1)).is_exchange
    with journal.recording() as calls:
        journal.note("all_reduce", "dp", (0, 1))
    journal.end(["dp"])
    with pytest.raises(UnsupportedError, match="after the run"):
        journal.repeat(calls, LABEL)


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


def test_reservations_that_fit_share_one_region_also_across_inference_mode() -> None:
    memory = PeerMemory()
    assert memory.reason_unavailable(None, CPU) == "ranks are on cpu"
    with torch.inference_mode():
        first = memory.reserve(None, 64, CPU)
    assert not first.memory.is_inference()
    assert memory.reserve(None, 48, CPU) is first
    larger = memory.reserve(None, 65, CPU)
    assert larger.memory.numel() == 65
    assert memory.reserve(None, 64, CPU) is larger
    memory.release()
    assert memory.reserve(None, 64, CPU) is not larger


def test_views_of_a_region_are_cached_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_memory, "_REMEMBERED_VIEWS", 2)
    region = PeerMemory().reserve(None, 64, CPU)
    region.memory.copy_(torch.arange(64))
    first = region.view(8, (2, 3), torch.uint8)
    assert torch.equal(first, torch.arange(8, 14, dtype=torch.uint8).view(2, 3))
    assert region.view(8, (2, 3), torch.uint8) is first
    for start in range(8):
        region.view(start, (1,), torch.uint8)
    assert len(region._views) <= 2
    assert torch.equal(region.view(8, (2, 3), torch.uint8), first)


def test_parts_of_a_token_buffer_are_adjacent_and_aligned_to_16_bytes() -> None:
    names = ("num_ranks", "num_tokens", "width", "top_k", "element", "scale")
    for sizes in ((2, 3, 5, 2, 2, 4), (1, 0, 4, 2, 8, 8), (4, 7, 64, 8, 4, 0)):
        buffer = TokenBuffer(**dict(zip(names, sizes, strict=True)))
        size_of_scales = buffer.count * buffer.top_k * buffer.scale
        assert buffer.count == buffer.num_ranks * buffer.num_tokens
        assert 0 <= buffer.scales_at - buffer.count * buffer.width * buffer.element < 16
        assert 0 <= buffer.experts_at - buffer.scales_at - size_of_scales < 16
        assert buffer.num_bytes == buffer.experts_at + buffer.count * buffer.top_k * 8
        assert buffer.scales_at % 16 == buffer.experts_at % 16 == 0


def make_batch() -> dict[str, Tensor]:
    return {
        "mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]),
        "labels": torch.arange(9).view(3, 3),
        "weights": torch.rand(3, 3),
    }


@pytest.mark.parametrize("evaluates", [False, True])
def test_values_of_views_of_a_moved_batch_are_known_on_the_host(evaluates: bool) -> None:
    original, host = make_batch(), HostValues()
    with torch.inference_mode(evaluates):
        with host.record_moves():
            moved: Any = move_data_to_device(original, torch.device("meta"))
            assert torch.is_grad_enabled() is not evaluates
        views = {name: tensor[1:3] for name, tensor in moved.items()}
        for name in ("mask", "labels"):
            known = host.of(views[name])
            assert known is not None
            assert torch.equal(known, original[name][1:3])
            assert torch.equal(host.read(moved[name].t()[1:]), original[name].t()[1:])
    assert host.of(views["weights"]) is None, "nothing is decided by floating-point numbers"
    assert host.of(views["mask"] + 1) is None
    assert host.num_reads == 0
    with host.record_moves():
        pass
    assert host.of(views["mask"]) is None, "the values of the last batch are forgotten"


def test_values_of_tensors_that_were_written_to_or_freed_are_forgotten() -> None:
    for side in ("device", "host"):
        original, host = make_batch(), HostValues()
        with host.record_moves():
            moved: Any = move_data_to_device(original, torch.device("meta"))
        (moved if side == "device" else original)["mask"][0, 0] = 0
        assert host.of(moved["mask"]) is None
        assert host.of(moved["labels"]) is not None
        del moved
        gc.collect()
        host.note(torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.long))
        assert len(host._cache) == 1


def test_host_tensors_are_returned_and_a_device_tensor_is_read_once_for_all_its_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, mask = HostValues(), make_batch()["mask"]
    assert host.of(mask) is host.read(mask) is mask
    monkeypatch.setattr(host_values, "_is_on_host", lambda tensor: False)
    for value in (mask[2, 2].item(), 0):
        mask[2, 2] = value
        reads = host.num_reads
        for row in mask.split(1):
            assert torch.equal(host.read(row), row)
        assert host.num_reads == reads + 1
