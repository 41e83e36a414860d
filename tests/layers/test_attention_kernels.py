"""Kernels of attention that this machine cannot run: FlexAttention visits the visible blocks of a
span, and packages of flash attention get the right arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_megatron.layers.attention import flash_kernels
from lightning_megatron.layers.attention import flex as attention_flex
from lightning_megatron.layers.attention import parts as attention_parts
from lightning_megatron.layers.attention.choose_core import choose_core, choose_part
from lightning_megatron.layers.attention.flash_kernels import (
    FlashAttention3,
    FlashAttention4,
    FlashCall,
    FlashChoice,
    choose_flash,
)
from lightning_megatron.layers.attention.flex import BLOCK, attend_by_flex, visible_blocks
from lightning_megatron.layers.attention.operators import KeyRows, attend_by_operators, seen_pairs
from lightning_megatron.layers.attention.parts import (
    attend_by_parts,
    attend_to_documents,
    backward_part,
    forward_part,
)
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan
from tests.layers import flash_packages
from tests.oracles import assert_equal

CPU = torch.device("cpu")
LENGTHS = torch.tensor([[100, 7, 0], [299, 0, 0]])

BLOCK_SPANS = {
    "causal": AttentionSpan(),
    "both ways": AttentionSpan(causal=False),
    "window": AttentionSpan(window=33),
    "wide window": AttentionSpan(window=200),
    "window both ways": AttentionSpan(window=200, causal=False),
    "documents": AttentionSpan(LENGTHS),
    "documents both ways": AttentionSpan(LENGTHS, causal=False),
    "documents, window": AttentionSpan(LENGTHS, window=40),
    "prefix": AttentionSpan(prefix=torch.tensor([50, 130])),
    "prefix, window": AttentionSpan(prefix=torch.tensor([0, 300]), window=20),
}


def lists_of(blocks: Any) -> tuple[Tensor, Tensor]:
    """Return which pairs of blocks are listed as partly visible, and which as fully visible."""
    lists = []
    for numbers, indices in (
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        is_first = torch.arange(indices.shape[-1]) < numbers[..., None]
        is_listed = torch.zeros_like(indices, dtype=torch.bool)
        lists.append(is_listed.scatter(-1, indices.long(), is_first))
    return lists[0], lists[1]


@pytest.mark.parametrize("kind", list(BLOCK_SPANS))
def test_visible_blocks_equal_those_of_create_block_mask(kind):
    for length in (300, 384, 1000):
        span = BLOCK_SPANS[kind].laid_out(2, length, CPU)
        blocks = visible_blocks(span, 2, length, CPU)
        expected = create_block_mask(
            blocks.mask_mod, 2, None, length, length, CPU, separate_full_blocks=True
        )
        (partial, full), (expected_partial, expected_full) = map(lists_of, (blocks, expected))
        assert not (partial & full).any()
        assert torch.equal(
            (partial | full).expand_as(expected_full), expected_partial | expected_full
        )
        assert torch.equal(full.expand_as(expected_full), expected_full)
        assert full.any() or "window" in kind or length < 3 * BLOCK


def borders(*sizes: int) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


#: Spans whose keys have other positions than their queries, in two rows.
SPANS_OF_OTHER_KEYS = {
    "all keys": (AttentionSpan(causal=False), KeyRows(500)),
    "aligned at the end": (AttentionSpan(), KeyRows(500)),
    "keys end behind the queries": (AttentionSpan(window=150), KeyRows(500, behind=40)),
    "keys end before the queries": (AttentionSpan(), KeyRows(300, behind=-140)),
    "documents": (
        AttentionSpan(borders=borders(100, 0, 200, 299, 1, 0)),
        KeyRows(500, borders(130, 0, 370, 299, 150, 51)),
    ),
    "documents to all keys": (
        AttentionSpan(borders=borders(100, 0, 200, 299, 1, 0), causal=False),
        KeyRows(200, borders(40, 100, 60, 199, 0, 1)),
    ),
}


@pytest.mark.parametrize("kind", list(SPANS_OF_OTHER_KEYS))
def test_visible_blocks_of_other_keys_agree_with_the_dense_mask(kind):
    span, keys = SPANS_OF_OTHER_KEYS[kind]
    length = 300
    blocks = visible_blocks(span, 2, length, CPU, keys)
    assert blocks.seq_lengths == (length, keys.seq_length)
    grid = torch.meshgrid(torch.arange(length), torch.arange(keys.seq_length), indexing="ij")
    actual = torch.stack(
        [blocks.mask_mod(torch.tensor(row), torch.tensor(0), *grid) for row in range(2)]
    )
    expected = seen_pairs(span, 2, length, CPU, keys).expand(2, 1, length, keys.seq_length)
    assert torch.equal(actual[:, None], expected)
    # No pair of the omitted blocks is visible, and every pair of the full blocks is visible.
    partial, full = lists_of(blocks)
    listed = partial | full
    in_listed, in_full = (
        pairs.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[
            ..., :length, : keys.seq_length
        ]
        for pairs in (listed, full)
    )
    assert not (expected & ~in_listed).any()
    assert not (in_full & ~expected).any()
    assert listed.float().mean() < 1 or not span.causal, "blocks are left out"


FLEX = {
    "cap and window": AttentionSpan(soft_cap=0.5, window=50),
    "cap and documents": AttentionSpan(LENGTHS, soft_cap=0.3),
    "prefix": AttentionSpan(prefix=torch.tensor([50, 0])),
    "slopes": AttentionSpan(LENGTHS, slopes=AlibiSlopes(4), window=50),
    "cap and slopes": AttentionSpan(soft_cap=2.0, slopes=AlibiSlopes(4, 3.0), causal=False),
    "cap and sinks": AttentionSpan(soft_cap=2.0, sinks=torch.linspace(-1, 1, 4), scale=0.3),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
def test_flex_attention_equals_attention_by_operators(monkeypatch):
    # The compiled kernel has no backward pass on CPUs, and its compilation takes long.
    by_kinds = attention_flex._by_kinds(flex_attention)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: by_kinds)
    inputs = [torch.randn(300, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    for kind, span in FLEX.items():
        span = span.laid_out(2, 300, CPU)
        actual, expected = attend_by_flex(*inputs, span), attend_by_operators(*inputs, span)
        assert_equal(actual, expected, kind)


S, B, H, K, D = 12, 2, 4, 2, 8
CUDA = torch.device("cuda")
PACKED = AttentionSpan.packed([[5, 3], [1, 11]], S).laid_out(B, S, CPU)

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

    def clear() -> None:
        flash_kernels._choose.cache_clear()
        flash_kernels.loaded.cache_clear()

    def install(capability: tuple[int, int], **modules: Any) -> None:
        for name in ("flash_attn_interface", "flash_attn.cute.interface"):
            monkeypatch.setitem(sys.modules, name, modules.get(name.split(".")[0]))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        clear()

    yield install
    clear()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_packages_equal_torch_for_every_span(name, case, monkeypatch):
    span, keys = CASES[case]
    query, grad = (draw(S, B, H, D, seed=seed) for seed in (1, 4))
    key, value = (draw(S, B, K, D, seed=seed) for seed in (2, 3))

    def run(statistics: tuple[Tensor, Tensor] | None) -> list[Tensor]:
        out, lse = forward_part(query, key, value, span, keys)
        statistics = statistics or merged(out, lse)
        return [out, lse, *backward_part(grad, (query, key, value), statistics, span, keys)]

    def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return statistics of a softmax over more keys than these."""
        return out * 0.7, lse.masked_fill(lse == -torch.inf, 0.0) + 0.2

    expected_results = run(None)
    choice = FlashChoice(KERNELS[name], "")
    monkeypatch.setattr(attention_parts, "core_of_part", lambda *values: "flash")
    monkeypatch.setattr(attention_parts, "choose_flash", lambda *values: choice)
    for actual, expected in zip(run(merged(*expected_results[:2])), expected_results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", ["documents", "other documents", "padded"])
def test_the_kernel_with_dropout_gets_the_arguments_of_a_span(case, monkeypatch):
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


#: Both packages, as modules by the name of the package.
BOTH = {
    "flash_attn_interface": flash_packages.make_flash_attention_3(),
    "flash_attn": flash_packages.make_flash_attention_4(),
}


def test_the_fastest_installed_package_is_chosen(packages, monkeypatch):
    packages((9, 0), **BOTH)
    assert choose_flash(CUDA, 128).kernel.name == "flash attention 3"
    packages((9, 0), flash_attn=BOTH["flash_attn"])
    assert choose_flash(CUDA, 256).kernel.name == "flash attention 4"
    packages((10, 0), **BOTH)
    assert choose_flash(CUDA, 128).reason == "flash attention 4 is installed"
    assert "at most 128 elements" in choose_flash(CUDA, 256).reason
    packages((8, 0), **BOTH)
    choice = choose_flash(CUDA, 128)
    assert choice.kernel.name == "flash"
    assert "flash attention 3 is for compute capability 9.0" in choice.reason
    packages((9, 0))
    assert choose_flash(CUDA, 128).reason.startswith("torch's, because flash attention 3 ")
    packages((9, 0), **BOTH)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash attention 3"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash"


def test_plain_rows_use_the_kernel_of_cudnn(packages, monkeypatch):
    packages((8, 0))
    assert choose_flash(CUDA, 128, True).kernel.name == "flash"
    packages((9, 0))
    assert choose_flash(CUDA, 128, True).kernel.name == "cuDNN"
    assert choose_flash(CUDA, 192, True).kernel.name == "flash", "no gradients of such heads"
    spans = (AttentionSpan(), AttentionSpan(window=8), PACKED)
    chosen = [choose_part(CUDA, torch.bfloat16, span).package for span in spans]
    assert chosen == ["cuDNN", "flash", "flash"]
    assert choose_part(CUDA, torch.bfloat16, AttentionSpan(), behind=3).package == "flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_flash(CUDA, 128, True).kernel.name == "flash", "whose bits repeat"


def test_a_package_with_another_interface_is_not_chosen(packages):
    module = flash_packages.make_flash_attention_3()
    module._flash_attn_forward = lambda q, k, v, cu_seqlens_q=None: None  # type: ignore[attr-defined]
    packages((9, 0), flash_attn_interface=module)
    reason = choose_flash(CUDA, 128).reason
    assert "another interface (_flash_attn_forward without max_seqlen_k)" in reason


def test_soft_caps_use_an_installed_package_instead_of_flex_attention(packages):
    bounded = AttentionSpan(soft_cap=50.0, window=4)
    packages((9, 0))
    assert choose_core(CUDA, torch.bfloat16, bounded).core == "flex"
    packages((9, 0), **BOTH)
    assert choose_core(CUDA, torch.bfloat16, bounded).name == "flash attention 3 without a mask"
