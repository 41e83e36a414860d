"""GPT in half precision and under autocast stays close to GPT in float32."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

SIZES = {"vocab_size": 50, "max_seq_length": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
CONFIGS = [
    GPTConfig.gpt2(**SIZES),
    GPTConfig.llama(**SIZES, num_kv_heads=2),
    GPTConfig.llama(
        **SIZES,
        num_kv_heads=2,
        qk_norm=True,
        norm_offset=1.0,
        embedding_scale=5.7,
        sliding_window=5,
    ),
]
TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", CONFIGS, ids=["gpt2", "llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_give_half_precision_logits_and_float32_losses(
    config: GPTConfig, dtype: torch.dtype
) -> None:
    wide, half = GPT(config, seed=1), GPT(config, seed=1).to(dtype)
    losses = half(TOKENS, TOKENS)
    losses.mean().backward()
    assert losses.dtype == torch.float32
    assert half(TOKENS).dtype == dtype
    assert half.boundary(TOKENS)[1] == dtype
    torch.testing.assert_close(losses, wide(TOKENS, TOKENS), rtol=0.02, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == dtype for p in half.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=["gpt2", "llama", "gemma"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_autocast_losses_are_near_float32_and_gradients_are_float32(
    config: GPTConfig, recompute: str
) -> None:
    model = GPT(config, seed=1)
    model.recompute = recompute
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(TOKENS, TOKENS)
    losses.mean().backward()
    torch.testing.assert_close(losses, model(TOKENS, TOKENS), rtol=0.02, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_scale_of_token_vectors_is_rounded_to_their_dtype() -> None:
    config = GPTConfig.llama(**SIZES, embedding_scale=5.71)
    embedding = GPT(config, seed=1).bfloat16().embedding
    assert embedding is not None
    expected = embedding.word(TOKENS) * torch.tensor(5.71, dtype=torch.bfloat16)
    assert torch.equal(embedding(TOKENS), expected)
    assert not torch.equal(embedding(TOKENS), embedding.word(TOKENS) * 5.71)
