"""Output head and cross entropy in chunks of tokens, which never store the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collectives import BoundaryGradients, all_gather_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.linear.regions import start_summing
from lightning_megatron.layers.loss.chunked_head import ChunkedHead, LogitForm, new_slot, rows_of
from lightning_megatron.layers.loss.cross_entropy import LossTerms, RowStatistics, check_ids
from lightning_megatron.layers.parameters.gradient_slot import slot_of
from lightning_megatron.shapes import Float, Int


def chunked_cross_entropy(
    hidden: Float[Tensor, "seq_local batch hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    labels: Int[Tensor, "seq batch"],
    mesh: ParallelMesh,
    vocab_size: int,
    chunk: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    form: LogitForm | None = None,
) -> Float[Tensor, "seq batch"]:
    """Compute the loss of every token from hidden states, with the logits of one chunk at a time.

    Equal to ``vocab_parallel_cross_entropy(vocab_logits(hidden, weight), labels)``, gradients
    included. The forward pass keeps the hidden states of this rank and a few numbers per token. The
    backward pass recomputes the logits, which takes a third more work than a head with stored
    logits. It adds the weight gradient of each chunk to the float32 sum of the gradient slot. It
    defers nothing to a weight half, which would need the gradients of all logits.

    Args:
        vocab_size: The true vocabulary, without padding (tokens).
        chunk: Number of tokens whose logits exist at the same time (tokens).

    Communication: forward one max and one sum all-reduce over tp, of a few numbers per token;
        backward an all-reduce of the gradient of ``hidden``. Under sequence parallelism an
        all-gather of ``hidden`` forward and backward, and a reduce-scatter of its gradient.
    """
    check_ids(labels, vocab_size, ignore_index)
    terms = LossTerms(mesh.tp, vocab_size, label_smoothing, ignore_index)
    head = ChunkedHead(terms, mesh, chunk, form or LogitForm(), slot_of(weight))
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, head)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        border: BoundaryGradients | None = ctx.head.border
        return border

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead
    ) -> Tensor:
        terms = head.terms
        mesh = head.mesh
        full = all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else hidden
        index, ignored = terms.index_of(labels.flatten(), len(weight))
        parts = zip(rows_of(full).split(head.chunk), index.split(head.chunk), strict=True)
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
        slot = head.slot or new_slot(weight)
        pieces = [tensor.split(head.chunk) for tensor in (rows_of(full), index, normaliser, scale)]
        results = rows_of(grad_hidden).split(head.chunk)
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
        if needs_weight and head.slot is None:
            grad_weight = slot.gradient.to(weight.dtype)
        if not needs_hidden:
            return None, grad_weight, None, None
        grad_local, leaving = start_summing(grad_hidden, head.mesh)
        leaving.wait()
        return grad_local.to(hidden.dtype), grad_weight, None, None
