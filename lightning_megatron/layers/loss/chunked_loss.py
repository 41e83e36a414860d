"""Output head and cross entropy in chunks of tokens, which never store all logits.

Losses of tokens recompute the logits in the backward pass; a sum of losses computes its gradients
in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collectives import BoundaryGradients, all_gather_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.linear.regions import as_rows, dtype_of_products, start_summing
from lightning_megatron.layers.loss.cross_entropy import LossTerms, RowStatistics, check_ids
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    ScaledGradient,
    slot_of,
)
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
    """

    terms: LossTerms
    mesh: ParallelMesh
    chunk: int
    form: LogitForm = LogitForm()

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


def _new_slot(weight: Tensor) -> GradientSlot:
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


def chunked_cross_entropy(
    hidden: Float[Tensor, "seq_local batch hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    labels: Int[Tensor, "seq batch"],
    head: ChunkedHead,
) -> Float[Tensor, "seq batch"]:
    """Compute the loss of every token from hidden states, with the logits of one chunk at a time.

    Equal to ``vocab_parallel_cross_entropy(vocab_logits(hidden, weight), labels)``, gradients
    included. The forward pass keeps the hidden states of this rank and a few numbers per token. The
    backward pass recomputes the logits, which takes a third more work than a head with stored
    logits. It adds the weight gradient of each chunk to the float32 sum of the gradient slot. It
    defers nothing to a weight half, which would need the gradients of all logits.

    Communication: forward one max and one sum all-reduce over tp, of a few numbers per token;
        backward an all-reduce of the gradient of ``hidden``. Under sequence parallelism an
        all-gather of ``hidden`` forward and backward, and a reduce-scatter of its gradient.
    """
    check_ids(labels, head.terms.vocab_size, head.terms.ignore_index)
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, head)


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        """Return the border of the tensor-parallel region: the gradient of the input is summed."""
        mesh = ctx.head.mesh
        if mesh.tp.size == 1:
            return None
        return BoundaryGradients((mesh.sequence_parallel, True, True), takes_parts=False)


class _ChunkedCrossEntropy(_OverChunks):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead
    ) -> Tensor:
        terms = head.terms
        mesh = head.mesh
        full = all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else hidden
        index, ignored = terms.index_of(labels.flatten(), len(weight))
        parts = zip(as_rows(full).split(head.chunk), index.split(head.chunk), strict=True)
        statistics = []
        for part, labels_index in parts:
            logits = head.form.applied_(F.linear(part, weight))
            ctx.kernels = fused_kernels(logits)
            ctx.dtype = logits.dtype
            statistics.append(head.statistics(logits, labels_index, overwrites=True))
            # The next chunk reuses this memory.
            del logits
        rows = RowStatistics(*(torch.cat(tensors) for tensors in zip(*statistics, strict=True)))
        losses, normaliser = terms.losses(rows, ignored)
        ctx.save_for_backward(hidden, weight, index, normaliser, ignored)
        ctx.head = head
        ctx.slot = slot_of(weight)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, index, normaliser, ignored = ctx.saved_tensors
        head: ChunkedHead = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scale = grads[0].flatten().to(normaliser.dtype).masked_fill(ignored, 0.0)
        full = all_gather_sequence(hidden, head.mesh.tp) if head.mesh.sequence_parallel else hidden
        narrow = weight.to(ctx.dtype)
        grad_hidden = torch.empty(full.shape, dtype=ctx.dtype, device=full.device)
        slot = ctx.slot or _new_slot(weight)
        pieces = [tensor.split(head.chunk) for tensor in (as_rows(full), index, normaliser, scale)]
        results = as_rows(grad_hidden).split(head.chunk)
        for number, (rows, *numbers) in enumerate(zip(*pieces, strict=True)):
            part = rows.to(ctx.dtype)
            logits = head.form.applied_(F.linear(part, narrow))
            grad = head.gradient_(logits, *numbers, kernels=ctx.kernels)
            if needs_hidden:
                torch.mm(grad, narrow, out=results[number])
            if needs_weight:
                # Only the last chunk notifies the owner of the slot, once for the whole gradient.
                is_last = number == len(results) - 1
                (slot if is_last else slot.first_part()).add_product(grad, part)
            # The next chunk reuses this memory.
            del logits, grad, part
        grad_weight = None
        if needs_weight and ctx.slot is None:
            grad_weight = slot.gradient.to(weight.dtype)
        if not needs_hidden:
            return None, grad_weight, None, None
        grad_local, leaving = start_summing(grad_hidden, head.mesh)
        leaving.wait()
        return grad_local.to(hidden.dtype), grad_weight, None, None


