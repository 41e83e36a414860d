"""Estimated memory of models in 16 and 8 bits, with experts and with recomputation, equals the memory that
a CPU holds.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lightning_megatron import Recomputation
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import (
    AllToAllDispatcher,
    GatherDispatcher,
    LocalDispatcher,
    OneSidedDispatcher,
)
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.experts import Transport, transport_over_ep
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.test_weight_casts import bytes_of
from tests.models.memory import (
    BATCH,
    CONFIGS,
    LENGTH,
    LLAMA,
    SIZES,
    allocate_like_kernels,
    build_model,
    check_parameters,
    draw_tokens,
    estimated_costs,
    estimated_kept_bytes,
    estimated_peak_bytes,
    kept_bytes,
    mixture,
    peak_bytes,
    saved_bytes,
    track_memory,
    waiting_bytes,
)
from tests.sweeps import chosen

HALF, FULL = torch.bfloat16, torch.float32
ONE = ParallelLayout(1)

# ---- dense models in 16 and 32 bits


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_saved_by_a_forward_pass_equals_the_estimate(kind):
    for dtype in (HALF, FULL):
        model, config = build_model(CONFIGS[kind], dtype), CONFIGS[kind]
        assert saved_bytes(model) == pytest.approx(estimated_kept_bytes(config, dtype), rel=0.015)
        check_parameters(model, ONE)


#: Kind, vocabulary, recomputation and chunk of the loss.
PEAKS: list[tuple[str, int, Any, Any]] = [
    ("gpt2", 256, "none", None), ("llama", 8192, "selective", None), ("window", 256, "full", None),
    ("latent", 256, "none", None), ("bounded scores, sinks", 256, "selective", None), ("slopes", 256, "full", None),
    ("gpt2", 8192, "none", 96), ("llama", 8192, "full", "forward"),
]  # fmt: skip


@pytest.mark.parametrize("case", PEAKS, ids=str)
def test_the_peak_memory_of_a_step_equals_the_estimate(case):
    kind, vocab_size, recompute, loss_chunk = case
    sizes = {"vocab_size": vocab_size, "hidden_size": 128, "ffn_hidden_size": 384}
    config = GPTConfig(**{**vars(CONFIGS[kind]), **sizes})
    model = build_model(config, recompute=recompute)
    model.loss_chunk = loss_chunk
    estimate = estimated_peak_bytes(config, recompute=recompute, loss_chunk=loss_chunk)
    assert estimate == pytest.approx(peak_bytes(model), rel=0.08)


@pytest.mark.parametrize(
    ("kind", "recompute", "loss_chunk"),
    [("gpt2", "none", None), ("llama", "full", 50), ("post", "none", 50), ("latent", "full", None)],
)
def test_memory_left_by_an_input_half_equals_the_estimate(kind, recompute, loss_chunk):
    model = build_model(CONFIGS[kind], recompute=recompute)
    model.loss_chunk = loss_chunk
    costs = estimated_costs(CONFIGS[kind], HALF, loss_chunk=loss_chunk)
    estimate = sum(layer.waiting for layer in costs) + costs[0].head_waiting
    assert waiting_bytes(model) == pytest.approx(estimate, rel=0.02)


# ---- recomputation

RECOMPUTATIONS = {
    "norms": Recomputation(("norms",)),
    "activations": Recomputation(("activations",)),
    "all cheap parts": Recomputation(("norms", "activations", "selective")),
    "two whole layers": Recomputation(("full",), layers=2),
    "inputs on the host": Recomputation(("full",), offload=True),
    "norms of the last layer": Recomputation(("norms",), layers=1, at="last"),
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    chosen(
        list(product(["gpt2", "llama", "geglu"], RECOMPUTATIONS)),
        *zip(("gpt2", "llama", "geglu") * 2, RECOMPUTATIONS, strict=True),
    ),
)
def test_kept_memory_with_recomputation_equals_the_estimate(kind, settings):
    config, training = CONFIGS[kind], TrainingShape(seq_length=LENGTH, microbatch_size=BATCH)
    measured, estimates = [], []
    for recompute in ("none", RECOMPUTATIONS[settings]):
        measured.append(kept_bytes(build_model(config, recompute=recompute)))
        shape = config.memory_shape()
        estimates += estimate_memory(shape, ONE, replace(training, recompute=recompute))
    # On the CPU the measured memory includes that of the host.
    saving = measured[0] - measured[1] + estimates[1].host
    estimated = [estimate.activations + estimate.loss for estimate in estimates]
    assert saving > 0
    assert estimates[0].moment == estimates[1].moment == "backward"
    assert saving == pytest.approx(estimated[0] - estimated[1], rel=0.02)


# ---- layers in 8 bits

LARGE: dict[str, Any] = {"hidden_size": 256}
GATED = {**LLAMA, **LARGE, "ffn_hidden_size": 384}
_LATENT = {"key_value_rank": 16, "plain_dim": 48, "rotary_dim": 16, "value_dim": 32}
_SHARED = {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 384}
EIGHT_BITS = {
    "gpt2": GPTConfig.gpt2(**SIZES | LARGE),
    "llama": GPTConfig.llama(**GATED, num_kv_heads=2),
    "parallel relu": replace(CONFIGS["parallel relu"], **LARGE),
    "clamped": GPTConfig.gpt2(**SIZES | LARGE, ffn_hidden_size=384, activation="clamped_swiglu"),
    "latent": GPTConfig.llama(**GATED, latent_attention={**_LATENT, "query_rank": 16}),
    "shared expert": GPTConfig.llama(**GATED, experts={**_SHARED, "layers": [False, True, False]}),
}
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]
#: Blocks need larger latent vectors.
PASSES = [(k, r) for k, r in product(EIGHT_BITS, RECIPES) if r != "blockwise" or "latent" not in k]
#: Tolerance for magnitudes of weights and tensors of a few numbers (bytes).
TOLERANCE = 400
SIXTEEN_BITS = FP8(emulate=True, first_bf16=3)


def check_change(config: GPTConfig, fp8: FP8, recompute: Any = "none") -> int:
    """Compare the change of kept memory by 8 bits with the estimate, and return it."""
    measure = saved_bytes if recompute == "none" else kept_bytes
    before = measure(build_model(config, recompute=recompute))
    change = measure(build_model(config, fp8=fp8, recompute=recompute)) - before
    eight, sixteen = (
        estimated_kept_bytes(config, HALF, settings, recompute) for settings in (fp8, SIXTEEN_BITS)
    )
    assert change == pytest.approx(eight - sixteen, abs=TOLERANCE)
    return change


@pytest.mark.parametrize(
    ("kind", "recipe"),
    chosen(PASSES, *zip(EIGHT_BITS, (RECIPES * 2)[: len(EIGHT_BITS)], strict=True)),
)
def test_memory_kept_in_8_bits_equals_the_estimate(kind, recipe):
    change = check_change(EIGHT_BITS[kind], FP8(recipe, emulate=True))
    # ReLU and the attention core keep their results in addition to the copies in 8 bits.
    assert (change > 0) == (kind == "parallel relu")


def test_memory_in_8_bits_with_recomputation_and_excluded_layers_equals_the_estimate():
    for kind, recompute in (("gpt2", "activations"), ("llama", "norms"), ("parallel relu", "full")):
        check_change(EIGHT_BITS[kind], FP8(emulate=True), recompute)
    for kind in ("gpt2", "llama"):
        check_change(EIGHT_BITS[kind], FP8(emulate=True, first_bf16=1, keep=("*.mlp.*",)))


@pytest.mark.parametrize(
    ("kind", "recipe"), [("gpt2", "delayed"), ("llama", "rowwise"), ("llama", "blockwise")]
)
def test_the_estimate_counts_casts_of_weights_and_histories(kind, recipe):
    config, history = EIGHT_BITS[kind], {"history": 5} if recipe == "delayed" else {}
    settings = FP8(recipe, emulate=True, last_bf16=1, **history)
    model, tokens = build_model(config, FULL, fp8=settings), draw_tokens(config)
    with model.weight_casts.shared():
        model(tokens, labels=tokens).mean().backward()
        cast_bytes = bytes_of(model.weight_casts)
    scales = model.delayed_scales
    history_bytes = 0 if scales is None else sum(tensor.nbytes for tensor in scales.step_tensors)
    training = TrainingShape(seq_length=64, microbatch_size=BATCH, num_microbatches=2, fp8=settings)
    for changes, expected in (
        ({}, cast_bytes + history_bytes),
        ({"num_microbatches": 1}, history_bytes),
        ({"fp8": replace(settings, cast_weights="microbatch")}, history_bytes),
        ({"cuda_graphs": CudaGraphs("segments")}, history_bytes),
    ):
        (estimate,) = estimate_memory(config.memory_shape(), ONE, replace(training, **changes))
        assert estimate.casts == expected, changes


@pytest.mark.parametrize(
    ("kind", "recompute", "is_shared"),
    [("gpt2", "none", False), ("llama", "full", True), ("clamped", "none", True)],
)
def test_the_peak_memory_of_a_step_in_8_bits_equals_the_estimate(kind, recompute, is_shared):
    config = replace(EIGHT_BITS[kind], vocab_size=256)
    settings: Any = FP8(emulate=True, cast_weights="batch" if is_shared else "microbatch")
    model = build_model(config, fp8=settings, recompute=recompute)
    memory, tokens = track_memory(model), draw_tokens(config, 16)
    with ExitStack() as stack:
        if is_shared:
            stack.enter_context(model.weight_casts.shared())
        stack.enter_context(allocate_like_kernels())
        stack.enter_context(memory)
        # The second microbatch reuses all casts.
        for _ in range(2):
            (model(tokens, labels=tokens, sums=True) / tokens.numel()).backward()
    estimate = estimated_peak_bytes(config, microbatch_size=16, recompute=recompute, fp8=settings)
    assert estimate == pytest.approx(memory.peak, rel=0.08)


# ---- experts

MIXTURES = {
    "every second layer": mixture({}),
    "all layers": mixture({"layers": 1, "top_k": 3, "aux_loss": 0.01, "z_loss": 0.001}),
    "sigmoid": mixture({"scoring": "sigmoid", "aux_loss": 0.01, "num_experts": 64, "expert_bias": True}),
    "jitter and capacity": mixture({"jitter": 0.1, "capacity_factor": 8.0}),
    "shared": mixture({"shared_ffn_hidden_size": 80, "jitter": 0.1}),
    "shared with a gate": mixture({"shared_ffn_hidden_size": 80, "shared_gate": True}),
    "gelu": mixture({}, activation="gelu"),
    "biases": mixture({"linear_bias": True, "router_bias": True}, activation="clamped_swiglu"),
}  # fmt: skip
VARIANTS = list(product([FULL, HALF], ["none", "expert_inputs"]))
EXPERT_PASSES = [(kind, *variant) for kind in MIXTURES for variant in VARIANTS]


@pytest.mark.parametrize(
    ("kind", "dtype", "recompute"),
    chosen(EXPERT_PASSES, *((k, *VARIANTS[n % 4]) for n, k in enumerate(MIXTURES))),
)
def test_memory_kept_by_experts_equals_the_estimate(kind, dtype, recompute):
    config = MIXTURES[kind]
    model = build_model(config, dtype, recompute=recompute)
    expected = estimated_kept_bytes(config, dtype, recompute=recompute)
    assert kept_bytes(model) == pytest.approx(expected, rel=0.015)
    check_parameters(model, ONE)


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "recompute"),
    [
        ("all layers", HALF, 384, "experts"),
        ("shared", HALF, 48, "expert_inputs"),
        ("gelu", FULL, 384, "full"),
        ("biases", FULL, 384, "none"),
    ],
)
def test_the_peak_memory_of_a_step_with_experts_equals_the_estimate(kind, dtype, width, recompute):
    experts: Any = MIXTURES[kind].experts
    experts = replace(experts, ffn_hidden_size=width)
    config = replace(MIXTURES[kind], hidden_size=128, experts=experts)
    estimate = estimated_peak_bytes(config, dtype=dtype, recompute=recompute)
    model = build_model(config, dtype, recompute=recompute)
    assert estimate == pytest.approx(peak_bytes(model), rel=0.06)


def test_the_estimate_and_the_layer_choose_the_same_transport():
    names: dict[type, str] = {LocalDispatcher: "none", GatherDispatcher: "all_gather"}
    names |= {AllToAllDispatcher: "all_to_all", OneSidedDispatcher: "one_sided"}
    transports: tuple[Transport, ...] = ("auto", "all_gather", "all_to_all", "one_sided")
    for ep, top_k, transport in product((1, 2, 4), (1, 2, 4), transports):
        mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", tuple(range(ep))))
        for is_limited in (False, True) if ep > 1 and transport != "all_to_all" else (False,):
            limit = LayerRows(RowLimit(1.5, mesh), 0, ep) if is_limited else None
            dispatcher = choose_transport(8, top_k, mesh, transport, limit=limit).dispatcher
            estimated = transport_over_ep(top_k, ep, transport, is_limited=is_limited)
            assert estimated == names[type(dispatcher)]
            assert estimated != "all_to_all" or not is_limited
