"""The attention core by Transformer Engine, which chooses between cuDNN and flash attention."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.attention.span import AttentionSpan, document_of_tokens
from lightning_megatron.layers.fused.choose_kernels import warn_of_slow_path
from lightning_megatron.shapes import Float

_log = logging.getLogger(__name__)
#: Kernels, with the names under which the library notes its latest choice.
_KERNELS = {"flash attention": "use_flash_attention", "cuDNN": "use_fused_attention"}
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


# torch.compile cannot trace Transformer Engine.
@torch.compiler.disable
def attend_by_engine(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
    span: AttentionSpan,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Compute attention over a span with Transformer Engine's DotProductAttention.

    Equal to :func:`layers.attention.core.attend` up to rounding; weights are dropped by torch's
    generator of the device.

    Raises:
        UnsupportedError: If the span has a mask, a prefix, ALiBi, sinks or kept results.
    """
    obstacle = reason_against_engine(span)
    if obstacle is not None:
        raise UnsupportedError(
            f"attention by Transformer Engine (linear.parts) cannot have {obstacle}. Leave "
            "attention out of linear.parts."
        )
    length, num_sequences, heads, head_dim = query.shape
    span = span.laid_out(num_sequences, length, query.device)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    head_dims = head_dim, value.shape[3]
    core = _core(heads, key.shape[2], head_dims, dropout, span.scale, is_deterministic)
    window = -1 if span.window is None or span.window >= length else span.window - 1
    options: dict[str, Any] = {
        "window_size": (window, 0 if span.causal else window),
        "softcap": span.soft_cap or 0.0,
    }
    if span.borders is None:
        # Without borders the library keeps some that it made, perhaps in the memory of a graph.
        ends = torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * length
        options |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        mask_type = "causal" if span.causal else "no_mask"
        mixed: Tensor = core(query, key, value, attn_mask_type=mask_type, **options)
    else:
        longest = min(span.longest or length, length)
        keys = span.borders
        if span.key_borders is not None:
            keys = span.key_borders
            # The library leaves the gradients of keys undefined that no query sees.
            documents = document_of_tokens(keys, num_sequences, length)
            seen = (span.borders.diff() > 0)[documents].t()[..., None, None]
            key, value = (torch.where(seen, tensor, 0) for tensor in (key, value))
        options |= {"cu_seqlens_q": span.borders, "cu_seqlens_kv": keys, "qkv_format": "thd"}
        options |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        rows = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)]
        mask_type = "padding_causal" if span.causal else "padding"
        mixed = core(*rows, attn_mask_type=mask_type, **options)
        mixed = mixed.unflatten(0, (num_sequences, length)).transpose(0, 1)
    _note_kernels()
    return mixed


def reason_against_engine(span: AttentionSpan) -> str | None:
    """Return what Transformer Engine's attention does not compute of a span; None if it can."""
    found = {
        "a mask for each pair of tokens": span.mask,
        "a prefix": span.prefix,
        "ALiBi slopes, which its kernels take as a bias for each pair of tokens": span.slopes,
        "sinks, whose scores are parameters of its own": span.sinks,
        "recompute='full_except_core', because it does not return log-sum-exps": span.results,
    }
    return next((what for what, value in found.items() if value is not None), None)


@cache
def _core(
    heads: int,
    kv_heads: int,
    head_dims: tuple[int, int],
    dropout: float,
    scale: float | None,
    is_deterministic: bool,
) -> Any:
    """Return the module of the library, which reads whether torch is deterministic."""
    make = import_module(_ATTENTION).DotProductAttention
    return make(
        heads,
        head_dims,
        num_gqa_groups=kv_heads,
        attention_dropout=dropout,
        softmax_scale=scale,
    )


def _note_kernels() -> None:
    """Log once which kernels the library chose for the latest call, and warn of slow ones."""
    chosen = import_module(_ATTENTION)._attention_backends
    _note(next((name for name, key in _KERNELS.items() if chosen[key]), "operators of torch"))


@cache
def _note(kernels: str) -> None:
    _log.info("attention by Transformer Engine: %s", kernels)
    if kernels not in _KERNELS:
        warn_of_slow_path(
            "Transformer Engine has no kernel for this attention, and stores the scores of all "
            "pairs of tokens. NVTE_DEBUG=1 and NVTE_DEBUG_LEVEL=2 in the environment show its "
            "reasons. Leave attention out of linear.parts."
        )
