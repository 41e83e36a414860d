"""Choice of a flash attention package, and the arguments of its functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers import attention_parts
from lightning_megatron.layers import choose_flash as choosing
from lightning_megatron.layers.attention_parts import (
    attend_by_parts,
    attend_to_documents,
    backward_part,
    forward_part,
)
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.choose_core import choose_core, choose_part
from lightning_megatron.layers.choose_flash import FlashChoice, choose_flash
from lightning_megatron.layers.dense_mask import KeyRows
from lightning_megatron.layers.flash_kernels import FlashAttention3, FlashAttention4, FlashCall
from tests.layers import flash_packages

S, B, H, K, D = 12, 2, 4, 2, 8
CUDA = torch.device("cuda")
PACKED = AttentionSpan.packed([[5, 3], [1, 11]], S).laid_out(B, S, torch.device("cpu"))
CASES: dict[str, tuple[AttentionSpan, KeyRows | None]] = {
    "causal": (AttentionSpan(), None),
    "both ways": (AttentionSpan(causal=False, scale=0.3), None),
    "window": (AttentionSpan(window=4), None),
    "window to both sides": (AttentionSpan(window=4, causal=False), None),
    "soft cap": (AttentionSpan(soft_cap=0.8), None),
    "documents": (PACKED, None),
    "documents, window, soft cap": (replace(PACKED, window=3, soft_cap=0.8), None),
    "padded": (AttentionSpan.padded(torch.tensor([7, S]), S), None),
    "keys behind": (AttentionSpan(), KeyRows(S, behind=2)),
    "keys behind a window": (AttentionSpan(window=5), KeyRows(S, behind=2)),
    "other documents of keys": (
        replace(PACKED, causal=False),
        KeyRows(S, torch.tensor([0, 4, 8, 12, 13, 23, 24], dtype=torch.int32), 10),
    ),
}
KERNELS = {
    "third": FlashAttention3(flash_packages.make_flash_attention_3()),
    "fourth": FlashAttention4(flash_packages.make_flash_attention_4()),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install stand-ins on a GPU of a compute capability that the test names."""

    def install(capability: tuple[int, int], **modules: Any) -> None:
        for name in ("flash_attn_interface", "flash_attn.cute.interface"):
            monkeypatch.setitem(sys.modules, name, modules.get(name.split(".")[0]))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        choosing._choose.cache_clear()
        choosing.loaded.cache_clear()

    yield install
    choosing._choose.cache_clear()
    choosing.loaded.cache_clear()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_packages_equal_torch_for_every_span(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    span, keys = CASES[case]
    query, grad = (draw(S, B, H, D, seed=seed) for seed in (1, 4))
    key, value = (draw(S, B, K, D, seed=seed) for seed in (2, 3))
    expected_out, expected_lse = forward_part(query, key, value, span, keys)
    # Statistics of a softmax over more keys than these.
    merged_statistics = (
        expected_lse.masked_fill(expected_lse == -torch.inf, 0.0) + 0.2,
        expected_out * 0.7,
    )
    expected_gradients = backward_part(
        grad, query, key, value, merged_statistics[1], merged_statistics[0], span, keys
    )
    choice = FlashChoice(KERNELS[name], "", bounds_scores=True)
    monkeypatch.setattr(attention_parts, "core_of_part", lambda *values: "flash")
    monkeypatch.setattr(attention_parts, "choose_flash", lambda *values: choice)
    actual_out, actual_lse = forward_part(query, key, value, span, keys)
    torch.testing.assert_close(actual_out, expected_out)
    torch.testing.assert_close(actual_lse, expected_lse)
    gradients = backward_part(
        grad, query, key, value, merged_statistics[1], merged_statistics[0], span, keys
    )
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_sinks_with_kernels_of_packages_equal_sinks_with_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [draw(S, B, heads, D, seed=heads).requires_grad_() for heads in (H, K, K)]
    sinks = draw(H, seed=9).requires_grad_()
    span = replace(PACKED, window=3, sinks=sinks)

    def run() -> list[Tensor]:
        output = attend_by_parts(inputs[0], inputs[1], inputs[2], span)
        return [output, *torch.autograd.grad(output.square().sum(), [*inputs, sinks])]

    expected_results = run()
    choice = FlashChoice(KERNELS[name], "", bounds_scores=True)
    monkeypatch.setattr(attention_parts, "core_of_part", lambda *values: "flash")
    monkeypatch.setattr(attention_parts, "choose_flash", lambda *values: choice)
    for actual, expected in zip(run(), expected_results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", ["documents", "other documents", "padded"])
def test_the_kernel_with_dropout_gets_the_arguments_of_a_span(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = replace(PACKED, causal=False) if case == "other documents" else CASES[case][0]
    inputs = [draw(S, B, heads, D, seed=heads).requires_grad_() for heads in (H, K, K)]
    dropouts = []

    def drop(query: Any, key: Any, value: Any, call: FlashCall, dropout: float) -> Tensor:
        dropouts.append(dropout)
        return KERNELS["third"].forward(query, key, value, call)[0]

    def run(attend: Any, *arguments: Any) -> list[Tensor]:
        output = attend(*inputs, span, *arguments)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    monkeypatch.setattr(attention_parts, "attend_with_dropout", drop)
    actual_results = run(attend_to_documents, 0.3)
    for actual, expected in zip(actual_results, run(attend_by_parts), strict=True):
        torch.testing.assert_close(actual, expected)
    assert dropouts == [0.3]


def test_attention_with_dropout_within_documents_has_gradients_of_input_shapes() -> None:
    # Meta tensors show the shapes of the kernel and of its gradients.
    inputs = [
        torch.empty(S, B, heads, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (H, K, K)
    ]
    span = AttentionSpan.padded(torch.tensor([7, S], device="meta"), S)
    output = attend_to_documents(*inputs, span, 0.3)
    assert output.shape == inputs[0].shape
    output.sum().backward()
    assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]


def test_the_fastest_installed_package_is_chosen(
    packages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_packages = {
        "flash_attn_interface": flash_packages.make_flash_attention_3(),
        "flash_attn": flash_packages.make_flash_attention_4(),
    }
    packages((9, 0), **both_packages)
    assert choose_flash(CUDA, 128).kernel.name == "flash attention 3"
    packages((9, 0), flash_attn=both_packages["flash_attn"])
    assert choose_flash(CUDA, 256).kernel.name == "flash attention 4"
    packages((10, 0), **both_packages)
    assert choose_flash(CUDA, 128).reason == "flash attention 4 is installed"
    assert "at most 128 elements" in choose_flash(CUDA, 256).reason
    packages((8, 0), **both_packages)
    choice = choose_flash(CUDA, 128)
    assert choice.kernel.name == "flash"
    assert "flash attention 3 is for compute capability 9.0" in choice.reason
    packages((9, 0))
    assert choose_flash(CUDA, 128).reason.startswith("torch's, because flash attention 3 ")
    packages((9, 0), **both_packages)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash attention 3"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash"


def test_plain_rows_use_the_kernel_of_cudnn(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packages((9, 0))
    choice = choose_flash(CUDA, 128, True)
    assert choice.kernel.name == "cuDNN"
    assert choice.reason.startswith("cuDNN's for plain rows, because flash attention 3 ")
    assert choose_flash(CUDA, 192, True).kernel.name == "flash", "no gradients of such heads"
    half = torch.bfloat16
    assert choose_part(CUDA, half, AttentionSpan()).package == "cuDNN"
    assert choose_part(CUDA, half, AttentionSpan(), behind=3).package == "flash"
    assert choose_part(CUDA, half, AttentionSpan(window=8)).package == "flash"
    assert choose_part(CUDA, half, PACKED).package == "flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash", "whose bits repeat"
    packages((8, 0))
    monkeypatch.undo()
    packages((8, 0))
    assert choose_flash(CUDA, 128, True).kernel.name == "flash"


@pytest.mark.parametrize(
    ("call", "keys", "expected"),
    [
        ({"causal": True, "right": 0}, 8, True),
        ({"causal": True, "right": 0}, 12, False),
        ({}, 12, True),
        ({"left": 3}, 8, False),
        ({"right": 3}, 8, False),
        ({"soft_cap": 2.0}, 8, False),
        ({"query_borders": torch.tensor([0, 8])}, 8, False),
        ({"key_borders": torch.tensor([0, 8])}, 8, False),
    ],
)
def test_calls_without_documents_windows_and_caps_are_plain(
    call: dict[str, Any], keys: int, expected: bool
) -> None:
    plain = FlashCall(None, None, 8, keys, False, -1, -1, 1.0)
    assert replace(plain, **call).is_plain(8, keys) == expected


def test_a_package_with_another_interface_is_not_chosen(packages: Any) -> None:
    module = flash_packages.make_flash_attention_3()

    def earlier_forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None) -> None:
        """Take fewer arguments."""

    module._flash_attn_forward = earlier_forward  # type: ignore[attr-defined]
    packages((9, 0), flash_attn_interface=module)
    reason = choose_flash(CUDA, 128).reason
    assert "another interface (_flash_attn_forward without max_seqlen_k)" in reason


def test_soft_caps_use_an_installed_package_instead_of_flex_attention(packages: Any) -> None:
    bounded = AttentionSpan(soft_cap=50.0, window=4)
    packages((9, 0))
    assert choose_core(CUDA, torch.bfloat16, bounded).core == "flex"
    assert "does not bound scores" in choose_core(CUDA, torch.bfloat16, bounded).reason
    packages((9, 0), flash_attn_interface=flash_packages.make_flash_attention_3())
    choice = choose_core(CUDA, torch.bfloat16, bounded)
    assert (choice.core, choice.name) == ("flash", "flash attention 3 without a mask")
    assert "flash attention 3 is installed" in choice.reason
