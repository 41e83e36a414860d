"""Tests that graphs of segments on GPUs have eager bits where two eager trainings agree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import run_ranks
from tests.gpu.shared_gpu import is_shared
from tests.graphs.trained import Case, Trained, counted_replays, train, two_in_flight

SIZES: dict[str, Any] = {
    "vocab_size": 256, "max_seq_length": 128, "num_layers": 4, "hidden_size": 128, "num_heads": 4,
}  # fmt: skip
GPT2 = GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.0)
LLAMA = GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=256)
EXPERTS = replace(
    LLAMA, experts=ExpertsConfig(num_experts=8, top_k=2, ffn_hidden_size=128, aux_loss=0.01)
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS}
STEPS = (2, 2) + (3,) * 18
case_of = partial(Case, dtype=torch.bfloat16, length=lambda step, number: 128)


def train_on_gpu(
    case: Case, layout: ParallelLayout | None, graphs: bool, spoil: Any = None, **mesh: Any
) -> Trained:
    torch.cuda.set_device(torch.cuda.current_device())
    device = torch.device("cuda", torch.cuda.current_device())
    device_mesh = (
        ParallelMesh.create(layout, device=device, **mesh)
        if layout
        else ParallelMesh.single(device)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        result = train(case, device_mesh, graphs=graphs, spoil=spoil)
        torch.cuda.synchronize()
        if result.runner is not None:
            assert result.runner.failure is None, result.runner.failure
            assert result.runner.num_graphs > 0
            assert not result.runner.eager
            result.runner.release()
    return result


def compare_with_eager(
    case: Case, layout: ParallelLayout | None = None, what: str = "", **mesh: Any
) -> int:
    """Compare a training by graphs with two eager trainings, and return the number of slots."""
    eager = train_on_gpu(case, layout, False, **mesh)
    second_eager = train_on_gpu(case, layout, False, **mesh)
    by_graphs = train_on_gpu(case, layout, True, **mesh)
    losses = zip(by_graphs.losses, eager.losses, second_eager.losses, strict=True)
    for number, (actual, expected, repeated) in enumerate(losses):
        where = f"{what}, loss {number}: {actual} {expected} {repeated}"
        if torch.equal(expected, repeated):
            assert torch.equal(actual, expected), where
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-3, msg=where)
    evaluated = zip(by_graphs.evaluated, eager.evaluated, second_eager.evaluated, strict=True)
    for actual, expected, repeated in evaluated:
        if torch.equal(expected, repeated):
            assert torch.equal(actual, expected), f"{what}: evaluated {actual} and {expected}"
    for name, parameter in by_graphs.parameters.items():
        if torch.equal(eager.parameters[name], second_eager.parameters[name]):
            assert torch.equal(parameter, eager.parameters[name]), f"{what}: {name}"
    assert by_graphs.counts == eager.counts
    return by_graphs.num_slots


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_graphs_of_segments_on_one_gpu_have_eager_bits(kind, recompute):
    compare_with_eager(case_of(CONFIGS[kind], "1f1b", STEPS, recompute))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CONFIGS)
def test_two_microbatches_in_flight_share_graphs_of_recomputed_layers_on_one_gpu(kind):
    num_slots = compare_with_eager(case_of(CONFIGS[kind], two_in_flight, STEPS, "full"))
    # Embedding and head have a slot for each microbatch in flight, and the layers share one slot.
    assert num_slots == 2 + 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_graphs_of_several_shapes_and_of_evaluation_have_eager_bits(kind):
    lengths = lambda step, number: (128, 96, 64)[step % 2 + number % 2]  # noqa: E731
    options: Any = {"length": lengths, "max_shapes": 4, "evaluates": 3}
    with counted_replays() as replays:
        compare_with_eager(case_of(CONFIGS[kind], "1f1b", STEPS[:12], **options))
    assert replays == {"training": sum(STEPS[2:12]), "evaluation": 11 * 3}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_calls_between_graphs_have_eager_bits_although_torch_fills_empty_tensors(kind):
    def hook(model: GPT) -> None:
        layers: Any = model.layers
        layers["0"].mlp.register_forward_hook(lambda *_: None)
        layers["1"].register_forward_hook(lambda *_: None)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        compare_with_eager(case_of(CONFIGS[kind], "1f1b", STEPS[:8]), spoil=hook)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["embedding", "attention", "mlp", "head"])
def test_graphs_of_a_single_scope_on_one_gpu_have_eager_bits(scope):
    compare_with_eager(case_of(LLAMA, "1f1b", STEPS[:8], scopes=(scope,)))


def check_two_ranks(rank: int, size: int) -> None:
    steps = (4,) * 8
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        shape: Any = "v" if schedule == "zb-v" else "loop"
        layout = ParallelLayout(size, pp=2, vpp=chunks, shape=shape)
        for config in (GPT2, EXPERTS):
            for recompute in ("none", "full"):
                what = f"{schedule}, {config.experts is not None}, {recompute}"
                compare_with_eager(case_of(config, schedule, steps, recompute), layout, what)
    compare_with_eager(case_of(LLAMA, microbatches=steps), ParallelLayout(size), "dp2")
    # Graphs with collectives need a GPU for each rank.
    if not is_shared():
        layout = ParallelLayout(size, tp=2)
        case = case_of(GPT2, microbatches=steps)
        compare_with_eager(case, layout, "tp2 with sp", sequence_parallel=True)
    transports: Any = ("one_sided",) if is_shared() else ("all_gather", "one_sided")
    for transport in transports:
        case = case_of(EXPERTS, microbatches=steps, transport=transport)
        compare_with_eager(case, ParallelLayout(size, ep=2), f"ep2 {transport}")


def check_four_ranks(rank: int, size: int) -> None:
    case = case_of(EXPERTS, microbatches=(4,) * 8, recompute="full", transport="one_sided")
    layout = ParallelLayout(size, pp=2, ep=2)
    for places in (0, 1):
        num_slots = compare_with_eager(replace(case, places=places), layout, f"{places} clones")
        # Embedding or head have a slot per microbatch in flight, and the layers share one slot.
        assert num_slots == (1 if rank * 2 >= size else 2) + 1


@pytest.mark.gpu4
def test_recomputed_layers_with_experts_share_graphs_on_four_gpus():
    run_ranks(check_four_ranks, 4)


@pytest.mark.gpu2
def test_graphs_of_segments_on_two_gpus_have_eager_bits():
    run_ranks(check_two_ranks, 2)
