"""Masks say who sees whom, are made only where they say something, and go to kernels that take
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_megatron.layers.attention_core import attend, choose_core
from lightning_megatron.layers.attention_span import AttentionSpan, attention_mask
from tests.oracles import assert_equal

POSITIONS = torch.tensor([[3, 1, 2]])
LIKE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


def shown(mask: Tensor | None) -> list[list[str]]:
    """Draw each row's mask: a line for each place, x where it sees."""
    assert mask is not None, "there is a mask"
    return [
        ["".join("x" if value == 0 else "." for value in line) for line in row[0]] for row in mask
    ]


@pytest.mark.parametrize("span", [None, AttentionSpan(), AttentionSpan(positions=POSITIONS)])
@pytest.mark.parametrize("window", [None, 3, 4])
def test_rows_that_see_all_before_need_no_mask(
    span: AttentionSpan | None, window: int | None
) -> None:
    assert attention_mask(span, window, 3, **LIKE) is None


def test_a_place_sees_what_window_documents_and_padding_leave_it() -> None:
    assert shown(attention_mask(None, 2, 4, **LIKE)) == [["x...", "xx..", ".xx.", "..xx"]]
    documents = torch.tensor([[0, 0, 1, 1], [7, 2, 2, 2]])
    assert shown(attention_mask(AttentionSpan(documents=documents), None, 4, **LIKE)) == [
        ["x...", "xx..", "..x.", "..xx"],
        ["x...", ".x..", ".xx.", ".xxx"],
    ]
    assert shown(attention_mask(AttentionSpan(documents=documents), 2, 4, **LIKE))[1] == [
        "x...",
        ".x..",
        ".xx.",
        "..xx",
    ]


def test_padding_is_seen_by_none_but_by_itself_where_it_sees_nothing() -> None:
    valid = torch.tensor([[False, False, True, True], [True, True, False, False]])
    assert shown(attention_mask(AttentionSpan(valid=valid), None, 4, **LIKE)) == [
        ["x...", ".x..", "..x.", "..xx"],
        ["x...", "xx..", "xx..", "xx.."],
    ]


def test_masks_go_to_kernels_that_take_them() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        choice = choose_core(torch.device("cuda"), dtype, has_mask=True)
        assert choice.backends == (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
        assert choice.expand_kv


def test_a_causal_mask_is_the_causal_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.rand(5, 2, heads, 6, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    mask = attention_mask(
        AttentionSpan(documents=torch.zeros(2, 5, dtype=torch.long)), None, 5, **LIKE
    )
    assert mask is not None
    for scale in (None, 0.7):
        expected = attend(query, key, value, causal=True, scale=scale)
        assert_equal(
            attend(query, key, value, causal=True, mask=mask, scale=scale), expected, "mixed"
        )
