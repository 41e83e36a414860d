"""Traces without elements need what a CPU holds, and what GPUs have held."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.forecast import CASES
from benchmarks.shapes import changed
from lightning_megatron import FP8, CudaGraphs, ParallelLayout, Recomputation
from lightning_megatron.memory.chunk_costs import ChunkCosts, moments
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.memory.pretended_device import PretendedDevice
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import GIB, TrainingShape
from lightning_megatron.plan.schedule import build_schedule
from tests.memory.measured import (
    BATCH,
    CONFIGS,
    LLAMA,
    SIZES,
    build_model,
    check_costs,
    held_costs,
    mixture,
    shape_of,
    traced_costs,
)
from tests.refusals import check_refusals
from tests.sweeps import chosen

HALF, FULL = torch.bfloat16, torch.float32
#: Memory for workspaces of cuBLAS, one for each thread (bytes).
LIBRARIES = 64 * 2**20

# ---- what a CPU holds

RECOMPUTATIONS: dict[str, Any] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "norms": Recomputation(("norms",)),
    "all cheap parts": Recomputation(("norms", "activations", "selective")),
    "two whole layers": {"parts": ["full"], "layers": 2},
    "norms of the last layer": Recomputation(("norms",), layers=1, at="last"),
}
VARIANTS = list(product((HALF, FULL), RECOMPUTATIONS, (None, 96, "forward"), ("1f1b", "zb-h1")))
#: Norms are recomputed only in blocks that have one before each sublayer.
DENSE = [
    (kind, *variant)
    for kind in CONFIGS
    for variant in VARIANTS
    if kind not in ("post", "parallel relu") or "norms" not in variant[1]
]


@pytest.mark.parametrize(
    ("kind", "dtype", "recompute", "loss_chunk", "schedule"),
    chosen(DENSE, *DENSE[:: len(DENSE) // 17]),
)
def test_passes_of_a_dense_model_need_what_a_cpu_holds(
    kind, dtype, recompute, loss_chunk, schedule
):
    settings = RECOMPUTATIONS[recompute]
    model = build_model(CONFIGS[kind], dtype, recompute=settings)
    model.loss_chunk = loss_chunk
    training = shape_of(dtype, recompute=settings, loss_chunk=loss_chunk, schedule=schedule)
    check_costs(held_costs(model, training), traced_costs(CONFIGS[kind], training))


def test_inputs_of_layers_on_the_host_are_counted_there():
    config = replace(CONFIGS["llama"], num_layers=8)
    sizes = TrainingShape(seq_length=64, microbatch_size=BATCH)
    offload = Recomputation(("full",), offload=True)
    (kept,), (moved,) = (
        estimate_memory(config, ParallelLayout(1), replace(sizes, recompute=recompute))
        for recompute in ("full", offload)
    )
    inputs = 8 * 64 * BATCH * config.hidden_size * 2
    assert (kept.host, moved.host) == (0, inputs)
    assert moved.activations < kept.activations


MIXTURES = {
    "every second layer": mixture({}),
    "all layers": mixture({"layers": 1, "top_k": 3, "aux_loss": 0.01, "z_loss": 0.001}),
    "sigmoid": mixture({"scoring": "sigmoid", "aux_loss": 0.01, "num_experts": 64, "expert_bias": True}),
    "jitter and capacity": mixture({"jitter": 0.1, "capacity_factor": 8.0}),
    "shared with a gate": mixture({"shared_ffn_hidden_size": 80, "shared_gate": True}),
    "gelu": mixture({}, activation="gelu"),
    "biases": mixture({"linear_bias": True, "router_bias": True}, activation="clamped_swiglu"),
}  # fmt: skip
OF_EXPERTS = list(product((FULL, HALF), ("none", "expert_inputs", "experts")))
EXPERT_PASSES = [(kind, *variant) for kind in MIXTURES for variant in OF_EXPERTS]


@pytest.mark.parametrize(
    ("kind", "dtype", "recompute"),
    chosen(EXPERT_PASSES, *((k, *OF_EXPERTS[n % 6]) for n, k in enumerate(MIXTURES))),
)
def test_passes_of_experts_need_what_a_cpu_holds(kind, dtype, recompute):
    training = shape_of(dtype, recompute=recompute)
    model = build_model(MIXTURES[kind], dtype, recompute=recompute)
    # Groups of random tokens are not equally large.
    check_costs(held_costs(model, training), traced_costs(MIXTURES[kind], training), rel=0.02)


LARGE: dict[str, Any] = {"hidden_size": 256}
GATED = {**LLAMA, **LARGE, "ffn_hidden_size": 384}
EIGHT_BITS = {
    "gpt2": GPTConfig.gpt2(**SIZES | LARGE),
    "llama": GPTConfig.llama(**GATED, num_kv_heads=2),
    "clamped": GPTConfig.gpt2(**SIZES | LARGE, ffn_hidden_size=384, activation="clamped_swiglu"),
}


@pytest.mark.parametrize(
    ("kind", "recipe", "options"),
    [
        ("gpt2", "delayed", {}),
        ("llama", "rowwise", {}),
        ("llama", "blockwise", {}),
        ("clamped", "tensorwise", {}),
        ("llama", "tensorwise", {"parameters": "fp8"}),
    ],
)
def test_passes_in_8_bits_need_what_a_cpu_holds(kind, recipe, options):
    fp8, config = FP8(recipe, emulate=True, **options), EIGHT_BITS[kind]
    training = shape_of(fp8=fp8, main_bytes=4)
    held = held_costs(build_model(config, fp8=fp8), training)
    check_costs(held, traced_costs(config, training), rel=0.01)


# ---- what H200s have held, by benchmarks/RESULTS.md

ON_GPUS = {
    "gpt2": 36.28,
    "gpt2_full": 22.27,
    "gpt2_selective": 28.38,
    "gpt2_float32": 18.82,
    "llama2": 29.69,
    "llama4": 39.13,
}


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_step_needs_what_a_gpu_has_held(name):
    case = CASES[name]
    config = changed(case.model, layers=case.layers)
    single = {"parameter_bytes": 4, "main_bytes": 0, "activation_bytes": 4}
    training = TrainingShape(
        seq_length=config.max_seq_length, microbatch_size=case.microbatch,
        num_microbatches=case.batch // case.microbatch, library_bytes=LIBRARIES,
        recompute=case.options.get("recompute", "none"), **single if case.precision == "32-true" else {},
    )  # fmt: skip
    (estimate,) = estimate_memory(config, ParallelLayout(1), training)
    assert estimate.peak / GIB == pytest.approx(ON_GPUS[name], rel=0.005)


@pytest.mark.parametrize(
    ("recompute", "loss_chunk", "held"),
    [("none", None, 83.5), ("none", "auto", 70.4), ("full", None, 51.5), ("full", "auto", 46.3)],
)
def test_a_step_with_a_long_row_needs_what_a_gpu_has_held(recompute, loss_chunk, held):
    config = changed("llama8b_half", layers=4)
    config = replace(config, vocab_size=128256, max_seq_length=65536)
    training = TrainingShape(
        seq_length=65536, recompute=recompute, loss_chunk=loss_chunk, library_bytes=LIBRARIES
    )
    (estimate,) = estimate_memory(config, ParallelLayout(1), training)
    assert estimate.peak / GIB == pytest.approx(held, rel=0.002)


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "alibi"},
        {"attention_soft_cap": 30.0},
        {"attention_sinks": True},
        {"sliding_window": 9},
        {"attention_dropout": 0.1},
    ],
    ids=str,
)
def test_every_core_of_attention_can_be_traced_for_a_gpu(settings):
    sizes = {**SIZES, "hidden_size": 128, "num_heads": 2, "num_layers": 2}
    plain, changed_model = (
        estimate_memory(GPTConfig.gpt2(**sizes, **more), ParallelLayout(1), TrainingShape(seq_length=64))
        for more in ({}, settings)
    )  # fmt: skip
    assert changed_model[0].peak == pytest.approx(plain[0].peak, rel=0.1)


# ---- sizes and stages

GPT2, LARGE_LLAMA = GPTConfig.gpt2(), GPTConfig.llama(num_layers=16, vocab_size=131072)
QWEN3_30B_A3B = changed("qwen3_48", vocabulary=151936)
STEP = TrainingShape(seq_length=1024, num_microbatches=8)


def stages_of(config: GPTConfig, sizes: dict[str, Any], **changes: Any) -> Any:
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    sizes = {axis: size for axis, size in sizes.items() if axis != "dp"}
    layout = ParallelLayout(max(ranks, sizes.get("ep", 1)), **sizes)
    return estimate_memory(config, layout, replace(STEP, **changes))


def test_parameters_are_those_of_published_models_and_their_bytes_those_of_mixed_adamw():
    padded = 124_439_808 + (50304 - 50257) * 768
    llama = replace(LARGE_LLAMA, num_layers=32, vocab_size=128256)
    for config, number in ((GPT2, padded), (llama, 8_030_261_248)):
        (estimate,) = stages_of(config, {})
        assert estimate.num_parameters == number
        assert estimate.static == 18 * number
    (shared,) = stages_of(GPT2, {"dp": 4})
    assert shared.static == pytest.approx((2 + 4 + 12 / 4) * padded, rel=1e-4)
    assert shared.peak == sum(
        getattr(shared, part) for part in ("static", "activations", "workspace", "communication", "shared")
    )  # fmt: skip


def test_a_tied_head_is_a_copy_unless_the_first_stage_of_a_v_has_both():
    (single,) = stages_of(GPT2, {})
    stages = stages_of(GPT2, {"pp": 2})
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters + 50304 * 768
    stages = stages_of(GPT2, {"pp": 2, "vpp": 2, "shape": "v"}, schedule="zb-v")
    assert sum(stage.num_parameters for stage in stages) == single.num_parameters


def test_first_stages_hold_more_microbatches_and_weight_halves_keep_factors():
    even = {"pp": 4, "stage_layers": [4] * 4}
    stages = stages_of(LARGE_LLAMA, even)
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    kept = stages[0].activations // 4
    assert [stage.activations for stage in stages[1:3]] == pytest.approx(
        [3 * kept, 2 * kept], rel=0.02
    )
    halves = stages_of(LARGE_LLAMA, even, schedule="zb-h1")
    assert halves[3].activations > 2 * stages[3].activations
    chunks = {"pp": 4, "vpp": 2, "stage_layers": [2] * 8}
    interleaved = stages_of(LARGE_LLAMA, chunks, schedule="interleaved")
    assert [stage.in_flight for stage in interleaved] == [11, 9, 7, 5]
    more = stages_of(LARGE_LLAMA, even, num_microbatches=512)
    assert more == stages, "later microbatches repeat what earlier ones do"


def test_passes_that_take_turns_need_the_temporary_memory_of_both():
    costs = [ChunkCosts(kept=10, forward=13, backward=15)]
    needs = []
    for is_paired in (False, True):
        actions = build_schedule("1f1b", 1, 3, is_paired=is_paired).actions(0)
        points = [*moments(actions, costs, is_paired)]
        needs.append(max((point.kept + point.workspace, point.in_flight) for point in points))
    assert needs == [(15, 1), (2 * 10 + 3 + 5, 2)]


def test_experts_and_their_states_are_divided_over_their_axes():
    (single,) = stages_of(QWEN3_30B_A3B, {})
    matrices = 48 * 128 * 3 * 2048 * 768
    dense = single.num_parameters - matrices
    # 8 data ranks hold 4 different sets of experts, each on 2 ranks.
    (ranks,) = stages_of(QWEN3_30B_A3B, {"dp": 8, "ep": 4})
    assert ranks.num_parameters == dense + matrices // 4
    assert ranks.optimizer == pytest.approx(8 * (dense / 8 + matrices / 4 / 2), rel=1e-3)
    limited, worst, balanced = (
        stages_of(replace(QWEN3_30B_A3B, num_layers=2), {"dp": 4, "ep": 4}, **changes)[0].activations
        for changes in ({"expert_rows": 1.25}, {}, {"expert_transport": "all_to_all"})
    )  # fmt: skip
    assert balanced < limited < 0.7 * worst


def test_graphs_add_pools_and_a_step_as_a_whole_needs_its_peak_again():
    config = replace(LARGE_LLAMA, num_layers=2)
    (eager,), (segments,), (attention,), (full,) = (
        stages_of(config, {}, cuda_graphs=graphs)
        for graphs in (None, *map(CudaGraphs, ("segments",)), CudaGraphs("segments", ("attention",)), CudaGraphs("full"))
    )  # fmt: skip
    assert eager.graphs == 0
    assert 0.8 * eager.activations < segments.graphs < eager.peak - eager.static
    assert 0 < attention.graphs < segments.graphs
    inputs = 8 * 1024 * 16
    assert full.graphs == eager.activations + eager.workspace + inputs


def test_sizes_that_do_not_fit_together_are_refused():
    odd = replace(STEP, seq_length=1001, sequence_parallel=True)
    two = ParallelLayout(2, pp=2, vpp=2)
    check_refusals(
        estimate_memory,
        [
            ((GPT2, ParallelLayout(1), replace(STEP, seq_length=0)), "seq_length must be"),
            ((GPT2, ParallelLayout(1), replace(STEP, zero=2)), "zero must be 0 or 1: it is 2"),
            ((LARGE_LLAMA, two, replace(STEP, schedule="zb-v")), "Use shape='v' for"),
            ((LARGE_LLAMA, ParallelLayout(2, tp=2), odd), "Use a seq_length of 1002"),
            ((replace(GPT2, num_layers=1), ParallelLayout(2, pp=2), STEP), "at least one layer"),
        ],
    )


def test_a_pretended_device_leaves_no_trace_and_serves_its_own_thread_alone():
    from threading import Thread

    found: list[Any] = []
    with PretendedDevice("cuda") as device:
        inside = torch.ones(2, device=device.device)
        assert inside.is_cuda
        assert inside.device == device.device
        assert device.now == 512
        thread = Thread(target=lambda: found.append(torch.ones(2).tolist()))
        thread.start()
        thread.join()
    assert found == [[1.0, 1.0]]
    assert inside.device.type == "meta"
    assert torch.ones(2).sum().item() == 2
    assert not torch.cuda.is_available()
