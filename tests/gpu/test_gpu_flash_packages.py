"""Tests that installed packages of flash attention agree with torch's operators on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.attention import parts as attention_parts
from lightning_megatron.layers.attention.flash_kernels import PACKAGES, FlashChoice, loaded
from lightning_megatron.layers.attention.operators import KeyRows
from lightning_megatron.layers.attention.parts import backward_part, forward_part
from lightning_megatron.layers.attention.span import AttentionSpan
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

S, B, H, K, D = 512, 2, 8, 2, 128
LENGTHS = [[200, 1, 100], [37, 475, 0]]
KINDS: dict[str, tuple[AttentionSpan, KeyRows | None]] = {
    "causal": (AttentionSpan(), None),
    "both ways": (AttentionSpan(causal=False), None),
    "window": (AttentionSpan(window=100), None),
    "soft cap": (AttentionSpan(soft_cap=2.0), None),
    "documents": (AttentionSpan.packed(LENGTHS, S), None),
    "documents, window": (replace(AttentionSpan.packed(LENGTHS, S), window=50), None),
    "keys behind": (AttentionSpan(), KeyRows(S, behind=128)),
}


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_attention_parts_by_a_package_agree_with_operators_of_torch(package, kind, monkeypatch):
    capability = torch.cuda.get_device_capability()[0]
    obstacle = package.obstacle(capability, D)
    module, reason = loaded(package)
    if obstacle or module is None:
        pytest.skip(f"{package.name} {obstacle or reason}")
    span, keys = KINDS[kind]
    span = span.laid_out(B, S, torch.device("cuda"))
    shapes = ((S, B, H, D), (S, B, K, D), (S, B, K, D), (S, B, H, D))
    query, key, value, grad = (draw(*shape, seed=seed) for seed, shape in enumerate(shapes, 1))
    wide_query, wide_key, wide_value = (tensor.double() for tensor in (query, key, value))
    results = forward_part(wide_query, wide_key, wide_value, span, keys)
    expected_tensors = (
        *results,
        *backward_part(grad.double(), (wide_query, wide_key, wide_value), results, span, keys),
    )
    choice = FlashChoice(package(module), "")
    monkeypatch.setattr(attention_parts, "core_of_part", lambda *values: "flash")
    monkeypatch.setattr(attention_parts, "choose_flash", lambda *values: choice)
    results = forward_part(query, key, value, span, keys)
    actual_tensors = *results, *backward_part(grad, (query, key, value), results, span, keys)
    for number, (actual, expected) in enumerate(zip(actual_tensors, expected_tensors, strict=True)):
        distance = relative_difference(actual, expected)
        assert distance < 0.01, f"result {number} is off by {distance:.3g}"
