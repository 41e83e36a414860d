"""Tests of the torch kernels that benchmarks call on a GPU and replace on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.eight_bit_products import EightBits
from benchmarks.grouped_problem import PASSES, draw, relative_error
from benchmarks.packed_attention import ATTENTIONS, packed_inputs, register
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
LENGTHS = [5, 1, 9, 3]


def tiny_llama(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(
        config, dtype=torch.float64, attn_implementation=ATTENTIONS[attention]
    )


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("sizes", [[256] * 4, [16, 400, 32, 576]], ids=["equal", "skewed"])
def test_8_bit_products_of_experts_equal_exact_products_up_to_rounding(sizes, which, fast):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch._scaled_grouped_mm with rowwise scales needs compute capability 9.0")
    torch.manual_seed(0)
    problem = draw(4, 256, 384, sizes)
    bits = EightBits(problem)
    assert 1e-3 < relative_error(problem, which, lambda: bits.product(which, fast=fast)) < 6e-2
    assert relative_error(problem, which, lambda: bits.product_with_casts(which)) < 6e-2


def test_torch_flash_documents_in_transformers_equal_a_dense_mask():
    register()
    device = torch.device("cuda")
    tokens = torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    inputs = packed_inputs(LENGTHS, device)
    exact = tiny_llama("sdpa").to(device, torch.float32)
    flash = tiny_llama("torch_flash").to(device, torch.bfloat16)
    expected = exact(tokens.cuda(), use_cache=False, **inputs).logits
    actual = flash(tokens.cuda(), use_cache=False, **inputs).logits
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.02)
    expected.square().sum().backward()
    actual.float().square().sum().backward()
    for parameter, twin in zip(flash.parameters(), exact.parameters(), strict=True):
        assert relative_difference(parameter.grad, twin.grad) < 0.05
