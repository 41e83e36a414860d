"""Blocks that FlexAttention visits are those of the span, and what it computes from them is the
formula's output.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_megatron.layers import attention_flex
from lightning_megatron.layers.alibi import AlibiSlopes
from lightning_megatron.layers.attention_flex import attend_by_flex
from lightning_megatron.layers.attention_operators import attend_by_operators
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.dense_mask import KeyRows, seen_pairs
from lightning_megatron.layers.visible_blocks import BLOCK, visible_blocks

CPU = torch.device("cpu")
LENGTHS = torch.tensor([[100, 7, 0], [299, 0, 0]])
KINDS = {
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


def numbered(numbers: Tensor, indices: Tensor) -> Tensor:
    """Return for each pair of blocks whether it is among the first of its row."""
    is_named = torch.arange(indices.shape[-1]) < numbers[..., None]
    found = torch.zeros_like(indices, dtype=torch.bool)
    return found.scatter(-1, indices.long(), is_named)


@pytest.mark.parametrize("length", [300, 384, 1000])
@pytest.mark.parametrize("kind", list(KINDS))
def test_blocks_are_those_that_torch_finds_from_all_pairs(kind: str, length: int) -> None:
    span = KINDS[kind].laid_out(2, length, CPU)
    blocks = visible_blocks(span, 2, length, CPU)
    expected = create_block_mask(
        blocks.mask_mod, 2, None, length, length, CPU, separate_full_blocks=True
    )
    pairs = [
        (numbered(one.kv_num_blocks, one.kv_indices), numbered(one.full_kv_num_blocks, one.full_kv_indices))
        for one in (blocks, expected)
    ]  # fmt: skip
    (partly, wholly), (partly_seen, wholly_seen) = pairs
    assert not (partly & wholly).any()
    assert torch.equal((partly | wholly).expand_as(wholly_seen), partly_seen | wholly_seen)
    assert torch.equal(wholly.expand_as(wholly_seen), wholly_seen)
    assert wholly.any() or "window" in kind or length < 3 * BLOCK


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_rule_for_pairs_is_that_of_the_dense_mask(kind: str) -> None:
    length = 300
    span = KINDS[kind].laid_out(2, length, CPU)
    rule = visible_blocks(span, 2, length, CPU).mask_mod
    grid = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    found = torch.stack([rule(torch.tensor(row), torch.tensor(0), *grid) for row in range(2)])
    expected = seen_pairs(span, 2, length, CPU).expand(2, 1, length, length)
    assert torch.equal(found[:, None], expected)


def borders(*sizes: int) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


#: Spans whose keys lie elsewhere than their queries, in two rows.
PARTS = {
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


@pytest.mark.parametrize("kind", list(PARTS))
def test_blocks_of_other_keys_are_those_of_the_dense_mask(kind: str) -> None:
    span, keys = PARTS[kind]
    length = 300
    blocks = visible_blocks(span, 2, length, CPU, keys)
    assert blocks.seq_lengths == (length, keys.seq_length)
    grid = torch.meshgrid(torch.arange(length), torch.arange(keys.seq_length), indexing="ij")
    found = torch.stack(
        [blocks.mask_mod(torch.tensor(row), torch.tensor(0), *grid) for row in range(2)]
    )
    expected = seen_pairs(span, 2, length, CPU, keys).expand(2, 1, length, keys.seq_length)
    assert torch.equal(found[:, None], expected)
    # No pair of the blocks that are left out is visible, and every one of those seen whole is.
    wholly = numbered(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    listed = wholly | numbered(blocks.kv_num_blocks, blocks.kv_indices)
    of_pairs = [
        one.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[
            :, :, :length, : keys.seq_length
        ]
        for one in (listed, wholly)
    ]
    assert not (expected & ~of_pairs[0]).any()
    assert not (of_pairs[1] & ~expected).any()
    assert listed.float().mean() < 1 or not span.causal, "blocks are left out"


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize(
    "span",
    [
        AttentionSpan(soft_cap=0.5, window=50),
        AttentionSpan(LENGTHS, soft_cap=0.3),
        AttentionSpan(prefix=torch.tensor([50, 0])),
        AttentionSpan(LENGTHS, slopes=AlibiSlopes(4), window=50),
        AttentionSpan(soft_cap=2.0, slopes=AlibiSlopes(4, 3.0), causal=False),
        AttentionSpan(soft_cap=2.0, sinks=torch.linspace(-1, 1, 4), scale=0.3),
    ],
    ids=[
        "cap and window",
        "cap and documents",
        "prefix",
        "slopes",
        "cap and slopes",
        "cap and sinks",
    ],
)
def test_the_output_is_that_of_the_formula(
    span: AttentionSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled kernel has no backward pass on CPUs, and its compilation takes long.
    monkeypatch.setattr(attention_flex, "_compiled", lambda: flex_attention)
    torch.manual_seed(0)
    inputs = [torch.randn(300, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    span = span.laid_out(2, 300, CPU)
    torch.testing.assert_close(
        attend_by_flex(*inputs, span), attend_by_operators(*inputs, span), rtol=1e-10, atol=1e-10
    )
