"""Let a model on the CPU choose kernels as on a GPU, with a stand-in for flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_megatron.layers.attention import core as attention_core
from lightning_megatron.layers.attention import parts as attention_parts
from lightning_megatron.layers.attention.choose_core import CoreChoice, choose_core
from lightning_megatron.layers.attention.flash_kernels import (
    FlashAttention3,
    FlashCall,
    FlashChoice,
)
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models import encoder
from tests.layers import flash_packages


@contextmanager
def without_masks() -> Iterator[list[AttentionSpan | float]]:
    """Choose flash attention wherever a GPU would choose it in half types, in any dtype.

    Operators of torch replace the kernel, for models without attention dropout.

    Yields:
        Spans of the calls so far, forward and backward.
    """
    calls: list[AttentionSpan | float] = []
    core_of_part = attention_parts.core_of_part

    def choose_flash_without_mask(
        device: Any, dtype: Any, span: AttentionSpan, *arguments: Any, **options: Any
    ) -> CoreChoice:
        if span.mask is None:
            return CoreChoice("flash", (), False, False, "a stand-in")
        return choose_core(device, dtype, span, *arguments, **options)

    def record_span(query: Any, span: AttentionSpan, keys: Any) -> str:
        calls.append(span)
        return core_of_part(query, span, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "choose_core", choose_flash_without_mask)
        patch.setattr(attention_core, "choose_core", choose_flash_without_mask)
        patch.setattr(attention_parts, "core_of_part", record_span)
        yield calls


@contextmanager
def flash_stand_in() -> Iterator[list[AttentionSpan | float]]:
    """Compute the same as :func:`without_masks` by a stand-in for flash attention 3.

    The stand-in drops no weights, so that its results with and without dropout are equal.

    Yields:
        Spans of the calls so far, or the dropout probability of calls with dropout.
    """
    kernel = FlashAttention3(flash_packages.make_flash_attention_3())
    choice = FlashChoice(kernel, "")
    with without_masks() as calls, pytest.MonkeyPatch.context() as patch:

        def core_of_part(query: Any, span: AttentionSpan, keys: Any) -> str:
            calls.append(span)
            return "flash"

        def drop(query: Any, key: Any, value: Any, call: FlashCall, dropout: float) -> torch.Tensor:
            calls.append(dropout)
            return kernel.forward(query, key, value, call)[0]

        patch.setattr(attention_parts, "core_of_part", core_of_part)
        patch.setattr(attention_parts, "attend_with_dropout", drop)
        patch.setattr(attention_parts, "choose_flash", lambda *arguments: choice)
        yield calls


def padded_on_the_right(lengths: list[int], seq_length: int) -> torch.Tensor:
    """Return the mask of rows with these lengths."""
    return torch.arange(seq_length) < torch.tensor(lengths)[:, None]
