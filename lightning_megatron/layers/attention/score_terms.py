"""Terms of attention scores beside the products: ALiBi, and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.shapes import Float


@dataclass(frozen=True)
class AlibiSlopes:
    """ALiBi slopes of the heads of a layer.

    The score of a query and a key decreases by the slope of the head for each token of distance
    between them. If ``num_heads`` is a power of two, head ``i`` of 1 to ``num_heads`` has the slope
    ``2 ** (-i bias_max / num_heads)``. Otherwise the first heads, up to the largest power of two P,
    have the slopes of P heads, and the others have the slopes of the odd ``i`` of 2 P heads.

    Equal to the slopes of Hugging Face's BLOOM (with a ``bias_max`` of 8) and MPT.

    Args:
        num_heads: Query heads of the full layer (heads).
        skips_padding: Whether distances count only tokens that the mask of keys shows.
        heads: Indices of this rank's heads; None means all.

    Source: Press et al. 2022 (ALiBi), section 3.
    """

    num_heads: int
    bias_max: float = 8.0
    skips_padding: bool = False
    heads: range | None = None

    def of(self, heads: range) -> AlibiSlopes:
        """Return the slopes of a range of these heads, counted from the first of them."""
        available = range(self.num_heads) if self.heads is None else self.heads
        return replace(self, heads=available[heads.start : heads.stop])

    def on(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return the slopes on a device, in float64.

        The device computes the slopes, so that a CUDA graph can capture the call.
        """
        numbers = range(self.num_heads) if self.heads is None else self.heads
        heads = torch.arange(numbers.start, numbers.stop, dtype=torch.float64, device=device)
        power = 1 << (self.num_heads.bit_length() - 1)
        further = (heads - power) + 0.5
        steps = torch.where(heads < power, heads + 1, further) / power
        return torch.exp2(-self.bias_max * steps)


def add_sinks(
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Merge the score of each head's sink into the merged result of all other parts."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * (lse - merged).exp().permute(2, 0, 1)[..., None]).to(out.dtype), merged


def gradient_of_sinks(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> Float[Tensor, " heads"]:
    """Compute the gradient of the sinks' scores."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)
    shares = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(shares * delta).sum((0, 2)).to(sinks.dtype)
