"""Estimated activations and peak memory of a GPT equal its measured memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.kept_activations import KeptActivations, eager_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.loss_chunks import LossChunk
from lightning_megatron.plan.network_activations import MicrobatchShape
from lightning_megatron.strategy.callbacks.kept_activations import kept_activations_of
from tests.live_memory import LiveMemory
from tests.world import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "max_seq_length": 64,
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    # LayerNorm, because torch computes RMSNorm on CPUs by smaller operations, which keep more.
    "llama": GPTConfig.llama(**SIZES, num_kv_heads=2, ffn_hidden_size=96, norm="layernorm"),
    "post": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "parallel relu": GPTConfig.gpt2(
        **SIZES,
        parallel_residual=True,
        activation="relu",
        position="rotary",
        rotary_dim=8,
        output_bias=False,
    ),
    "window": GPTConfig.gpt2(**SIZES, sliding_window=9, window_layers=(True, False, True)),
    # Latent vectors are small, because their RMSNorms keep more on CPUs.
    "latent": GPTConfig.llama(
        **SIZES,
        ffn_hidden_size=96,
        norm="layernorm",
        latent_attention={
            "key_value_rank": 4,
            "query_rank": 4,
            "plain_dim": 24,
            "rotary_dim": 8,
            "value_dim": 16,
        },
    ),
    "bounded scores": GPTConfig.llama(**SIZES, norm="layernorm", attention_soft_cap=0.7),
    "sinks": GPTConfig.llama(**SIZES, norm="layernorm", attention_sinks=True),
    "bounded scores, sinks": GPTConfig.llama(
        **SIZES, norm="layernorm", num_kv_heads=2, attention_soft_cap=0.7, attention_sinks=True
    ),
    "slopes": GPTConfig.gpt2(**SIZES, position="alibi"),
    "slopes, norm of the embedding": GPTConfig.gpt2(**SIZES, position="alibi", embedding_norm=True),
    "geglu": GPTConfig.gpt2(
        **SIZES, num_kv_heads=2, ffn_hidden_size=96, activation="geglu", mlp_bias=False
    ),
    "clamped": GPTConfig.gpt2(**SIZES, ffn_hidden_size=160, activation="clamped_swiglu"),
}
_LATENT = {"key_value_rank": 12, "plain_dim": 10, "rotary_dim": 6, "value_dim": 8}
BATCH = 2


def saved_bytes(model: GPT) -> int:
    """Return the memory that a forward pass saves for backward, without parameters (bytes)."""
    parameter_storages = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    }
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 1024, (BATCH, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, labels=tokens).mean()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def estimated_bytes(config: GPTConfig, dtype: torch.dtype, **options: Any) -> int:
    shape = config.memory_shape()
    table = table_of(config, dtype)
    batch = MicrobatchShape(num_tokens=64 * BATCH, activation_bytes=dtype.itemsize, **options)
    costs = activation_costs(shape, table, batch, seq_length=64)
    return config.num_layers * costs.kept + costs.masks + costs.head + costs.loss_kept


def table_of(config: GPTConfig, dtype: torch.dtype) -> KeptActivations:
    """Return the activations that layers keep on a CPU, where operators replace missing kernels."""
    table = eager_activations(config.memory_shape(), dtype.itemsize)
    return replace(
        table, stores_scores=kept_activations_of(build_model(config, dtype)).stores_scores
    )


def build_model(config: GPTConfig, dtype: torch.dtype, mesh: ParallelMesh | None = None) -> GPT:
    torch.set_default_dtype(dtype)
    try:
        return GPT(config, mesh, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_memory_saved_by_a_forward_pass_equals_the_estimate(kind: str, dtype: torch.dtype):
    model = build_model(CONFIGS[kind], dtype)
    assert saved_bytes(model) == pytest.approx(estimated_bytes(CONFIGS[kind], dtype), rel=0.015)
    shape = CONFIGS[kind].memory_shape()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert shape.stage_parameters(ParallelLayout(1), 0, 3) == count


def test_numbers_of_parameters_with_every_setting_equal_the_estimate():
    for settings in (
        {"qkv_bias": True},
        {"output_bias": True},
        {"mlp_bias": True},
        {"qk_norm": True},
        {"latent_attention": _LATENT, "num_kv_heads": 4, "qkv_bias": True, "output_bias": True},
        {"latent_attention": {**_LATENT, "query_rank": 20}, "num_kv_heads": 4},
    ):
        sizes = {**SIZES, "num_kv_heads": 1, "activation": "geglu_tanh"}
        config = GPTConfig.llama(**{**sizes, **settings})
        count = sum(parameter.numel() for parameter in GPT(config, seed=1).parameters())
        assert config.memory_shape().stage_parameters(ParallelLayout(1), 0, 3) == count, settings


PEAKS = [
    (kind, vocab_size, recompute, None)
    for kind in (
        *("gpt2", "llama", "window", "latent", "clamped"),
        *("bounded scores, sinks", "sinks", "slopes"),
    )
    for vocab_size in (256, 8192)
    for recompute in ("none", "selective", "full")
] + [
    (kind, 8192, recompute, loss_chunk)
    for kind in ("gpt2", "llama")
    for recompute in ("none", "full")
    for loss_chunk in (96, "forward")
]


@pytest.mark.parametrize(("kind", "vocab_size", "recompute", "loss_chunk"), PEAKS)
def test_the_peak_memory_of_a_step_equals_the_estimate(
    kind: str, vocab_size: int, recompute: Any, loss_chunk: LossChunk
):
    sizes = {"vocab_size": vocab_size, "hidden_size": 128, "ffn_hidden_size": 384}
    config = GPTConfig(**{**vars(CONFIGS[kind]), **sizes})
    model = build_model(config, torch.bfloat16)
    model.recompute = recompute
    model.loss_chunk = loss_chunk
    memory, tokens = LiveMemory(), torch.randint(0, vocab_size, (4, 64))
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])
    with memory:
        (model(tokens, labels=tokens, sums=True) / tokens.numel()).backward()
    training = TrainingShape(
        seq_length=64, microbatch_size=4, recompute=recompute, loss_chunk=loss_chunk
    )
    table = table_of(config, torch.bfloat16)
    shape = config.memory_shape()
    (estimate,) = estimate_memory(shape, ParallelLayout(1), training, table=table)
    assert estimate.peak - estimate.static == pytest.approx(memory.peak, rel=0.08)


@pytest.mark.parametrize("loss_chunk", [None, 50])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "post", "latent"])
def test_memory_left_by_an_input_half_equals_the_estimate(
    kind: str, recompute: Any, loss_chunk: int | None
):
    config = CONFIGS[kind]
    model = build_model(config, torch.bfloat16)
    model.recompute = recompute
    model.loss_chunk = loss_chunk
    tokens = torch.randint(0, 1024, (BATCH, 64))
    memory = LiveMemory()
    queue = WeightGradientQueue()
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None, queue=queue)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])
    with memory:
        loss = model(tokens, labels=tokens).mean()
        with queue.open("half"):
            loss.backward()
        del loss
        memory_after_input_half = memory.now
        queue.run("half")
    shape = config.memory_shape()
    batch = MicrobatchShape(num_tokens=64 * BATCH, activation_bytes=2)
    costs = activation_costs(
        shape, eager_activations(shape, 2), batch, seq_length=64, loss_chunk=loss_chunk
    )
    estimate = config.num_layers * costs.waiting + costs.head_waiting
    assert memory_after_input_half - memory.now == pytest.approx(estimate, rel=0.02)


def measure_on_two_ranks(rank: int, size: int) -> list[tuple[int, int, int, int]]:
    results = []
    for config in (CONFIGS["gpt2"], CONFIGS["llama"], CONFIGS["latent"]):
        for sequence_parallel in (False, True):
            layout = ParallelLayout(2, tp=2)
            mesh = ParallelMesh.create(
                layout, device="cpu", seed=0, sequence_parallel=sequence_parallel
            )
            model = build_model(config, torch.float32, mesh)
            estimate = estimated_bytes(
                config, torch.float32, tp=2, sequence_parallel=sequence_parallel
            )
            count = sum(parameter.numel() for parameter in model.parameters())
            expected = config.memory_shape().stage_parameters(layout, 0, 3)
            results.append((saved_bytes(model), estimate, count, expected))
            mesh.destroy()
    return results


def test_memory_saved_by_tensor_parallel_ranks_equals_the_estimate():
    for rows in run_world(measure_on_two_ranks, 2):
        for saved, estimate, count, expected in rows:
            assert saved == pytest.approx(estimate, rel=0.015)
            assert count == expected
