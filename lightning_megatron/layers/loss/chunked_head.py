"""Steps of the head and the cross entropy over one chunk of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import BoundaryGradients
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.loss.cross_entropy import LossTerms, RowStatistics
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class LogitForm:
    """Factor of the head's products, and bound c of the scaled products z: ``c tanh(z / c)``."""

    scale: float = 1.0
    soft_cap: float | None = None

    def applied(self, products: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the logits of some products, differentiably."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def applied_(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the logits of some products, in the same memory."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def slope(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."] | float:
        """Return the derivative of the logits by the products."""
        if self.soft_cap is None:
            return self.scale
        return (logits / self.soft_cap).square_().neg_().add_(1.0).mul_(self.scale)


@dataclass(frozen=True)
class ChunkedHead:
    """Head and loss that are computed a chunk of tokens at a time.

    Args:
        chunk: Number of tokens whose logits exist at the same time (tokens).
        slot: Gradient slot of the weight; None if autograd keeps its gradient.
    """

    terms: LossTerms
    mesh: ParallelMesh
    chunk: int
    form: LogitForm
    slot: GradientSlot | None

    @property
    def border(self) -> BoundaryGradients | None:
        """Return the border of the tensor-parallel region: the gradient of the input is summed."""
        if self.mesh.tp.size == 1:
            return None
        return BoundaryGradients((self.mesh.sequence_parallel, True, True), takes_parts=False)

    def statistics(
        self,
        logits: Float[Tensor, "rows vocab_local"],
        index: Int[Tensor, "rows"],
        *,
        overwrites: bool,
    ) -> RowStatistics:
        """Return the statistics of the logits of a chunk, after :class:`LogitForm`.

        Args:
            index: This rank's column of each label, or -1.
            overwrites: Whether the memory of the logits may be used.
        """
        kernels = fused_kernels(logits)
        num_valid = self.terms.num_valid(logits.shape[-1])
        with_sum = self.terms.smoothing > 0.0
        if kernels is not None:
            statistics = kernels.cross_entropy_statistics(logits, index, num_valid, with_sum)
            return RowStatistics(*statistics)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        wide = logits[:, :num_valid].to(dtype, copy=not overwrites)
        if not num_valid:
            none = wide.new_zeros(index.shape)
            return RowStatistics(none - torch.inf, none, none, none)
        peak = wide.amax(-1)
        chosen = wide.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        logit_sum = wide.sum(-1) if with_sum else torch.zeros_like(peak)
        # All exponentials are 0 in a row whose logits are all minus infinity.
        start = peak.masked_fill(peak == -torch.inf, 0.0)
        total = wide.sub_(start.unsqueeze(-1)).exp_().sum(-1)
        return RowStatistics(peak, total, chosen.masked_fill(index < 0, 0.0), logit_sum)

    def gradient_(
        self,
        logits: Float[Tensor, "rows vocab_local"],
        index: Int[Tensor, "rows"],
        normaliser: Float[Tensor, "rows"],
        scale: Float[Tensor, "rows"],
        *,
        kernels: ModuleType | None,
    ) -> Float[Tensor, "rows vocab_local"]:
        """Return the gradient of the products of a chunk, in the memory of its logits.

        Args:
            index: This rank's column of each label, or -1.
            normaliser: Logarithm of the sum of exponentials over all ranks.
            scale: Gradient of each loss; 0 for ignored labels.
        """
        slope = self.form.slope(logits)
        terms = self.terms
        num_valid = terms.num_valid(logits.shape[-1])
        if kernels is not None:
            grad = kernels.cross_entropy_gradient(
                logits, index, normaliser, scale, num_valid, terms.smoothing, terms.vocab_size, True
            )
        else:
            grad = _gradient_by_torch(logits, index, normaliser, scale, terms)
        return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def rows_of(full: Float[Tensor, "*tokens features"]) -> Float[Tensor, "rows features"]:
    """Return the tokens of hidden states as rows."""
    return full.reshape(-1, full.shape[-1])


def new_slot(weight: Float[Tensor, "vocab_local hidden"]) -> GradientSlot:
    """Return a new, empty gradient slot for a weight, with its sum in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return GradientSlot(torch.empty_like(weight, dtype=wide), lambda: None)


def _gradient_by_torch(
    logits: Tensor, index: Tensor, normaliser: Tensor, scale: Tensor, terms: LossTerms
) -> Tensor:
    num_valid = terms.num_valid(logits.shape[-1])
    valid = logits[:, :num_valid]
    factor = scale.unsqueeze(-1)
    # This is a view of the logits if they have the dtype of the statistics.
    wide = valid.to(normaliser.dtype).sub_(normaliser.unsqueeze(-1)).exp_()
    wide.sub_(terms.smoothing / terms.vocab_size).mul_(factor)
    if num_valid:
        label = factor * -(1.0 - terms.smoothing) * (index >= 0).unsqueeze(-1)
        wide.scatter_add_(-1, index.clamp(min=0).unsqueeze(-1), label)
    if wide.dtype != logits.dtype:
        valid.copy_(wide)
    logits[:, num_valid:].zero_()
    return logits
