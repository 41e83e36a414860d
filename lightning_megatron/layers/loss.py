"""Cross entropy of logits that are cut over the tensor axis by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    labels: Tensor,
    mesh: ParallelMesh,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Compute the loss of every token without ever gathering the logits.

    Equal to torch.nn.functional.cross_entropy(..., reduction="none") on the full logits of the true vocabulary, label
    smoothing included: it spreads over the global vocabulary, and padded columns take no part. Half logits are computed
    in float32. The input is not modified.

    Shapes: logits_shard ``(..., padded V/tp)``; labels ``(...)``; loss ``(...)``, float32 (float64 for float64 logits).

    Args:
        logits_shard: This rank's columns of the logits.
        labels: Token ids.
        mesh: The groups of this rank.
        vocab_size: The true vocabulary, without padding (tokens).
        label_smoothing: Probability spread evenly over the vocabulary.
        ignore_index: Label whose loss and gradient are zero.

    Raises:
        IndexError: If a label is neither in the vocabulary nor ``ignore_index`` (on CPU; a CUDA kernel asserts).

    Communication: one max and one sum all-reduce over tp of a few numbers a token, forward; none backward.
    Source: Shoeybi et al. 2019, section 3.
    """
    check_ids(labels, vocab_size, ignore_index)
    return _VocabParallelCrossEntropy.apply(logits_shard, labels, mesh.tp, vocab_size, label_smoothing, ignore_index)


def check_ids(ids: Tensor, vocab_size: int, ignore_index: int | None = None) -> None:
    """Refuse token ids outside the vocabulary, on CPU; elsewhere reading them would wait for the device.

    Raises:
        IndexError: If an id is out of range.
    """
    if ids.device.type != "cpu":
        return
    outside = _outside(ids, vocab_size, ignore_index)
    if outside.any():
        raise IndexError(
            f"token ids must lie in [0, {vocab_size}): found {int(ids[outside][0])}. The vocabulary has no such row. "
            "Check that the tokenizer of the data is the one of the model."
        )


def _outside(ids: Tensor, vocab_size: int, ignore_index: int | None) -> Tensor:
    outside = (ids < 0) | (ids >= vocab_size)
    return outside if ignore_index is None else outside & (ids != ignore_index)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: MeshAxis, vocab_size: int, smoothing: float, ignore_index: int
    ) -> Tensor:
        width = logits.shape[-1]
        start = tp.rank * width
        num_valid = min(max(vocab_size - start, 0), width)
        wide = logits[..., :num_valid].to(torch.promote_types(logits.dtype, torch.float32))

        largest = wide.amax(-1) if num_valid else wide.new_full(labels.shape, -torch.inf)
        shifted = wide - all_reduce_(largest, tp, "max").unsqueeze(-1)
        ignored = labels == ignore_index
        index, here = _local_index(labels, ignored, vocab_size, start, num_valid)
        # One message for the three sums: logit of the label, normaliser, all logits (for smoothing).
        target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1) if num_valid else torch.zeros_like(largest)
        logit_sum = [shifted.sum(-1)] if smoothing else []
        exponents = shifted.exp_()
        sums = [target.masked_fill(~here, 0.0), exponents.sum(-1), *logit_sum]
        target, total, *rest = all_reduce_(torch.stack(sums), tp).unbind(0)

        loss = total.log() - (1.0 - smoothing) * target
        if smoothing:
            loss = loss - smoothing / vocab_size * rest[0]
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), index, here, ignored)
        ctx.smoothing, ctx.vocab_size, ctx.width, ctx.dtype = smoothing, vocab_size, width, logits.dtype
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, here, ignored = ctx.saved_tensors
        scale = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        grad = softmax * scale
        if ctx.smoothing:
            grad.sub_(scale * (ctx.smoothing / ctx.vocab_size))
        if softmax.shape[-1]:
            grad.scatter_add_(-1, index.unsqueeze(-1), here.unsqueeze(-1) * scale * -(1.0 - ctx.smoothing))
        grad = grad.to(ctx.dtype)
        padding = ctx.width - grad.shape[-1]
        return (torch.nn.functional.pad(grad, (0, padding)) if padding else grad), None, None, None, None, None


def _local_index(labels: Tensor, ignored: Tensor, vocab_size: int, start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label on this rank (0 where it is elsewhere) and whether it is here."""
    local = labels - start
    here = (local >= 0) & (local < num_valid) & ~ignored
    index = local.masked_fill(~here, 0)
    # An illegal id stays illegal, so that the CUDA kernel that reads it asserts instead of giving a wrong loss.
    return index.masked_fill(((labels < 0) | (labels >= vocab_size)) & ~ignored, num_valid), here
