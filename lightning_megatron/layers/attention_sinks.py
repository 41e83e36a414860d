"""Attention sinks: for each head one more key, with a learned score and the value 0.

The sinks are a part of attention in the sense of ``layers.attention_parts``, which describes how
parts are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.shapes import Float


def add_sinks(
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Merge the sinks into the result of all other parts.

    Args:
        out: Merged output of all other parts.
        lse: Merged log-sum-exps of all other parts.
        sinks: Score of each head's sink.
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * (lse - merged).exp().permute(2, 0, 1)[..., None]).to(out.dtype), merged


def gradient_of_sinks(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> Float[Tensor, " heads"]:
    """Compute the gradient of the sinks' scores.

    Args:
        grad_out: Gradient of the merged output.
        out: Merged output of all parts.
        lse: Merged log-sum-exps of all parts.
        sinks: Score of each head's sink.
    """
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)
    shares = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(shares * delta).sum((0, 2)).to(sinks.dtype)
