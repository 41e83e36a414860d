"""Model FLOPs equal the FLOPs of the products that a forward pass runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import flops_per_token
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

SEQUENCE, VOCABULARY = 16, 128
_LATENT = {"key_value_rank": 12, "plain_dim": 10, "rotary_dim": 6, "value_dim": 8}
CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_kv_heads": 2},
    "latent": {"latent_attention": _LATENT},
    "latent queries": {"latent_attention": {**_LATENT, "query_rank": 20}},
}


@pytest.mark.parametrize("case", CASES)
def test_flops_per_token_equal_the_counted_flops(case: str) -> None:
    config = GPTConfig.llama(
        vocab_size=VOCABULARY,
        max_seq_length=SEQUENCE,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=40,
        **CASES[case],
    )
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
    # This kernel multiplies all pairs, of which causal attention needs half, and padded values.
    math_kernel = sdpa_kernel(SDPBackend.MATH)
    with math_kernel, FlopCounterMode(display=False) as counter, torch.no_grad():
        GPT(config, seed=1)(tokens, tokens)
    pairs = config.num_layers * 2 * SEQUENCE * config.num_heads
    needed = pairs * (config.head_size + config.value_size) / 2
    counted = counter.get_total_flops() / SEQUENCE - pairs * 2 * config.head_size + needed
    assert 3 * counted == pytest.approx(flops_per_token(config, SEQUENCE), rel=1e-12)
