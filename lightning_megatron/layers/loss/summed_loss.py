"""Output head and sum of losses in chunks of tokens, with gradients in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collectives import BoundaryGradients, all_gather_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.linear.regions import dtype_of_products, start_summing
from lightning_megatron.layers.loss.chunked_head import ChunkedHead, LogitForm, new_slot, rows_of
from lightning_megatron.layers.loss.chunked_loss import chunked_cross_entropy
from lightning_megatron.layers.loss.cross_entropy import LossTerms, check_ids
from lightning_megatron.layers.parameters.gradient_slot import ScaledGradient, slot_of
from lightning_megatron.shapes import Float, Int


def summed_cross_entropy(
    hidden: Float[Tensor, "seq_local batch hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    labels: Int[Tensor, "seq batch"],
    mesh: ParallelMesh,
    vocab_size: int,
    chunk: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    form: LogitForm | None = None,
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
        return chunked_cross_entropy(
            hidden, weight, labels, mesh, vocab_size, chunk, label_smoothing, ignore_index, form
        ).sum()
    check_ids(labels, vocab_size, ignore_index)
    terms = LossTerms(mesh.tp, vocab_size, label_smoothing, ignore_index)
    head = ChunkedHead(terms, mesh, chunk, form or LogitForm(), slot_of(weight))
    # Inside the autograd function, grad mode is disabled.
    wants_gradients = torch.is_grad_enabled()
    return _SummedCrossEntropy.apply(hidden, weight, labels, head, wants_gradients)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        border: BoundaryGradients | None = ctx.head.border
        return border

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
        grad_hidden = _empty_gradient(full) if wants[0] else None
        slot = new_slot(weight) if wants[1] else None
        index, ignored = head.terms.index_of(labels.flatten(), len(weight))
        rows = rows_of(full).split(head.chunk)
        results = None if grad_hidden is None else rows_of(grad_hidden).split(head.chunk)
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
            if ctx.head.slot is not None:
                ctx.head.slot.add_computed(scaled)
            else:
                grad_weight = scaled.value().to(ctx.dtypes[1])
        return grad_hidden, grad_weight, None, None, None


def _empty_gradient(full: Tensor) -> Tensor:
    return torch.empty(full.shape, dtype=dtype_of_products(full), device=full.device)
