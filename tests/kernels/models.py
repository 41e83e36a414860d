"""Compare full models on the fused kernels with the same models on the operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "max_seq_length": 16,
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
}
KINDS: dict[str, GPTConfig] = {
    "llama": GPTConfig.llama(**TINY, num_kv_heads=2, ffn_hidden_size=48, vocab_multiple=8),
    "gpt2": GPTConfig.gpt2(**TINY, vocab_multiple=8),
    "post-norm": GPTConfig.gpt2(**TINY, vocab_multiple=8, norm_position="post", activation="gelu", position="rotary"),
    "dropout": GPTConfig.llama(**TINY, vocab_multiple=8, hidden_dropout=0.1),
    "gemma": GPTConfig.llama(
        **TINY, vocab_multiple=8, num_kv_heads=1, ffn_hidden_size=48, activation="geglu_tanh", qk_norm=True,
        norm_offset=1.0, embedding_scale=5.7, tie_embeddings=True,
    ),
    "neox": GPTConfig.gpt2(
        **TINY, vocab_multiple=8, position="rotary", rotary_dim=4, parallel_residual=True, activation="relu"
    ),
    "glm": GPTConfig.llama(
        **TINY, vocab_multiple=8, num_kv_heads=2, rotary_dim=4, rotary_interleaved=True, norm_position="sandwich"
    ),
    "qwen": GPTConfig.llama(
        **TINY, vocab_multiple=8, num_kv_heads=2, ffn_hidden_size=48, qk_norm=True, qkv_bias=True,
        tie_embeddings=True,
    ),
    "window": GPTConfig.llama(**TINY, vocab_multiple=8, num_kv_heads=2, ffn_hidden_size=48, sliding_window=3),
}  # fmt: skip


@contextmanager
def eager() -> Iterator[None]:
    """Run layers on the operators of torch, also in the backward pass of this block."""
    before = choose_kernels.is_served
    choose_kernels.is_served = lambda tensor: False
    try:
        yield
    finally:
        choose_kernels.is_served = before


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch's own operators, such as attention and embeddings on GPUs, repeat exactly, as the
    kernels always do.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(model: GPT, tokens: Tensor, labels: Tensor, smoothing: float) -> dict[str, Tensor]:
    """Return losses and all gradients."""
    model.mesh.random.begin_microbatch(0, 0)
    model.zero_grad(set_to_none=True)
    losses = model(tokens, labels, label_smoothing=smoothing)
    (losses.sum() / losses.numel()).backward()
    return {"losses": losses.detach()} | {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare_model(
    config: GPTConfig,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    recompute: Any,
    check: Callable[[Tensor, Tensor, str], None],
    shape: tuple[int, int] = (2, 4),
    smoothing: float = 0.0,
) -> None:
    """Run a model on kernels and on operators of torch; compare losses and gradients."""
    model = GPT(config, mesh, seed=1).to(dtype)
    model.recompute = recompute
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (shape[0], shape[1] + 1), generator=generator).to(
        mesh.device
    )
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    with deterministic():
        fused = run(model, tokens[:, :-1], labels, smoothing)
        repeated = run(model, tokens[:, :-1], labels, smoothing)
    with eager():
        expected = run(model, tokens[:, :-1], labels, smoothing)
    assert fused.keys() == expected.keys()
    for name, value in fused.items():
        assert torch.equal(value, repeated[name]), f"{name}: two runs differ"
        check(value, expected[name], name)
    model.eval()
    with torch.inference_mode():
        losses = model(tokens[:, :-1], labels)
        with eager():
            check(losses, model(tokens[:, :-1], labels), "losses without gradients")
    model.train()
    run(model, tokens[:, :-1], labels, smoothing)
