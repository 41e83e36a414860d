"""Output head and cross entropy in chunks of tokens, which never store the logits."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collectives import Border, all_gather_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.gradient_slot import GradientSlot, slot_of
from lightning_megatron.layers.loss import LossTerms, RowStatistics, check_ids
from lightning_megatron.layers.regions import start_summing
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class LogitForm:
    """What a model makes of the products of hidden states and head before their loss.

    Args:
        scale: Factor of the products.
        soft_cap: Bound c of the scaled products z, which become ``c tanh(z / c)``; None means no
            bound.
    """

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
    backward pass computes the logits again, a third more work than that of the head with stored
    logits. It adds the weight gradient of each chunk to the float32 sum of the gradient slot. It
    leaves none of it to a weight half, which would need the gradient of all logits.

    Args:
        hidden: Output of the last norm.
        weight: This rank's rows of the head.
        labels: Token ids.
        mesh: Process groups of this rank.
        vocab_size: The true vocabulary, without padding (tokens).
        chunk: Tokens whose logits exist at once (tokens).
        label_smoothing: Probability spread evenly over the vocabulary.
        ignore_index: Label whose loss and gradient are zero.
        form: Scale and bound of the logits; None means none.

    Returns:
        Losses in float32, or float64 for float64 logits.

    Raises:
        IndexError: If a label is neither in the vocabulary nor ``ignore_index`` (on CPU; a CUDA
            kernel asserts).

    Communication: forward one max and one sum all-reduce over tp, of a few numbers per token;
        backward an all-reduce of the gradient of ``hidden``. Under sequence parallelism an
        all-gather of ``hidden`` forward and backward, and a reduce-scatter of its gradient.
    """
    check_ids(labels, vocab_size, ignore_index)
    terms = LossTerms(mesh.tp, vocab_size, label_smoothing, ignore_index)
    head = _Head(terms, mesh, chunk, form or LogitForm(), slot_of(weight))
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, head)


@dataclass(frozen=True)
class _Head:
    terms: LossTerms
    mesh: ParallelMesh
    chunk: int
    form: LogitForm
    slot: GradientSlot | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def border(ctx: Any) -> Border | None:
        """Return the border of the tensor-parallel region: the gradient of the input is summed."""
        mesh = ctx.head.mesh
        if mesh.tp.size == 1:
            return None
        return Border((mesh.sequence_parallel, True, True), takes_parts=False)

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: _Head) -> Tensor:
        terms = head.terms
        mesh = head.mesh
        full = all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else hidden
        index, ignored = terms.index_of(labels.flatten(), len(weight))
        parts = zip(_rows(full).split(head.chunk), index.split(head.chunk), strict=True)
        ctx.kernels = None
        found = [_statistics(ctx, part, weight, own, head) for part, own in parts]
        rows = RowStatistics(*(torch.cat(one) for one in zip(*found, strict=True)))
        losses, normaliser = terms.losses(rows, ignored)
        ctx.save_for_backward(hidden, weight, index, normaliser, ignored)
        ctx.head = head
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, index, normaliser, ignored = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scale = grads[0].flatten().to(normaliser.dtype).masked_fill(ignored, 0.0)
        full = all_gather_sequence(hidden, head.mesh.tp) if head.mesh.sequence_parallel else hidden
        narrow = weight.to(ctx.dtype)
        grad_hidden = torch.empty(full.shape, dtype=ctx.dtype, device=full.device)
        slot = head.slot or _own_slot(weight)
        pieces = [one.split(head.chunk) for one in (_rows(full), index, normaliser, scale)]
        results = _rows(grad_hidden).split(head.chunk)
        for number, (rows, *numbers) in enumerate(zip(*pieces, strict=True)):
            part = rows.to(ctx.dtype)
            grad = _gradient(head, ctx.kernels, F.linear(part, narrow), *numbers)
            if needs_hidden:
                torch.mm(grad, narrow, out=results[number])
            if needs_weight:
                # The owner of the slot is told of the whole gradient once.
                is_last = number == len(results) - 1
                (slot if is_last else slot.first_part()).add_product(grad, part)
            # The next chunk uses this memory.
            del grad, part
        grad_weight = None
        if needs_weight and head.slot is None:
            grad_weight = slot.gradient.to(weight.dtype)
        if not needs_hidden:
            return None, grad_weight, None, None
        own, leaving = start_summing(grad_hidden, head.mesh)
        leaving.wait()
        return own.to(hidden.dtype), grad_weight, None, None


def _rows(full: Tensor) -> Tensor:
    return full.reshape(-1, full.shape[-1])


def _own_slot(weight: Tensor) -> GradientSlot:
    """Return a slot whose sum autograd gets."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return GradientSlot(torch.empty_like(weight, dtype=wide), lambda: None)


def _statistics(ctx: Any, part: Tensor, weight: Tensor, index: Tensor, head: _Head) -> Any:
    """Return the statistics of a chunk, and remember its kernels and the type of its logits."""
    logits = head.form.applied_(F.linear(part, weight))
    ctx.kernels = fused_kernels(logits)
    ctx.dtype = logits.dtype
    num_valid = head.terms.num_valid(len(weight))
    with_sum = head.terms.smoothing > 0.0
    if ctx.kernels is not None:
        return ctx.kernels.cross_entropy_statistics(logits, index, num_valid, with_sum)
    wide = logits[:, :num_valid].to(torch.promote_types(logits.dtype, torch.float32))
    if not num_valid:
        none = wide.new_zeros(index.shape)
        return none - torch.inf, none, none, none
    peak = wide.amax(-1)
    found = wide.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    logit_sum = wide.sum(-1) if with_sum else torch.zeros_like(peak)
    # Of a row without any possible token, all exponentials are 0.
    start = peak.masked_fill(peak == -torch.inf, 0.0)
    total = wide.sub_(start.unsqueeze(-1)).exp_().sum(-1)
    return peak, total, found.masked_fill(index < 0, 0.0), logit_sum


def _gradient(
    head: _Head,
    kernels: ModuleType | None,
    products: Tensor,
    index: Tensor,
    normaliser: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return the gradient of a chunk's products, in their memory where that is possible."""
    logits = head.form.applied_(products)
    slope = head.form.slope(logits)
    terms = head.terms
    num_valid = terms.num_valid(logits.shape[-1])
    if kernels is not None:
        sizes = num_valid, terms.smoothing, terms.vocab_size
        grad = kernels.cross_entropy_gradient(logits, index, normaliser, scale, *sizes, True)
    else:
        grad = _gradient_by_torch(logits, index, normaliser, scale, terms)
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def _gradient_by_torch(
    logits: Tensor, index: Tensor, normaliser: Tensor, scale: Tensor, terms: LossTerms
) -> Tensor:
    num_valid = terms.num_valid(logits.shape[-1])
    valid = logits[:, :num_valid]
    factor = scale.unsqueeze(-1)
    # A view of the logits if they have the type of the statistics.
    wide = valid.to(normaliser.dtype).sub_(normaliser.unsqueeze(-1)).exp_()
    wide.sub_(terms.smoothing / terms.vocab_size).mul_(factor)
    if num_valid:
        label = factor * -(1.0 - terms.smoothing) * (index >= 0).unsqueeze(-1)
        wide.scatter_add_(-1, index.clamp(min=0).unsqueeze(-1), label)
    if wide.dtype != logits.dtype:
        valid.copy_(wide)
    logits[:, num_valid:].zero_()
    return logits
