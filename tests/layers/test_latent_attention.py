"""Attention accepts values of another size than keys, also with kernels of one size; contradictory
settings of latent attention are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.attention_core import attend, with_wide_values
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.choose_core import choose_core
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.test_attention_span import SPANS, draw_inputs
from tests.oracles import assert_equal

SIZES: dict[str, Any] = {"key_value_rank": 8, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}


def first_elements(tensor: Tensor) -> Tensor:
    """Return the first 4 elements of every head of a result."""
    return tensor.unflatten(-1, (-1, 6))[..., :4].flatten(2)


@pytest.mark.parametrize("kind", list(SPANS))
def test_attention_with_short_values_equals_the_first_elements_with_long_values(kind: str) -> None:
    query, key, value = draw_inputs()
    core = partial(attend, span=SPANS[kind])
    full = core(query, key, value)
    weights = torch.randn(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(3))
    expected_gradients = torch.autograd.grad(
        (first_elements(full) * first_elements(weights)).sum(), (query, key, value)
    )
    for attention in (core, partial(with_wide_values, core)):
        output = attention(query, key, value[..., :4])
        assert_equal(output, first_elements(full), kind)
        gradients = torch.autograd.grad(
            (output * first_elements(weights)).sum(), (query, key, value)
        )
        for name, actual, expected in zip(
            ("query", "key", "value"), gradients, expected_gradients, strict=True
        ):
            assert_equal(actual, expected, f"{kind}: {name}")


def test_values_are_padded_for_kernels_that_need_one_head_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    large = {"head_dim": 192, "value_dim": 128}
    assert not choose_core(cuda, half, **large).pads_values, "cuDNN takes these sizes"
    choice = choose_core(cuda, half, head_dim=96, value_dim=64)
    assert choice.pads_values
    assert choice.reason.endswith("values of 64 elements are padded to 96")
    documents = AttentionSpan(torch.tensor([[2, 3]]))
    assert choose_core(cuda, half, documents, **large).pads_values
    assert choose_core(cuda, half, AttentionSpan(soft_cap=2.0), **large).pads_values
    assert choose_core(cuda, half, dropout=0.1, **large).pads_values
    # Memory-efficient attention and operators of torch take all sizes.
    assert not choose_core(cuda, torch.float32, documents, **large).pads_values
    assert not choose_core(cuda, torch.float64, AttentionSpan(soft_cap=2.0), **large).pads_values
    assert choose_core(torch.device("cpu"), half, **large).pads_values
    capability = (8, 0)
    assert choose_core(cuda, half, **large).pads_values
    assert not choose_core(cuda, half, head_dim=128, value_dim=128).pads_values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 3}, r"rotary_dim \(3\) of latent_attention must be even"),
        ({"value_dim": 11}, r"value_dim \(11\) .* at most plain_dim \+ rotary_dim \(10\)"),
        ({"key_value_rank": 0}, "latent_attention.key_value_rank must be .* at least 1"),
    ],
)
def test_illegal_sizes_of_latent_attention_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        LatentAttentionConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position": "learned"}, r"position \(learned\) must be rotary with latent_attention"),
        ({"head_dim": 6}, r"head_dim \(6\) must be None with latent_attention"),
        ({"num_kv_heads": 2}, r"num_kv_heads \(2\) must be None or num_heads \(4\) with"),
        ({"qk_norm": True}, r"qk_norm \(True\) must be False with latent_attention"),
    ],
)
def test_fields_that_contradict_latent_attention_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    sizes = {"vocab_size": 16, "max_seq_length": 8, "num_layers": 1, "num_heads": 4}
    # The heads need not divide the hidden size.
    config = GPTConfig.llama(**sizes, hidden_size=18, latent_attention=SIZES)
    assert (config.head_size, config.value_size, config.rotary_size) == (10, 8, 4)
    with pytest.raises(ParallelPlanError, match=r"num_attention_heads \(4\) must be a multiple"):
        config.check_layout(ParallelLayout(3, tp=3))
    with pytest.raises(ParallelPlanError, match=message):
        GPTConfig.llama(**sizes, hidden_size=18, latent_attention=SIZES, **settings)
