"""Estimated memory of layers in 8 bits equals the measured memory of their emulation on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8 import fp8_regions, operand, torch_casts
from lightning_megatron.layers.fp8.operand import Operand
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.eight_bits import EightBitLayers
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.network_activations import MicrobatchShape
from lightning_megatron.plan.recomputation import Recomputation
from tests.live_memory import LiveMemory
from tests.models.test_kept_activations import BATCH, build_model, saved_bytes, table_of
from tests.sweeps import chosen
from tests.world import run_world

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "max_seq_length": 64,
    "num_layers": 3,
    "hidden_size": 256,
    "num_heads": 4,
}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=384, norm="layernorm"),
    "post": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "parallel relu": GPTConfig.gpt2(
        **SIZES,
        parallel_residual=True,
        activation="relu",
        position="rotary",
        rotary_dim=8,
        output_bias=False,
    ),
    "latent": GPTConfig.llama(
        **SIZES,
        ffn_hidden_size=384,
        norm="layernorm",
        latent_attention={
            "key_value_rank": 16,
            "query_rank": 16,
            "plain_dim": 48,
            "rotary_dim": 16,
            "value_dim": 32,
        },
    ),
    "latent, whole queries": GPTConfig.llama(
        **SIZES,
        ffn_hidden_size=384,
        norm="layernorm",
        latent_attention={
            "key_value_rank": 16,
            "plain_dim": 48,
            "rotary_dim": 16,
            "value_dim": 32,
        },
    ),
    "bounded scores": GPTConfig.llama(**SIZES, norm="layernorm", attention_soft_cap=0.7),
    "clamped": GPTConfig.gpt2(**SIZES, ffn_hidden_size=384, activation="clamped_swiglu"),
    "shared expert": GPTConfig.llama(
        **SIZES,
        ffn_hidden_size=384,
        norm="layernorm",
        experts={
            "num_experts": 4,
            "top_k": 1,
            "ffn_hidden_size": 16,
            "shared_ffn_hidden_size": 384,
            "layers": [False, True, False],
        },
    ),
}
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]
PASSES = list(product(CONFIGS, RECIPES))
TOKENS = 64 * BATCH
#: Settings that leave all layers in 16 bits.
SIXTEEN_BITS = FP8(emulate=True, first_bf16=3)


def eight_bit_model(
    config: GPTConfig, settings: FP8, dtype: torch.dtype, mesh: ParallelMesh | None = None
) -> GPT:
    model = build_model(config, dtype, mesh)
    set_fp8(model, settings, True, CPU)
    return model


def estimated_kept_bytes(
    config: GPTConfig, settings: FP8, dtype: torch.dtype, **options: Any
) -> int:
    """Return the estimated memory that a forward pass keeps (bytes)."""
    shape = config.memory_shape()
    recompute = Recomputation.of(options.pop("recompute", None))
    batch = MicrobatchShape(num_tokens=TOKENS, activation_bytes=dtype.itemsize, **options)
    total = 0
    for layer in range(config.num_layers):
        eight_bit_layers = EightBitLayers.of(settings, shape, layer, batch.tp, shares_casts=False)
        costs = activation_costs(
            *(shape, table_of(config, dtype), batch),
            seq_length=64,
            recompute=recompute.parts_of(layer, config.num_layers),
            has_experts=shape.has_experts_in(layer),
            eight_bits=eight_bit_layers,
        )
        total += costs.kept
    return total + costs.masks + costs.head + costs.loss_kept


def measured_kept_bytes(model: GPT) -> int:
    """Return the memory that a forward pass keeps for the backward pass (bytes)."""
    memory, tokens = LiveMemory(), torch.randint(0, 1024, (BATCH, 64))
    memory.leave_out(list(model.parameters()))
    with memory:
        loss = model(tokens, labels=tokens).mean()
        kept = memory.now
        del loss
    return kept


#: Tolerance for magnitudes of weights and tensors of a few numbers (bytes).
TOLERANCE = 400


@pytest.mark.parametrize(
    ("kind", "recipe"),
    chosen(PASSES, *(PASSES[4 * number + number % 4] for number in range(len(CONFIGS)))),
)
def test_memory_kept_by_a_forward_pass_equals_the_estimate(kind: str, recipe: Any) -> None:
    config = CONFIGS[kind]
    if recipe == "blockwise" and "latent" in kind:
        pytest.skip("blocks need larger latent vectors")
    settings = FP8(recipe, emulate=True)
    bytes_in_16_bits = saved_bytes(build_model(config, torch.bfloat16))
    change = saved_bytes(eight_bit_model(config, settings, torch.bfloat16)) - bytes_in_16_bits
    expected = estimated_kept_bytes(config, settings, torch.bfloat16)
    expected -= estimated_kept_bytes(config, SIXTEEN_BITS, torch.bfloat16)
    assert change == pytest.approx(expected, abs=TOLERANCE)
    # ReLU and the attention core keep their results in addition to the copies in 8 bits.
    assert (change > 0) == (kind == "parallel relu")


@pytest.mark.parametrize(
    ("kind", "recompute"),
    chosen(
        list(
            product(
                ["gpt2", "llama", "parallel relu"], ["activations", "norms", "selective", "full"]
            )
        ),
        ("gpt2", "activations"),
        ("llama", "norms"),
        ("gpt2", "selective"),
        ("parallel relu", "full"),
    ),
)
def test_memory_kept_with_recomputation_equals_the_estimate(kind: str, recompute: Any) -> None:
    if kind == "parallel relu" and recompute == "norms":
        pytest.skip("sublayers share the norm")
    config = CONFIGS[kind]
    settings = FP8(emulate=True)
    measured = []
    for model in (
        build_model(config, torch.bfloat16),
        eight_bit_model(config, settings, torch.bfloat16),
    ):
        model.recompute = recompute
        measured.append(measured_kept_bytes(model))
    expected = [
        estimated_kept_bytes(config, fp8, torch.bfloat16, recompute=recompute)
        for fp8 in (SIXTEEN_BITS, settings)
    ]
    assert measured[1] - measured[0] == pytest.approx(expected[1] - expected[0], abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_memory_of_layers_excluded_from_8_bits_equals_the_estimate(kind: str) -> None:
    config = CONFIGS[kind]
    bytes_in_16_bits = saved_bytes(build_model(config, torch.bfloat16))
    estimate_in_16_bits = estimated_kept_bytes(config, SIXTEEN_BITS, torch.bfloat16)
    changes = []
    for settings in (FP8(emulate=True), FP8(emulate=True, first_bf16=1, keep=("*.mlp.*",))):
        changes.append(
            saved_bytes(eight_bit_model(config, settings, torch.bfloat16)) - bytes_in_16_bits
        )
        expected = estimated_kept_bytes(config, settings, torch.bfloat16) - estimate_in_16_bits
        assert changes[-1] == pytest.approx(expected, abs=TOLERANCE)
    assert changes[0] != changes[1]


def compare_on_two_ranks(rank: int, size: int) -> list[tuple[int, int]]:
    changes = []
    for name in chosen(["gpt2", "llama", "latent"], "gpt2", "latent"):
        for sequence_parallel in chosen([False, True], name == "gpt2"):
            mesh = ParallelMesh.create(
                ParallelLayout(2, tp=2), device="cpu", seed=0, sequence_parallel=sequence_parallel
            )
            options = {"tp": 2, "sequence_parallel": sequence_parallel}
            config = CONFIGS[name]
            bytes_in_16_bits = saved_bytes(build_model(config, torch.float32, mesh))
            estimate_in_16_bits = estimated_kept_bytes(
                config, SIXTEEN_BITS, torch.float32, **options
            )
            for recipe in ("tensorwise", "rowwise"):
                settings = FP8(recipe, emulate=True)  # type: ignore[arg-type]
                model = eight_bit_model(config, settings, torch.float32, mesh)
                expected = estimated_kept_bytes(config, settings, torch.float32, **options)
                changes.append(
                    (saved_bytes(model) - bytes_in_16_bits, expected - estimate_in_16_bits)
                )
            mesh.destroy()
    return changes


def test_memory_kept_by_tensor_parallel_ranks_equals_the_estimate() -> None:
    for rows in run_world(compare_on_two_ranks, 2):
        for change, expected in rows:
            assert change == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    chosen(
        list(product(["gpt2", "llama"], RECIPES)),
        ("gpt2", "tensorwise"),
        ("gpt2", "delayed"),
        ("llama", "rowwise"),
        ("llama", "blockwise"),
    ),
)
def test_the_estimate_counts_casts_of_weights_and_histories(kind: str, recipe: Any) -> None:
    config = CONFIGS[kind]
    history = {"history": 5} if recipe == "delayed" else {}
    settings = FP8(recipe, emulate=True, last_bf16=1, **history)
    model = eight_bit_model(config, settings, torch.float32)
    tokens = torch.randint(0, 1024, (BATCH, 64))
    assert model.weight_casts is not None
    with model.weight_casts.shared():
        model(tokens, labels=tokens).mean().backward()
        cast_bytes = model.weight_casts.num_bytes
    scales = model.delayed_scales
    history_bytes = 0 if scales is None else sum(tensor.nbytes for tensor in scales.step_tensors)
    shape = config.memory_shape()
    training = TrainingShape(seq_length=64, microbatch_size=BATCH, num_microbatches=2, fp8=settings)
    (estimate,) = estimate_memory(shape, ParallelLayout(1), training)
    assert estimate.casts == cast_bytes + history_bytes
    for training_without_sharing in (
        replace(training, num_microbatches=1),
        replace(training, fp8=replace(settings, cast_weights="microbatch")),
        replace(training, cuda_graphs=CudaGraphs("segments")),
    ):
        (estimate,) = estimate_memory(shape, ParallelLayout(1), training_without_sharing)
        assert estimate.casts == history_bytes
    (estimate,) = estimate_memory(shape, ParallelLayout(1), replace(training, fp8=None))
    assert estimate.casts == 0


def set_slots(model: GPT, memory: LiveMemory, queue: WeightGradientQueue | None = None) -> None:
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None, queue=queue)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])


@pytest.mark.parametrize(
    ("kind", "recipe"),
    chosen(
        list(product(["gpt2", "llama", "latent"], ["tensorwise", "rowwise"])),
        ("llama", "tensorwise"),
        ("latent", "rowwise"),
    ),
)
def test_memory_left_by_an_input_half_equals_the_estimate(kind: str, recipe: Any) -> None:
    config = CONFIGS[kind]
    settings = FP8(recipe, emulate=True)
    model = eight_bit_model(config, settings, torch.bfloat16)
    tokens = torch.randint(0, 1024, (BATCH, 64))
    memory, queue = LiveMemory(), WeightGradientQueue()
    set_slots(model, memory, queue)
    with memory:
        loss = model(tokens, labels=tokens).mean()
        with queue.open("half"):
            loss.backward()
        del loss
        memory_after_input_half = memory.now
        queue.run("half")
    shape = config.memory_shape()
    batch = MicrobatchShape(num_tokens=TOKENS, activation_bytes=2)
    costs = activation_costs(
        *(shape, table_of(config, torch.bfloat16), batch),
        seq_length=64,
        eight_bits=EightBitLayers.of(settings, shape, 0, 1, shares_casts=False),
    )
    expected = config.num_layers * costs.waiting + costs.head_waiting
    assert memory_after_input_half - memory.now == pytest.approx(expected, rel=0.02)


@contextmanager
def allocate_like_kernels() -> Iterator[None]:
    """Let casts and products allocate only operands and results, as kernels of GPUs do."""

    def magnitude_parts(matrix: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def cast(
        matrix: Tensor,
        parts: Tensor,
        dtype: torch.dtype,
        *,
        rows: bool,
        columns: bool,
        multiple: int,
        running_magnitude: Tensor | None = None,
    ) -> tuple[Any, Any]:
        height, width = matrix.shape
        padded = height + -height % multiple
        scale = torch.ones(1)
        by_rows = torch.zeros(height, width, dtype=torch.uint8).view(dtype), scale
        by_columns = torch.zeros(width, padded, dtype=torch.uint8).view(dtype), scale
        return by_rows if rows else None, by_columns if columns else None

    def product(left: Operand, right: Operand, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(len(left.values), len(right.values), dtype=dtype)

    def add_to(self: Any, sums: Tensor, *, is_empty: bool, scale: float) -> bool:
        return True

    with (
        patch.object(torch_casts, "magnitude_parts", magnitude_parts),
        patch.object(torch_casts, "cast_by_one_scale", cast),
        patch.object(fp8_regions, "product", product),
        patch.object(operand.ScaledProduct, "add_to", add_to),
    ):
        yield


@pytest.mark.parametrize(
    ("kind", "recompute", "is_shared"),
    chosen(
        list(product(["gpt2", "llama", "clamped"], ["none", "full"], [False, True])),
        ("gpt2", "none", False),
        ("llama", "full", True),
        ("clamped", "none", True),
    ),
)
def test_the_peak_memory_of_a_step_equals_the_estimate(
    kind: str, recompute: Any, is_shared: bool
) -> None:
    config = GPTConfig(**{**vars(CONFIGS[kind]), "vocab_size": 256})
    cast_weights = "batch" if is_shared else "microbatch"
    settings = FP8(emulate=True, cast_weights=cast_weights)  # type: ignore[arg-type]
    model = eight_bit_model(config, settings, torch.bfloat16)
    model.recompute = recompute
    memory, tokens = LiveMemory(), torch.randint(0, 256, (16, 64))
    set_slots(model, memory)
    assert model.weight_casts is not None
    with ExitStack() as stack:
        if is_shared:
            stack.enter_context(model.weight_casts.shared())
        stack.enter_context(allocate_like_kernels())
        stack.enter_context(memory)
        # The second microbatch reuses all casts.
        for _ in range(2):
            (model(tokens, labels=tokens, sums=True) / tokens.numel()).backward()
    training = TrainingShape(seq_length=64, microbatch_size=16, recompute=recompute, fp8=settings)
    table = table_of(config, torch.bfloat16)
    (estimate,) = estimate_memory(config.memory_shape(), ParallelLayout(1), training, table=table)
    assert estimate.peak - estimate.static == pytest.approx(memory.peak, rel=0.08)
