"""Memory of a GPT as a CPU holds it, and as it is traced without elements."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.memory.chunk_costs import ChunkTrace
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.memory.lone_stage import LoneStage, put_into_buffers
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.custom_schedule import build_order
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout

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


def shape_of(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> TrainingShape:
    """Return the settings of a step of a small model in one dtype."""
    size = dtype.itemsize
    sizes = {
        "parameter_bytes": size,
        "gradient_bytes": size,
        "activation_bytes": size,
        "main_bytes": 0,
    }
    return TrainingShape(**{"seq_length": LENGTH, "microbatch_size": BATCH, **sizes, **changes})


class PatientMemory(LiveMemory):
    """Memory of which a thread of the communication library frees sent tensors a moment later."""

    def restart(self) -> int:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return super().restart()


def held_costs(model: GPT, training: TrainingShape) -> dict[str, int]:
    """Return what the passes of a model on the CPU hold."""
    layout = model.mesh.layout
    memory = LiveMemory() if layout.world_size == 1 else PatientMemory()
    main = put_into_buffers(model, model.mesh, training)
    reducer = GradientReducer(main)
    reducer.watch(main.buffers)
    tokens = draw_tokens(model.config, training.microbatch_size)
    schedule = build_order(
        training.schedule, layout.pp, training.num_microbatches, layout.vpp, None
    )
    for buffer in main.buffers:
        memory.leave_out([buffer.parameters, buffer.gradients])
    memory.leave_out([tokens, *model.buffers()])

    def step(tokens: Tensor) -> Tensor:
        return model(tokens, labels=tokens, sums=True) / tokens.numel()

    microbatch = Microbatch(tokens, len(tokens))
    stage = LoneStage(
        memory, model.mesh, [model], model, None, main, reducer, step, microbatch, schedule
    )  # type: ignore[arg-type]
    with memory:
        trace = ChunkTrace(stage, 0)
        trace.run()
        return asdict(trace.run())


def traced_costs(
    config: GPTConfig, training: TrainingShape, layout: ParallelLayout | None = None
) -> dict[str, int]:
    """Return what the same passes need according to a trace."""
    stage = LoneStage.build(config, layout or ParallelLayout(1), training, 0, "cpu")
    with stage.batch(shares_casts=False):
        trace = ChunkTrace(stage, 0)
        trace.run()
        return asdict(trace.run())


def check_costs(
    held: dict[str, int], traced: dict[str, int], rel: float = 0.004, name: str = ""
) -> None:
    """Check that each part of the costs is what the CPU has held."""
    for part, size in held.items():
        assert abs(traced[part] - size) <= rel * held["backward"], (name, part, size, traced[part])