def summed_cross_entropy(
    hidden: Float[Tensor, "seq_local batch hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    labels: Int[Tensor, "seq batch"],
    head: ChunkedHead,
) -> Float[Tensor, ""]:
    """Compute the sum of the losses of all tokens, with the logits of one chunk at a time.

    Equal to ``chunked_cross_entropy(...).sum()``, gradients included, with three matrix products
    instead of four: the forward pass computes the gradients of the sum while it has the logits, and
    the backward pass multiplies them by the gradient of the sum, one number that is the gradient of
    all losses. Between both passes this function keeps the weight gradient in float32, and the
    gradient of ``hidden`` in place of ``hidden``.

    In float16 this function calls ``chunked_cross_entropy(...).sum()``, because small gradients
    would be zero without the loss scale.

    Communication: forward one max and one sum all-reduce over tp for each chunk, of a few numbers
        per token, and an all-reduce of the gradient of ``hidden``. Under sequence parallelism an
        all-gather of ``hidden`` and a reduce-scatter of its gradient. Backward none.
    """
    if dtype_of_products(hidden) == torch.float16:
        return chunked_cross_entropy(hidden, weight, labels, head).sum()
    check_ids(labels, head.terms.vocab_size, head.terms.ignore_index)
    # Inside the autograd function, grad mode is disabled.
    wants_gradients = torch.is_grad_enabled()
    return _SummedCrossEntropy.apply(hidden, weight, labels, head, wants_gradients)


class _SummedCrossEntropy(_OverChunks):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        head: ChunkedHead,
        wants_gradients: bool,
    ) -> Tensor:
        mesh = head.mesh
        wants = [wants_gradients and needed for needed in ctx.needs_input_grad[:2]]
        full = all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else hidden
        grad_hidden = None
        if wants[0]:
            grad_hidden = torch.empty(full.shape, dtype=dtype_of_products(full), device=full.device)
        slot = _new_slot(weight) if wants[1] else None
        index, ignored = head.terms.index_of(labels.flatten(), len(weight))
        rows = as_rows(full).split(head.chunk)
        results = None if grad_hidden is None else as_rows(grad_hidden).split(head.chunk)
        sums = []
        pieces = zip(rows, index.split(head.chunk), ignored.split(head.chunk), strict=True)
        for number, (part, targets, skipped) in enumerate(pieces):
            logits = head.form.applied_(F.linear(part, weight))
            statistics = head.statistics(logits, targets, overwrites=not any(wants))
            losses, normaliser = head.terms.losses(statistics, skipped)
            sums.append(losses.sum())
            if any(wants):
                unit = (~skipped).to(normaliser.dtype)
                kernels = fused_kernels(logits)
                grad = head.gradient_(logits, targets, normaliser, unit, kernels=kernels)
                if results is not None:
                    torch.mm(grad, weight.to(grad.dtype), out=results[number])
                if slot is not None:
                    slot.add_product(grad, part.to(grad.dtype))
                del grad
            # The next chunk reuses this memory.
            del logits
        kept = None
        if grad_hidden is not None:
            kept, leaving = start_summing(grad_hidden, mesh)
            leaving.wait()
        ctx.save_for_backward(kept, None if slot is None else slot.gradient)
        ctx.head = head
        ctx.slot = slot_of(weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit_hidden, unit_weight = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if unit_hidden is not None:
            # A factor with one dimension takes part in type promotion, so it is not rounded to the
            # dtype of the gradient.
            grad_hidden = torch.empty_like(unit_hidden, dtype=ctx.dtypes[0])
            torch.mul(unit_hidden, grads[0].reshape(1), out=grad_hidden)
        if unit_weight is not None:
            scaled = ScaledGradient(unit_weight, grads[0].to(unit_weight.dtype))
            if ctx.slot is not None:
                ctx.slot.add_computed(scaled)
            else:
                grad_weight = scaled.value().to(ctx.dtypes[1])
        return grad_hidden, grad_weight, None, None, None
