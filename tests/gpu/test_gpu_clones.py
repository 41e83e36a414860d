"""Tests of clones of experts whose weights and gradients GPUs write to, and read from, each other's
memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.experts.transport import peer_clones
from lightning_megatron.experts.transport.peer_transfer import Puts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.experts.cloned_layer import Case, ClonedLayer, any_legal_plan, distance, floats
from tests.experts.host_peers import delay
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of

#: All sums are integers below 256, which bfloat16 represents exactly.
EXACT = Case("one_sided", 2, has_slots=True, size=16, inner=16, dtype=torch.bfloat16)
CASES = {
    "slots": EXACT,
    "one place": replace(EXACT, places=1, seed=1),
    "autograd": replace(EXACT, has_slots=False, seed=2),
    "recomputed": replace(EXACT, recomputes=True, seed=3),
    "any plan": replace(EXACT, places=3, seed=4),
    "one rank late": replace(EXACT, seed=5),
    "swiglu": replace(EXACT, draw=floats, activation="swiglu", size=256, inner=128),
}
CYCLES = 9_000_000  # about 5 ms


def mesh_of(rank: int, size: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(size, ep=size), device=gpu_of(rank))


def legal_plan(counts: torch.Tensor, places: int, min_rows: int) -> Any:
    """Draw any legal plan on the host, and bring it to the GPU."""
    plan = any_legal_plan(counts.cpu(), places, min_rows)
    names = ("owners", "amounts", "off", "rows")
    return replace(plan, **{name: getattr(plan, name).to(counts.device) for name in names})


def _distances(rank: int, size: int) -> dict[str, tuple[float, int]]:
    from lightning_megatron.kernels import triton as kernels

    mesh = mesh_of(rank, size)
    clones = ClonedLayer(mesh, EXACT).choice.clones
    assert clones is not None
    assert isinstance(clones.transfer, Puts)
    distances = {}
    for name, case in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "any plan":
                patch.setattr(peer_clones, "place_clones", legal_plan)
            if name == "one rank late" and rank == 1:
                delay(patch, kernels, lambda: torch.cuda._sleep(CYCLES))
            distances[name] = distance(mesh, case)
    torch.cuda.synchronize()
    mesh.destroy()
    return distances


@on_two_and_four_gpus
def test_clones_change_no_bit_of_exact_sums_on_gpus(size):
    ranks = run_ranks(_distances, size)
    for name in CASES:
        gaps, moved = zip(*(distances[name] for distances in ranks), strict=True)
        assert min(moved) > 0, f"{name}: nothing moves"
        assert max(gaps) <= (2e-2 if name == "swiglu" else 0.0), f"{name}: {gaps}"


def _replay(rank: int, size: int) -> int:
    mesh = mesh_of(rank, size)
    layer, plain = ClonedLayer(mesh, EXACT), ClonedLayer(mesh, replace(EXACT, places=0))
    inputs = layer.drawn(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.train(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    for slot in layer.slots.values():
        slot.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        outputs = layer.train(*inputs)
    moved = 0
    for microbatch in range(1, 6):
        new = layer.drawn(microbatch)
        with torch.no_grad():
            for old, value in zip(inputs, new, strict=True):
                old.copy_(value)
        graph.replay()
        for slot in plain.slots.values():
            slot.clear()
        expected = plain.train(*new) | plain.gradients()
        replayed = outputs | layer.gradients()
        moved += int(outputs["moved"])
        for name, value in expected.items():
            assert torch.equal(replayed[name], value), f"{microbatch}, rank {rank}: {name}"
    del graph
    torch.cuda.synchronize()
    mesh.destroy()
    return moved


@on_two_and_four_gpus
def test_a_captured_layer_follows_new_plans_of_clones(size):
    assert all(moved > 0 for moved in run_ranks(_replay, size))
