"""Memory of a GPT as it is measured, and as it is estimated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.fp8 import operand, torch_casts
from lightning_megatron.layers.fp8.operand import Operand
from lightning_megatron.layers.linear import fp8_products
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.eight_bits import EightBitLayers
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.kept_activations import KeptActivations, eager_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.network_activations import MicrobatchShape
from lightning_megatron.plan.recomputation import Recomputation
from lightning_megatron.strategy.memory_estimate import kept_activations_of
from tests.live_memory import LiveMemory

BATCH, LENGTH = 2, 64
SIZES: dict[str, Any] = {"vocab_size": 1024, "max_seq_length": LENGTH, "num_layers": 3}
SIZES |= {"hidden_size": 64, "num_heads": 4}
# Latent vectors are small, because their RMSNorms keep more on CPUs.
_LATENT = {"key_value_rank": 4, "query_rank": 4, "plain_dim": 24, "rotary_dim": 8, "value_dim": 16}
# LayerNorm, because torch computes RMSNorm on CPUs by smaller operations, which keep more.
LLAMA: dict[str, Any] = {**SIZES, "norm": "layernorm"}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    "llama": GPTConfig.llama(**LLAMA, num_kv_heads=2, ffn_hidden_size=96),
    "post": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "parallel relu": GPTConfig.gpt2(
        **SIZES, parallel_residual=True, activation="relu", position="rotary", rotary_dim=8, output_bias=False
    ),
    "window": GPTConfig.gpt2(**SIZES, sliding_window=9, window_layers=(True, False, True)),
    "latent": GPTConfig.llama(**LLAMA, ffn_hidden_size=96, latent_attention=_LATENT),
    "bounded scores": GPTConfig.llama(**LLAMA, attention_soft_cap=0.7),
    "sinks": GPTConfig.llama(**LLAMA, attention_sinks=True),
    "bounded scores, sinks": GPTConfig.llama(**LLAMA, num_kv_heads=2, attention_soft_cap=0.7, attention_sinks=True),
    "slopes": GPTConfig.gpt2(**SIZES, position="alibi"),
    "slopes, norm of the embedding": GPTConfig.gpt2(**SIZES, position="alibi", embedding_norm=True),
    "geglu": GPTConfig.gpt2(**SIZES, num_kv_heads=2, ffn_hidden_size=96, activation="geglu", mlp_bias=False),
    "clamped": GPTConfig.gpt2(**SIZES, ffn_hidden_size=160, activation="clamped_swiglu"),
}  # fmt: skip


def mixture(experts: dict[str, Any], **settings: Any) -> GPTConfig:
    """Return a small model whose second of three layers has experts, unless settings differ."""
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48, "layers": 2, **experts}
    sizes = {**LLAMA, "vocab_size": 256, "ffn_hidden_size": 96}
    return GPTConfig.llama(**{**sizes, **settings}, experts=experts)


def build_model(
    config: GPTConfig,
    dtype: torch.dtype = torch.bfloat16,
    mesh: ParallelMesh | None = None,
    fp8: FP8 | None = None,
    recompute: Any = "none",
) -> GPT:
    """Build a model of a dtype, perhaps with layers in 8 bits."""
    torch.set_default_dtype(dtype)
    try:
        model = GPT(config, mesh, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    if fp8 is not None:
        set_fp8(model, fp8, True, torch.device("cpu"))
    model.recompute = recompute
    return model


def draw_tokens(config: GPTConfig, batch: int = BATCH) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, LENGTH))


def table_of(config: GPTConfig, dtype: torch.dtype = torch.bfloat16) -> KeptActivations:
    """Return the activations that layers keep on a CPU, where operators replace missing kernels."""
    table = eager_activations(config.memory_shape(), dtype.itemsize)
    stores_scores = kept_activations_of(build_model(config, dtype)).stores_scores
    return replace(table, stores_scores=stores_scores)


def saved_bytes(model: GPT) -> int:
    """Return the memory that a forward pass saves for backward, without parameters (bytes)."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = draw_tokens(model.config)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, labels=tokens).mean()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def track_memory(model: GPT, queue: WeightGradientQueue | None = None) -> LiveMemory:
    """Give parameters gradient slots, and track all memory except parameters and gradients."""
    memory = LiveMemory()
    memory.leave_out(list(model.buffers()))
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None, queue=queue)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])
    return memory


def kept_bytes(model: GPT, patience: float = 0.0) -> int:
    """Return the memory that is alive after a forward pass, without its losses (bytes)."""
    memory, tokens = track_memory(model), draw_tokens(model.config)
    model(tokens, labels=tokens)  # fills the cache of rotary tables
    with memory:
        loss = model(tokens, labels=tokens)
    # A thread of the communication library frees sent tensors a moment later.
    deadline, smallest = time.monotonic() + patience, memory.now
    while time.monotonic() < deadline:
        time.sleep(0.01)
        smallest = min(smallest, memory.now)
    return smallest - loss.nbytes


