"""Attention takes values of another size than keys, also where its kernels do not; settings of latent
attention that contradict each other are refused.
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
from tests.layers.test_attention_span import KINDS, drawn
from tests.oracles import assert_equal

SIZES: dict[str, Any] = {"key_value_rank": 8, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}


def small(tensor: Tensor) -> Tensor:
    """Return the first elements of every head of a result."""
    return tensor.unflatten(-1, (-1, 6))[..., :4].flatten(2)


@pytest.mark.parametrize("kind", list(KINDS))
def test_small_values_are_the_first_elements_of_large_ones(kind: str) -> None:
    query, key, value = drawn()
    core = partial(attend, span=KINDS[kind])
    whole = core(query, key, value)
    weights = torch.randn(
        whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(3)
    )
    expected = torch.autograd.grad((small(whole) * small(weights)).sum(), (query, key, value))
    for how in (core, partial(with_wide_values, core)):
        found = how(query, key, value[..., :4])
        assert_equal(found, small(whole), kind)
        gradients = torch.autograd.grad((found * small(weights)).sum(), (query, key, value))
        for name, one, other in zip(("query", "key", "value"), gradients, expected, strict=True):
            assert_equal(one, other, f"{kind}: {name}")


def test_values_are_padded_for_kernels_with_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    large = {"head_dim": 192, "value_dim": 128}
    assert not choose_core(cuda, half, **large).pads_values, "cuDNN takes these sizes"
    other = choose_core(cuda, half, head_dim=96, value_dim=64)
    assert other.pads_values
    assert other.reason.endswith("values of 64 elements are padded to 96")
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
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
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
def test_other_fields_must_not_contradict_latent_attention(
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
