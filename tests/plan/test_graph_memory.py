"""Estimates of the memory of CUDA graphs equal calculations by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.activations import ActivationCosts
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.graph_memory import GraphMemory, graph_memory
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.schedule import Schedule, build_schedule

#: A block that keeps 60 of attention and 40 of its MLP, and a head.
BLOCK = ActivationCosts(
    boundary=10,
    layer=100,
    kept=100,
    masks=0,
    layer_forward=20,
    layer_backward=30,
    head=12,
    head_backward=5,
    loss_kept=50,
    loss_forward=70,
    loss_backward=80,
    slots=0,
    waiting=45,
    head_waiting=8,
    weight_half=3,
    captured_attention=50,
    captured_network=25,
    network=40,
)
TOKENS = 4
ID = 8 * TOKENS
SEGMENTS = CudaGraphs("segments")


def memory(
    graphs: CudaGraphs, schedule: Schedule, stage: int = 0, is_block_whole: bool = False
) -> GraphMemory:
    block = replace(BLOCK, is_whole=is_block_whole)
    blocks = [[block, block]] * schedule.num_chunks
    return graph_memory(
        graphs,
        schedule,
        stage,
        blocks,
        BLOCK,
        num_tokens=TOKENS,
        input_bytes=16,
        transfers=20 if schedule.num_stages > 1 else 0,
    )


def test_one_slot_has_the_peak_of_one_microbatch() -> None:
    # Activations of two blocks, the head and the loss stay until the end of the backward pass.
    activations = 2 * 100 + 12 + 50
    estimate = memory(SEGMENTS, build_schedule("1f1b", 1, 8))
    assert estimate.pools == activations + (80 + 5)
    # Two sets of graphs, with ids and labels; all share the gradients of losses.
    assert estimate.inputs == 2 * 2 * ID + 4 * TOKENS
    assert estimate.total == estimate.pools + estimate.inputs
    assert memory(SEGMENTS, build_schedule("1f1b", 1, 64)) == estimate


def test_every_slot_of_a_stage_has_a_pool_and_inputs() -> None:
    schedule = build_schedule("1f1b", 2, 8)
    first, last = (memory(SEGMENTS, schedule, stage) for stage in (0, 1))
    assert first.pools == 2 * (2 * 100 + 50)
    assert first.inputs == 3 * ID + 10
    # The first hidden states are received, and lie in the inputs.
    assert last.pools == 2 * 100 + 12 + 50 + 85 - 10
    assert last.inputs == 2 * (10 + ID) + 4 * TOKENS


def test_weight_halves_have_a_pool_and_keep_their_inputs() -> None:
    schedule = build_schedule("zb-h1", 2, 8)
    estimate = memory(SEGMENTS, schedule, 1)
    slots = 2
    per_slot = 2 * 100 + 12 + 50 + 85 + (2 * 45 + 8) + 3 - 10
    assert estimate.pools == slots * per_slot
    assert estimate.inputs == (slots + 1) * (10 + ID + 4 * TOKENS)


@pytest.mark.parametrize(
    ("scope", "pools", "inputs"),
    [
        # Each block's attention reads hidden states that eager code writes.
        ("attention", 2 * 60 + 50 - 20, 2 * 20 + 10),
        # Each MLP reads the residual stream, and the output of attention that is added to it.
        ("mlp", 2 * 40 + 25, 2 * 40 + 10),
        ("head", 12 + 50 + 85 - 10, 2 * (10 + ID) + 4 * TOKENS),
        # The embedding keeps a sum and its terms.
        ("embedding", 2 * 10, 2 * ID),
    ],
)
def test_scopes_select_the_counted_memory(scope: str, pools: int, inputs: int) -> None:
    graphs = CudaGraphs("segments", scopes=(scope,))  # type: ignore[arg-type]
    assert memory(graphs, build_schedule("1f1b", 1, 8)) == GraphMemory(pools, inputs)


def test_recomputed_blocks_are_captured_completely_or_not_at_all() -> None:
    schedule = build_schedule("1f1b", 1, 8)
    attention = CudaGraphs("segments", scopes=("attention",))
    attention_and_mlp = CudaGraphs("segments", scopes=("attention", "mlp"))
    assert memory(attention, schedule, is_block_whole=True) == GraphMemory()
    assert memory(attention_and_mlp, schedule, is_block_whole=True).pools == 2 * 100 + 50 - 10


def test_experts_behind_a_transport_of_unknown_sizes_stay_eager() -> None:
    schedule = build_schedule("1f1b", 1, 8)

    def pools(is_static: bool) -> tuple[int, int]:
        mixture = replace(
            BLOCK, has_experts=True, experts=30, returned=7, static_transport=is_static
        )
        estimate = graph_memory(
            SEGMENTS,
            schedule,
            0,
            [[mixture]],
            mixture,
            num_tokens=TOKENS,
            input_bytes=16,
            transfers=0,
        )
        return estimate.pools, estimate.inputs

    static, eager = pools(True), pools(False)
    assert static[0] - eager[0] == 30
    assert eager[1] - static[1] == 2 * 7


def test_a_graph_of_a_full_step_has_one_pool_and_all_microbatches() -> None:
    full = CudaGraphs("full")
    estimate = memory(full, build_schedule("1f1b", 1, 8))
    # Two blocks and the head, while the loss has its gradient.
    assert estimate == GraphMemory(200 + 12 + 50 + 80 + 5, 8 * TOKENS * 16)
    # Two microbatches in flight on the first of two stages, and transfers.
    assert memory(full, build_schedule("1f1b", 2, 8)).pools == 2 * 200 + 30 + 20


def test_the_estimate_of_a_stage_has_a_part_for_graphs() -> None:
    model = ModelShape(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=128,
        gated=False,
    )
    layout = ParallelLayout(2, pp=2)
    step = TrainingShape(seq_length=64, num_microbatches=8)
    eager = estimate_memory(model, layout, step)
    graphs = estimate_memory(model, layout, replace(step, cuda_graphs=SEGMENTS))
    for eager_stage, graph_stage in zip(eager, graphs, strict=True):
        assert eager_stage.graphs == 0
        assert graph_stage.graphs > 0
        assert replace(graph_stage, graphs=0) == eager_stage
        assert graph_stage.peak == eager_stage.peak + graph_stage.graphs
    with pytest.raises(UnsupportedError, match="keep a limited number of microbatches"):
        estimate_memory(model, layout, replace(step, schedule="gpipe", cuda_graphs=SEGMENTS))