def peak_bytes(model: GPT, batch: int = 4) -> int:
    """Return the memory at the peak of a forward and backward pass (bytes)."""
    memory, tokens = track_memory(model), draw_tokens(model.config, batch)
    with memory:
        (model(tokens, labels=tokens, sums=True) / tokens.numel()).backward()
    return memory.peak


def waiting_bytes(model: GPT) -> int:
    """Return the memory that an input half of the backward pass leaves for the other half (bytes)."""
    queue = WeightGradientQueue()
    memory, tokens = track_memory(model, queue), draw_tokens(model.config)
    with memory:
        loss = model(tokens, labels=tokens).mean()
        with queue.open("half"):
            loss.backward()
        del loss
        after_input_half = memory.now
        queue.run("half")
    return after_input_half - memory.now


def estimated_costs(
    config: GPTConfig,
    dtype: torch.dtype,
    fp8: FP8 | None = None,
    recompute: Any = "none",
    **options: Any,
) -> list[Any]:
    """Return the estimated costs of every layer."""
    shape, table = config.memory_shape(), table_of(config, dtype)
    loss_chunk = options.pop("loss_chunk", None)
    batch = MicrobatchShape(num_tokens=LENGTH * BATCH, activation_bytes=dtype.itemsize, **options)
    costs = []
    for layer in range(config.num_layers):
        settings: dict[str, Any] = {"loss_chunk": loss_chunk} if loss_chunk else {}
        if fp8 is not None:
            settings["eight_bits"] = EightBitLayers.of(
                fp8, shape, layer, batch.tp, shares_casts=False
            )
        parts = Recomputation.of(recompute).parts_of(layer, config.num_layers)
        costs.append(activation_costs(
            shape, table, batch, seq_length=LENGTH, recompute=parts, has_experts=config.has_experts_in(layer), **settings
        ))  # fmt: skip
    return costs


def estimated_kept_bytes(*arguments: Any, **options: Any) -> int:
    """Return the estimated memory that a forward pass keeps (bytes)."""
    costs = estimated_costs(*arguments, **options)
    first, slots = costs[0], max(layer.slots for layer in costs)
    return sum(layer.kept for layer in costs) + first.masks + first.head + first.loss_kept + slots


def estimated_peak_bytes(
    config: GPTConfig,
    layout: ParallelLayout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **training: Any,
) -> int:
    """Return the estimated memory at the peak of a step beyond permanent memory (bytes)."""
    training = {
        "seq_length": LENGTH,
        "microbatch_size": 4,
        "activation_bytes": dtype.itemsize,
        **training,
    }
    (estimate,) = estimate_memory(
        config.memory_shape(), layout or ParallelLayout(1), TrainingShape(**training), table=table_of(config, dtype)
    )  # fmt: skip
    return estimate.peak - estimate.static


def check_parameters(model: GPT, layout: ParallelLayout) -> None:
    """Check the numbers of parameters outside of experts and of experts."""
    config, shape, counts = model.config, model.config.memory_shape(), {True: 0, False: 0}
    mixtures = sum(map(config.has_experts_in, range(config.num_layers)))
    for parameter in model.parameters():
        counts[shard_spec_of(parameter).is_expert] += parameter.numel()
    assert counts[False] == shape.stage_parameters(layout, 0, config.num_layers, mixtures)
    assert counts[True] == (mixtures * shape.expert_parameters(layout) if mixtures else 0)


@contextmanager
def allocate_like_kernels() -> Iterator[None]:
    """Let casts and products in 8 bits allocate only operands and results, as kernels of GPUs do."""

    def cast(matrix: Tensor, parts: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool,
             multiple: int, running_magnitude: Tensor | None = None) -> tuple[Any, Any]:  # fmt: skip
        height, width = matrix.shape
        padded, scale = height + -height % multiple, torch.ones(1)
        by_rows = torch.zeros(height, width, dtype=torch.uint8).view(dtype), scale
        by_columns = torch.zeros(width, padded, dtype=torch.uint8).view(dtype), scale
        return by_rows if rows else None, by_columns if columns else None

    def product(left: Operand, right: Operand, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(len(left.values), len(right.values), dtype=dtype)

    def magnitude_parts(matrix: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    with (
        patch.object(torch_casts, "magnitude_parts", magnitude_parts),
        patch.object(torch_casts, "cast_by_one_scale", cast),
        patch.object(fp8_products, "product", product),
        patch.object(operand.ScaledProduct, "add_to", lambda *_, **__: True),
    ):
        yield
