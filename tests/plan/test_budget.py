"""Memory estimates equal closed forms, and change with every size as expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, estimate_memory, static_bytes
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.kept_activations import eager_activations, fused_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape

LLAMA = ModelShape(
    num_layers=16,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=131072,
    gated=True,
    norm="rmsnorm",
)
GPT2 = ModelShape(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    vocab_size=50257,
    num_positions=1024,
    bias=True,
    tied=True,
)
QWEN3_30B_A3B = ModelShape(
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    gated=True,
    norm="rmsnorm",
    qk_norm=True,
    experts=ExpertsConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
)
STEP = TrainingShape(seq_length=1024, num_microbatches=8)


def layout(dp: int = 1, **sizes: Any) -> ParallelLayout:
    world_size = dp
    for name in ("tp", "pp"):
        world_size *= sizes.get(name, 1)
    return ParallelLayout(world_size, **sizes)


def test_parameter_counts_match_published_models() -> None:
    (estimate,) = estimate_memory(GPT2, layout(), STEP)
    assert (
        estimate.num_parameters == 124_439_808 + (50304 - 50257) * 768
    )  # GPT-2 small, and the padded vocabulary
    (estimate,) = estimate_memory(replace(LLAMA, num_layers=32, vocab_size=128256), layout(), STEP)
    assert estimate.num_parameters == 8_030_261_248  # Llama 3 8B
    (estimate,) = estimate_memory(QWEN3_30B_A3B, layout(), STEP)
    assert estimate.num_parameters == 30_532_122_624


def test_a_tied_head_on_another_stage_counts_as_a_copy() -> None:
    stages = estimate_memory(GPT2, layout(pp=2), STEP)
    (single,) = estimate_memory(GPT2, layout(), STEP)
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters + 50304 * 768


def v_layout(pp: int, stage_layers: list[int] | None = None) -> ParallelLayout:
    return ParallelLayout(pp, pp=pp, vpp=2, stage_layers=stage_layers, shape="v")


def test_the_first_stage_of_a_v_has_embedding_and_head() -> None:
    step = replace(STEP, schedule="zb-v", num_microbatches=16)
    stages = estimate_memory(GPT2, v_layout(2), step)
    (single,) = estimate_memory(GPT2, layout(), STEP)
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters
    untied = estimate_memory(LLAMA, v_layout(4, [2] * 8), step)
    ends = 2 * 131072 * 4096 + 4096
    assert untied[0].num_parameters - untied[1].num_parameters == ends
    assert [stage.loss > 0 for stage in untied] == [True, False, False, False]


def test_deferred_weight_halves_need_memory() -> None:
    step = replace(STEP, num_microbatches=32)
    plain, lead_one, lead_two = (
        estimate_memory(LLAMA, layout(pp=8), replace(step, schedule=name))
        for name in ("1f1b", "zb-h1", "zb-h2")
    )
    # In 1f1b the last stage keeps one microbatch. With lead 1 or 2 all stages keep many.
    assert plain[-1].activations < lead_one[-1].activations < lead_two[-1].activations
    assert lead_one[0].activations == pytest.approx(plain[0].activations, rel=0.02)
    full = [
        estimate_memory(LLAMA, layout(pp=8), replace(step, schedule=name, recompute="full"))
        for name in ("1f1b", "zb-h1")
    ]
    # Recomputed activations wait with the gradients.
    assert full[1][-1].activations > 4 * full[0][-1].activations


def test_deferred_weight_gradients_keep_their_factors() -> None:
    costs = activation_costs(LLAMA, fused_activations(LLAMA), MicrobatchShape(num_tokens=4096))
    hidden, query, key, inner = 4096, 4096, 1024, 14336
    inputs = hidden + query + hidden + inner
    outputs = query + 2 * key + hidden + 2 * inner + hidden
    assert costs.waiting == 4096 * 2 * (inputs + outputs)
    assert costs.head_waiting == 4096 * 2 * (hidden + 131072)


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_mixed_adamw_takes_6_and_12_over_dp_bytes_a_parameter(count: int, dp: int) -> None:
    total = sum(static_bytes(count, dp, STEP).values())
    assert 0 <= total - (6 * count + 12 * count / dp) < 12
    assert sum(static_bytes(count, dp, replace(STEP, zero=0)).values()) == 18 * count
    single = replace(STEP, parameter_bytes=4, main_bytes=0, activation_bytes=4, zero=0)
    assert sum(static_bytes(count, dp, single).values()) == 16 * count


def test_a_block_keeps_the_activations_of_its_layers() -> None:
    tokens, costs = (
        4096,
        activation_costs(LLAMA, fused_activations(LLAMA), MicrobatchShape(num_tokens=4096)),
    )
    hidden, query, key, inner = 4096, 4096, 1024, 14336
    per_token = 2 * (4 * hidden + (query + 2 * key) + query + 3 * inner) + 4 * 32 + 2 * 8
    assert costs.kept == costs.layer == tokens * per_token
    assert costs.loss_kept == 2 * tokens * 131072
    eager = activation_costs(LLAMA, eager_activations(LLAMA), MicrobatchShape(num_tokens=4096))
    assert eager.kept - costs.kept == tokens * 2 * (query + key + inner) - tokens * 8
    assert eager.loss_kept == 2 * costs.loss_kept


def test_sequence_parallelism_divides_the_residual_stream_that_tp_keeps() -> None:
    table = fused_activations(LLAMA)
    undivided, divided = (
        activation_costs(
            LLAMA, table, MicrobatchShape(num_tokens=4096, tp=tp, sequence_parallel=tp > 1)
        ).kept
        for tp in (1, 4)
    )
    assert divided * 4 == undivided
    plain = activation_costs(LLAMA, table, MicrobatchShape(num_tokens=4096, tp=4)).kept
    assert plain - divided == 4096 * (2 * 4 * 4096 + 2 * 8) * 3 // 4


def test_full_recomputation_keeps_only_the_inputs_of_blocks() -> None:
    costs = {
        mode: activation_costs(
            LLAMA, fused_activations(LLAMA), MicrobatchShape(num_tokens=4096), recompute=(mode,)
        )  # type: ignore[arg-type]
        for mode in ("none", "selective", "full")
    }
    assert costs["full"].kept == costs["full"].boundary == 4096 * 4096 * 2
    assert costs["none"].kept - costs["selective"].kept == 4096 * 4 * 32
    memory = [
        estimate_memory(LLAMA, layout(), replace(STEP, recompute=mode))[0].peak  # type: ignore[arg-type]
        for mode in ("full", "selective", "none")
    ]
    assert memory == sorted(memory)


def test_the_first_stages_hold_more_microbatches() -> None:
    even = layout(pp=4, stage_layers=[4] * 4)
    stages = estimate_memory(LLAMA, even, STEP)
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    costs = activation_costs(LLAMA, eager_activations(LLAMA), MicrobatchShape(num_tokens=1024))
    assert [stage.activations for stage in stages[:3]] == [4 * n * costs.kept for n in (4, 3, 2)]
    assert stages[3].activations == 4 * costs.kept + costs.head
    assert [stage.loss > 0 for stage in stages] == [False, False, False, True]
    assert all(stage.communication == 2 * costs.boundary for stage in stages)
    gpipe = estimate_memory(LLAMA, even, replace(STEP, schedule="gpipe"))
    assert [stage.in_flight for stage in gpipe] == [8] * 4
    chunks = estimate_memory(
        LLAMA,
        layout(pp=4, vpp=2, stage_layers=[2] * 8),
        replace(STEP, schedule="interleaved"),
    )
    assert [stage.in_flight for stage in chunks] == [11, 9, 7, 5]


def test_stages_without_layers_hold_only_the_embedding_or_the_head() -> None:
    stages = estimate_memory(LLAMA, layout(pp=4, stage_layers="E|(t*8|)*2L"), STEP)
    table = LLAMA.vocab_rows(1) * LLAMA.hidden_size
    assert [stage.num_parameters for stage in stages] == [
        table,
        8 * LLAMA.layer_parameters(1),
        8 * LLAMA.layer_parameters(1),
        table + LLAMA.hidden_size,
    ]
    head = activation_costs(LLAMA, eager_activations(LLAMA), MicrobatchShape(num_tokens=1024)).head
    assert [stage.activations for stage in stages] == [
        0,
        *[stage.activations for stage in stages[1:3]],
        head,
    ]
    assert stages[1].activations > 1.4 * stages[2].activations > 0


def test_the_estimate_divides_layers_by_cost_by_default() -> None:
    by_cost = estimate_memory(LLAMA, layout(pp=4), STEP)
    explicit = layout(pp=4, stage_layers=[4, 5, 5, 2])
    assert by_cost == estimate_memory(LLAMA, explicit, STEP)
    assert by_cost != estimate_memory(LLAMA, layout(pp=4, stage_layers=[4] * 4), STEP)


def test_the_parts_of_an_estimate_add_up_to_the_peak() -> None:
    estimates = estimate_memory(LLAMA, layout(pp=2, dp=2), replace(STEP, library_bytes=2**26))
    for estimate in estimates:
        assert estimate.static == estimate.num_parameters * (2 + 4 + 6)
        assert estimate.peak - estimate.static == sum(
            (
                estimate.activations,
                estimate.loss,
                estimate.workspace,
                estimate.communication,
                estimate.libraries,
            )
        )


def test_an_optimizer_that_copies_everything_can_be_the_peak() -> None:
    tiny = replace(STEP, seq_length=8, num_microbatches=1)
    (fused,), (copying,) = (
        estimate_memory(LLAMA, layout(dp=2), replace(tiny, step_bytes=step_bytes))
        for step_bytes in (0, 8)
    )
    assert fused.moment == "backward"
    assert copying.moment == "optimizer step"
    assert copying.peak == copying.num_parameters * (2 + 4 + 6 + 4)


SIZES = st.fixed_dictionaries(
    {
        "seq_length": st.sampled_from([64, 128, 1024]),
        "microbatch_size": st.integers(1, 4),
        "num_microbatches": st.integers(4, 8),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "zero": st.integers(0, 1),
        "sequence_parallel": st.booleans(),
    }
)


@given(
    SIZES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.booleans()
)
def test_more_work_never_takes_less_memory_and_more_ranks_never_take_more(
    sizes: dict, tp: int, pp: int, dp: int, fused: bool
) -> None:
    model, training = GPT2 if tp == 1 else LLAMA, TrainingShape(**sizes)
    table = (fused_activations if fused else eager_activations)(model)

    def peak(training: TrainingShape, tp: int = tp, pp: int = pp, dp: int = dp) -> int:
        return max(
            estimate.peak
            for estimate in estimate_memory(model, layout(dp, tp=tp, pp=pp), training, table=table)
        )

    base = peak(training)
    assert peak(replace(training, seq_length=2 * training.seq_length)) > base
    assert peak(replace(training, microbatch_size=training.microbatch_size + 1)) > base
    assert peak(replace(training, num_microbatches=training.num_microbatches + 1)) >= base
    assert peak(replace(training, gradient_bytes=2)) < base
    assert peak(replace(training, recompute="none")) >= base
    assert peak(training, dp=2 * dp) <= base
    assert peak(training, tp=2 * tp) < base
    assert peak(replace(training, sequence_parallel=True)) <= peak(
        replace(training, sequence_parallel=False)
    )


def experts_of(**changes: object) -> ModelShape:
    assert QWEN3_30B_A3B.experts is not None
    return replace(QWEN3_30B_A3B, experts=replace(QWEN3_30B_A3B.experts, **changes))


def test_experts_are_divided_over_ep_and_etp_and_their_state_over_replicas() -> None:
    (single,) = estimate_memory(QWEN3_30B_A3B, layout(), STEP)
    matrices = 48 * 128 * 3 * 2048 * 768
    dense = single.num_parameters - matrices
    # 8 data ranks hold 4 different sets of experts, each on 2 ranks.
    (eight_ranks,) = estimate_memory(QWEN3_30B_A3B, ParallelLayout(8, ep=4), STEP)
    assert eight_ranks.num_parameters == dense + matrices // 4
    assert eight_ranks.optimizer == 8 * (dense // 8 + matrices // 4 // 2)
    (divided,) = estimate_memory(QWEN3_30B_A3B, ParallelLayout(8, tp=2, ep=2, etp=4), STEP)
    (folded,) = estimate_memory(QWEN3_30B_A3B, ParallelLayout(8, tp=2, ep=8, etp=1), STEP)
    assert divided.num_parameters == folded.num_parameters
    assert divided.main_parameters == folded.main_parameters


def test_only_stages_with_expert_layers_hold_experts() -> None:
    model = replace(experts_of(layers=tuple(layer >= 36 for layer in range(48))), tied=False)
    even = ParallelLayout(4, pp=4, stage_layers=[12] * 4)
    stages = estimate_memory(model, even, STEP)
    per_layer = model.expert_parameters(ParallelLayout(4, pp=4))
    assert (
        stages[1].num_parameters
        == stages[2].num_parameters
        < 12 * per_layer
        < stages[3].num_parameters
    )
    # Layers are in order of chunks, then stages: here the last chunk of every stage has experts.
    chunks = estimate_memory(
        model,
        ParallelLayout(4, pp=4, vpp=4, stage_layers=[3] * 16),
        replace(STEP, schedule="interleaved"),
    )
    assert all(stage.num_parameters > 3 * per_layer for stage in chunks)
    assert chunks[1].num_parameters == chunks[2].num_parameters


def test_an_all_gather_has_room_for_all_tokens_and_an_all_to_all_for_a_balanced_share() -> None:
    layouts = [ParallelLayout(4, ep=4)] * 2
    steps = [replace(STEP, expert_transport=kind) for kind in ("all_gather", "all_to_all")]  # type: ignore[arg-type]
    gathered, exchanged = (
        estimate_memory(QWEN3_30B_A3B, parallel_layout, training)[0].activations
        for parallel_layout, training in zip(layouts, steps, strict=True)
    )
    (single,) = estimate_memory(QWEN3_30B_A3B, layout(4), STEP)
    assert single.activations < exchanged < 1.02 * single.activations  # Two maps of rows for one.
    assert gathered > 2.5 * exchanged
    recomputed = estimate_memory(QWEN3_30B_A3B, layout(4), replace(STEP, recompute="experts"))[
        0
    ].activations
    features = 1024 * 8 * 768
    assert single.activations - recomputed == 48 * 4 * 2 * features


def test_invalid_training_shapes_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match="seq_length must be"):
        estimate_memory(GPT2, layout(), replace(STEP, seq_length=0))
    with pytest.raises(ParallelPlanError, match="zero must be 0 or 1"):
        estimate_memory(GPT2, layout(), replace(STEP, zero=2))
    with pytest.raises(
        ParallelPlanError, match="shape is 'loop'. Use shape='v' for schedule 'zb-v'"
    ):
        estimate_memory(LLAMA, layout(pp=2, vpp=2), replace(STEP, schedule="zb-v"))
    with pytest.raises(ParallelPlanError, match="recompute must be none, selective"):
        estimate_memory(GPT2, layout(), replace(STEP, recompute="some"))  # type: ignore[arg-type]
    with pytest.raises(ParallelPlanError, match="Use a seq_length of 1002"):
        estimate_memory(LLAMA, layout(tp=2), replace(STEP, seq_length=1001, sequence_parallel=True))
    with pytest.raises(ParallelPlanError, match="at least one layer"):
        estimate_memory(replace(GPT2, num_layers=1), layout(pp=2), STEP)
