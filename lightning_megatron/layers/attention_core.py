"""The attention core, softmax(Q K^T / sqrt(K)) V, and the choice of its kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.shapes import Float


@dataclass(frozen=True)
class CoreChoice:
    """Attention kernels in the order in which torch tries them, with the reason for the choice.

    Args:
        backends: Kernels of torch's scaled_dot_product_attention; an empty tuple leaves the choice
            to torch.
        expand_kv: Whether key/value heads must be repeated for every query head, because the
            kernels do not support grouped-query attention.
        reason: Reason for the choice, for the log.
    """

    backends: tuple[SDPBackend, ...]
    expand_kv: bool
    reason: str


def choose_core(
    device: torch.device,
    dtype: torch.dtype,
    dropout: float = 0.0,
    has_mask: bool = False,
) -> CoreChoice:
    """Choose the attention kernels for a device and dtype.

    Args:
        device: Device of the tensors.
        dtype: Dtype of queries, keys and values.
        dropout: Probability that an attention weight is dropped.
        has_mask: Whether a mask is added to the scores.
    """
    if device.type != "cuda":
        return CoreChoice((), False, f"{device.type}: torch chooses among its own kernels")
    fused = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    if has_mask:
        return CoreChoice(
            fused[1:],
            True,
            "a mask: memory-efficient attention adds it to the scores",
        )
    if dtype not in HALF_TYPES:
        return CoreChoice(
            fused[1:],
            True,
            f"{dtype} has no flash kernel: memory-efficient attention",
        )
    if dropout > 0.0:
        return CoreChoice(
            fused,
            False,
            "attention dropout: flash attention draws its mask from torch's generator",
        )
    if torch.cuda.get_device_capability(device) >= (9, 0):
        return CoreChoice(
            (SDPBackend.CUDNN_ATTENTION, *fused),
            False,
            "half type on compute capability >= 9.0: cuDNN",
        )
    return CoreChoice(fused, False, "half type below compute capability 9.0: flash attention")


def attend(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Float[Tensor, "#batch 1 #seq seq"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "seq batch heads*head_dim"]:
    """Compute scaled dot-product attention.

    Equal to torch.nn.functional.scaled_dot_product_attention with key/value heads repeated for
    every query head.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        causal: Whether a position attends only to itself and to earlier positions; ignored if a
            mask is given.
        dropout: Probability that an attention weight is dropped; 0 outside training.
        mask: Tensor that is added to the scores; None means no mask.
        scale: Factor of the scores; None means ``head_dim ** -0.5``.
    """
    choice = choose_core(query.device, query.dtype, dropout, mask is not None)
    grouped = query.shape[2] != key.shape[2]
    if grouped and choice.expand_kv:
        repeats = query.shape[2] // key.shape[2]
        key = key.repeat_interleave(repeats, dim=2)
        value = value.repeat_interleave(repeats, dim=2)
        grouped = False
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context: AbstractContextManager[object] = nullcontext()
    if choice.backends:
        context = sdpa_kernel(list(choice.backends), set_priority=True)
    with context:
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
    return mixed.permute(2, 0, 1, 3).flatten(2)
