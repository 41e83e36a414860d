"""Memory estimates equal closed forms, and change with every size as expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, estimate_memory, static_bytes
from lightning_megatron.plan.kept_activations import eager_activations, fused_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.network_activations import MicrobatchShape
from tests.refusals import check_refusals

LLAMA = GPTConfig.llama(num_layers=16, vocab_size=131072).memory_shape()
GPT2 = GPTConfig.gpt2().memory_shape()
QWEN3_30B_A3B = GPTConfig.llama(
    num_layers=48, hidden_size=2048, ffn_hidden_size=6144, num_kv_heads=4, head_dim=128,
    vocab_size=151936, qk_norm=True,
    experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768},
).memory_shape()  # fmt: skip
STEP = TrainingShape(seq_length=1024, num_microbatches=8)
#: Sizes of LLAMA.
HIDDEN, QUERY, KEY, INNER = 4096, 4096, 1024, 14336


def layout(dp: int = 1, **sizes: Any) -> ParallelLayout:
    return ParallelLayout(dp * sizes.get("tp", 1) * sizes.get("pp", 1), **sizes)


def costs_of(table: Any = fused_activations, num_tokens: int = 4096, **options: Any) -> Any:
    recompute = options.pop("recompute", ())
    shape = MicrobatchShape(num_tokens=num_tokens, **options)
    more = {"recompute": recompute} if recompute else {}
    return activation_costs(LLAMA, table(LLAMA), shape, **more)


def test_parameter_counts_match_published_models():
    for model, number in (
        (GPT2, 124_439_808 + (50304 - 50257) * 768),  # GPT-2 small, and the padded vocabulary
        (replace(LLAMA, num_layers=32, vocab_size=128256), 8_030_261_248),  # Llama 3 8B
        (QWEN3_30B_A3B, 30_532_122_624),
    ):
        (estimate,) = estimate_memory(model, layout(), STEP)
        assert estimate.num_parameters == number


def test_a_tied_head_is_a_copy_unless_the_first_stage_of_a_v_has_both():
    (single,) = estimate_memory(GPT2, layout(), STEP)
    stages = estimate_memory(GPT2, layout(pp=2), STEP)
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters + 50304 * 768

    def v_layout(pp: int, stage_layers: list[int] | None = None) -> ParallelLayout:
        return ParallelLayout(pp, pp=pp, vpp=2, stage_layers=stage_layers, shape="v")

    step = replace(STEP, schedule="zb-v", num_microbatches=16)
    stages = estimate_memory(GPT2, v_layout(2), step)
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters
    untied = estimate_memory(LLAMA, v_layout(4, [2] * 8), step)
    ends = 2 * 131072 * 4096 + 4096
    assert untied[0].num_parameters - untied[1].num_parameters == ends
    assert [stage.loss > 0 for stage in untied] == [True, False, False, False]


def test_deferred_weight_halves_need_memory():
    def activations(name: str, **changes: Any) -> list[int]:
        step = replace(STEP, num_microbatches=32, schedule=name, **changes)
        return [stage.activations for stage in estimate_memory(LLAMA, layout(pp=8), step)]

    # In 1f1b the last stage keeps one microbatch, in zb-h1 all stages keep many.
    assert activations("1f1b")[-1] < activations("zb-h1")[-1]
    # Recomputed activations wait with the gradients.
    full = [activations(name, recompute="full")[-1] for name in ("1f1b", "zb-h1")]
    assert full[1] > 4 * full[0]
    # Deferred weight gradients keep their factors.
    inputs = HIDDEN + QUERY + HIDDEN + INNER
    outputs = QUERY + 2 * KEY + HIDDEN + 2 * INNER + HIDDEN
    assert costs_of().waiting == 4096 * 2 * (inputs + outputs)


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_mixed_adamw_takes_6_and_12_over_dp_bytes_a_parameter(count, dp):
    total = sum(static_bytes(count, dp, STEP).values())
    assert 0 <= total - (6 * count + 12 * count / dp) < 12
    assert sum(static_bytes(count, dp, replace(STEP, zero=0)).values()) == 18 * count
    single = replace(STEP, parameter_bytes=4, main_bytes=0, activation_bytes=4, zero=0)
    assert sum(static_bytes(count, dp, single).values()) == 16 * count


def test_a_block_keeps_the_activations_of_its_layers():
    tokens, costs = 4096, costs_of()
    per_token = 2 * (4 * HIDDEN + (QUERY + 2 * KEY) + QUERY + 3 * INNER) + 4 * 32 + 2 * 8
    assert costs.kept == costs.layer == tokens * per_token
    assert costs.loss_kept == 2 * tokens * 131072
    eager = costs_of(eager_activations)
    assert eager.kept - costs.kept == tokens * 2 * (QUERY + KEY + INNER) - tokens * 8
    # Sequence parallelism divides the residual stream that tp keeps.
    divided = costs_of(tp=4, sequence_parallel=True).kept
    assert divided * 4 == costs.kept


def test_full_recomputation_keeps_only_the_inputs_of_blocks():
    full, selective, none = (costs_of(recompute=(m,)) for m in ("full", "selective", "none"))
    assert full.kept == full.boundary == 4096 * 4096 * 2
    assert none.kept - selective.kept == 4096 * 4 * 32


def test_the_first_stages_hold_more_microbatches():
    even = layout(pp=4, stage_layers=[4] * 4)
    stages = estimate_memory(LLAMA, even, STEP)
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    costs = costs_of(eager_activations, 1024)
    kept = [4 * n * costs.kept for n in (4, 3, 2)]
    assert [stage.activations for stage in stages] == [*kept, 4 * costs.kept + costs.head]
    assert all(stage.communication == 2 * costs.boundary for stage in stages)
    chunks = layout(pp=4, vpp=2, stage_layers=[2] * 8)
    interleaved = estimate_memory(LLAMA, chunks, replace(STEP, schedule="interleaved"))
    assert [stage.in_flight for stage in interleaved] == [11, 9, 7, 5]


def test_stages_without_layers_hold_only_the_embedding_or_the_head():
    stages = estimate_memory(LLAMA, layout(pp=4, stage_layers="E|(t*8|)*2L"), STEP)
    table, layers = LLAMA.vocab_rows(1) * LLAMA.hidden_size, 8 * LLAMA.layer_parameters(1)
    numbers = [stage.num_parameters for stage in stages]
    assert numbers == [table, layers, layers, table + LLAMA.hidden_size]
    assert stages[0].activations == 0
    assert stages[3].activations == costs_of(eager_activations, 1024).head


def test_the_parts_of_an_estimate_add_up_to_the_peak():
    step = replace(STEP, library_bytes=2**26)
    for estimate in estimate_memory(LLAMA, layout(pp=2, dp=2), step):
        assert estimate.static == estimate.num_parameters * (2 + 4 + 6)
        names = ("activations", "loss", "workspace", "communication", "libraries")
        assert estimate.peak == estimate.static + sum(getattr(estimate, name) for name in names)
    tiny = replace(STEP, seq_length=8, num_microbatches=1)
    (fused,), (copying,) = (
        estimate_memory(LLAMA, layout(dp=2), replace(tiny, step_bytes=size)) for size in (0, 8)
    )
    assert fused.moment == "backward"
    assert copying.moment == "optimizer step", "an optimizer that copies everything"
    assert copying.peak == copying.num_parameters * (2 + 4 + 6 + 4)


TRAININGS = st.builds(
    TrainingShape,
    seq_length=st.sampled_from([64, 128, 1024]),
    microbatch_size=st.integers(1, 4),
    num_microbatches=st.integers(4, 8),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.integers(0, 1),
    sequence_parallel=st.booleans(),
)
POWERS = st.sampled_from([1, 2, 4])


@given(TRAININGS, POWERS, POWERS, st.integers(1, 4), st.booleans())
def test_more_work_never_takes_less_memory_and_more_ranks_never_take_more(
    training, tp, pp, dp, fused
):
    model = GPT2 if tp == 1 else LLAMA
    table = (fused_activations if fused else eager_activations)(model)

    def peak(tp: int = tp, dp: int = dp, **changes: Any) -> int:
        step, ranks = replace(training, **changes), layout(dp, tp=tp, pp=pp)
        return max(stage.peak for stage in estimate_memory(model, ranks, step, table=table))

    base = peak()
    assert peak(seq_length=2 * training.seq_length) > base
    assert peak(microbatch_size=training.microbatch_size + 1) > base
    assert peak(num_microbatches=training.num_microbatches + 1) >= base
    assert peak(gradient_bytes=2) < base
    assert peak(recompute="none") >= base
    assert peak(dp=2 * dp) <= base
    assert peak(tp=2 * tp) < base
    assert peak(sequence_parallel=True) <= peak(sequence_parallel=False)


def test_experts_are_divided_over_ep_and_etp_and_their_state_over_replicas():
    (single,) = estimate_memory(QWEN3_30B_A3B, layout(), STEP)
    matrices = 48 * 128 * 3 * 2048 * 768
    dense = single.num_parameters - matrices
    # 8 data ranks hold 4 different sets of experts, each on 2 ranks.
    (ranks,) = estimate_memory(QWEN3_30B_A3B, ParallelLayout(8, ep=4), STEP)
    assert ranks.num_parameters == dense + matrices // 4
    assert ranks.optimizer == 8 * (dense // 8 + matrices // 4 // 2)
    (divided,), (folded,) = (
        estimate_memory(QWEN3_30B_A3B, ParallelLayout(8, tp=2, ep=ep, etp=etp), STEP)
        for ep, etp in ((2, 4), (8, 1))
    )
    assert divided.num_parameters == folded.num_parameters
    assert divided.main_parameters == folded.main_parameters


def test_only_stages_with_expert_layers_hold_experts():
    layers = tuple(layer >= 36 for layer in range(48))
    experts = replace(QWEN3_30B_A3B.experts, layers=layers)
    model = replace(QWEN3_30B_A3B, experts=experts, tied=False)
    stages = estimate_memory(model, ParallelLayout(4, pp=4, stage_layers=[12] * 4), STEP)
    per_layer = model.expert_parameters(ParallelLayout(4, pp=4))
    first, second, third = (stage.num_parameters for stage in stages[1:])
    assert first == second < 12 * per_layer < third


def test_an_all_gather_has_room_for_all_tokens_and_an_all_to_all_for_a_balanced_share():
    def activations(parallel_layout: ParallelLayout, **changes: Any) -> int:
        step = replace(STEP, **changes)
        return estimate_memory(QWEN3_30B_A3B, parallel_layout, step)[0].activations

    gathered, exchanged = (
        activations(ParallelLayout(4, ep=4), expert_transport=kind)
        for kind in ("all_gather", "all_to_all")
    )
    single = activations(layout(4))
    assert single < exchanged < 1.02 * single  # Two maps of rows for one.
    assert gathered > 2.5 * exchanged
    recomputed = activations(layout(4), recompute="experts")
    assert single - recomputed == 48 * 4 * 2 * 1024 * 8 * 768


def test_invalid_training_shapes_are_refused():
    odd = replace(STEP, seq_length=1001, sequence_parallel=True)
    check_refusals(
        estimate_memory,
        [
            ((GPT2, layout(), replace(STEP, seq_length=0)), "seq_length must be"),
            ((GPT2, layout(), replace(STEP, zero=2)), "zero must be 0 or 1: it is 2"),
            ((LLAMA, layout(pp=2, vpp=2), replace(STEP, schedule="zb-v")), "Use shape='v' for"),
            ((LLAMA, layout(tp=2), odd), "Use a seq_length of 1002"),
            ((replace(GPT2, num_layers=1), layout(pp=2), STEP), "at least one layer"),
        ],
    )
