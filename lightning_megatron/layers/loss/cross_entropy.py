"""Cross entropy of logits whose vocabulary is sharded over the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import BoundaryGradients, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Bool, Float, Int


def vocab_parallel_cross_entropy(
    logits_shard: Float[Tensor, "*tokens vocab_local"],
    labels: Int[Tensor, "*tokens"],
    mesh: ParallelMesh,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    overwrite_logits: bool = False,
) -> Float[Tensor, "*tokens"]:
    """Compute the loss of every token without gathering the logits.

    Equal to torch.nn.functional.cross_entropy(..., reduction="none") of the full logits, without
    the padded columns. Label smoothing is spread over the full vocabulary. Logits of half types are
    computed in float32; the fused kernels make no float32 copy of them. The loss is float32, or
    float64 for float64 logits.

    Args:
        vocab_size: Size of the vocabulary without padding (tokens).
        overwrite_logits: Whether the backward pass may write the gradient into the memory of the
            logits, instead of a second tensor of their size. No other code may then read the
            logits, and the backward pass can run only once.

    Communication: forward one max and one sum all-reduce over tp, of a few numbers per token;
        backward none.
    Source: Shoeybi et al. 2019, section 3.
    """
    check_ids(labels, vocab_size, ignore_index)
    terms = LossTerms(mesh.tp, vocab_size, label_smoothing, ignore_index)
    kernels = fused_kernels(logits_shard)
    if kernels is not None:
        return _FusedCrossEntropy.apply(logits_shard, labels, terms, kernels, overwrite_logits)
    return _VocabParallelCrossEntropy.apply(logits_shard, labels, terms)


def check_ids(ids: Int[Tensor, "..."], vocab_size: int, ignore_index: int | None = None) -> None:
    """Raise an IndexError if a token id is not in the vocabulary, for tensors on the CPU.

    On other devices the check would make the host wait for the device.
    """
    if ids.device.type == "cpu":
        _check_ids(ids, vocab_size, ignore_index)


# The check is one operator, so that a recorded graph of operators checks the ids of every run.
@torch.library.custom_op(
    "lightning_megatron::check_ids",
    mutates_args=(),
    schema="(Tensor ids, int vocab_size, int? ignore_index) -> ()",
)
def _check_ids(ids: Tensor, vocab_size: int, ignore_index: int | None) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if outside.any():
        raise IndexError(
            f"token ids must lie in [0, {vocab_size}): an id is {int(ids[outside][0])}, for which "
            "the embedding has no row. Check that data and model use the same tokenizer."
        )


@_check_ids.register_fake
def _(ids: Tensor, vocab_size: int, ignore_index: int | None) -> None:
    return None


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def border(ctx: Any) -> BoundaryGradients | None:
        """Return the border of the tensor-parallel region: every rank has its own logits."""
        if ctx.terms.tp.size == 1:
            return None
        return BoundaryGradients((True, False), takes_parts=False)


class _VocabParallelCrossEntropy(_OverVocabulary):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
        tp = terms.tp
        smoothing = terms.smoothing
        width = logits.shape[-1]
        num_valid = terms.num_valid(width)
        wide = logits[..., :num_valid].to(torch.promote_types(logits.dtype, torch.float32))

        largest = wide.amax(-1) if num_valid else wide.new_full(labels.shape, -torch.inf)
        shifted = wide - all_reduce_(largest, tp, "max").unsqueeze(-1)
        index, ignored = terms.index_of(labels, width)
        here = index >= 0
        index = index.clamp(min=0)
        # One all-reduce for the three sums: logit of the label, normaliser, all logits (for
        # smoothing).
        target = torch.zeros_like(largest)
        if num_valid:
            target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        logit_sum = [shifted.sum(-1)] if smoothing else []
        exponents = shifted.exp_()
        sums = [target.masked_fill(~here, 0.0), exponents.sum(-1), *logit_sum]
        target, total, *rest = all_reduce_(torch.stack(sums), tp).unbind(0)

        loss = total.log() - (1.0 - smoothing) * target
        if smoothing:
            loss = loss - smoothing / terms.vocab_size * rest[0]
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), index, here, ignored)
        ctx.terms = terms
        ctx.width = width
        ctx.dtype = logits.dtype
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, here, ignored = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        scale = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        grad = softmax * scale
        if terms.smoothing:
            grad.sub_(scale * (terms.smoothing / terms.vocab_size))
        if softmax.shape[-1]:
            of_label = here.unsqueeze(-1) * scale * -(1.0 - terms.smoothing)
            grad.scatter_add_(-1, index.unsqueeze(-1), of_label)
        grad = grad.to(ctx.dtype)
        padding = ctx.width - grad.shape[-1]
        return (F.pad(grad, (0, padding)) if padding else grad), None, None


@dataclass(frozen=True)
class LossTerms:
    """Settings of the loss per token, over a vocabulary that is sharded over ``tp``.

    Args:
        vocab_size: The true vocabulary, without padding (tokens).
        smoothing: Probability spread evenly over the vocabulary.
    """

    tp: MeshAxis
    vocab_size: int
    smoothing: float
    ignore_index: int

    def num_valid(self, width: int) -> int:
        """Return how many of this rank's columns are not padding (columns)."""
        return min(max(self.vocab_size - self.tp.rank * width, 0), width)

    def index_of(
        self, labels: Int[Tensor, "*tokens"], width: int
    ) -> tuple[Int[Tensor, "*tokens"], Bool[Tensor, "*tokens"]]:
        """Return this rank's column of each label, and which labels are ignored.

        The column is -1 for ignored labels and for labels in columns of other ranks.
        """
        ignored = labels == self.ignore_index
        assert_on_device(ignored | ((labels >= 0) & (labels < self.vocab_size)))
        local = labels - self.tp.rank * width
        here = (local >= 0) & (local < self.num_valid(width)) & ~ignored
        return local.masked_fill(~here, -1), ignored

    def losses(
        self, rows: RowStatistics, ignored: Bool[Tensor, "*tokens"]
    ) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
        """Return the loss of each token, and the logarithm of the sum of its exponentiated logits.

        Communication: one max and one sum all-reduce over tp, of a few numbers per token.
        """
        peak, total, target, logit_sum = rows
        if self.tp.size > 1:
            # Each rank's sum of exponentials is relative to its own largest logit, so it is
            # rescaled first.
            largest = all_reduce_(peak.clone(), self.tp, "max")
            total = total * (peak - largest).exp()
            peak = largest
        smoothed = [logit_sum] if self.smoothing else []
        total, target, *rest = _sum_over(self.tp, total, target, *smoothed)
        log_total = total.log()
        loss = log_total - (1.0 - self.smoothing) * (target - peak)
        if self.smoothing:
            loss = loss - self.smoothing * (rest[0] / self.vocab_size - peak)
        return loss.masked_fill(ignored, 0.0), peak + log_total


class RowStatistics(NamedTuple):
    """Statistics of the logits of each token on one rank.

    Args:
        peak: The largest logit.
        total: Sum of the exponentials of logits relative to it.
        target: Logit of the label; 0 if another rank has it.
        logit_sum: Sum of all logits, for label smoothing only.
    """

    peak: Float[Tensor, "*tokens"]
    total: Float[Tensor, "*tokens"]
    target: Float[Tensor, "*tokens"]
    logit_sum: Float[Tensor, "*tokens"]


class _FusedCrossEntropy(_OverVocabulary):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        terms: LossTerms,
        kernels: ModuleType,
        overwrites: bool,
    ) -> Tensor:
        num_valid = terms.num_valid(logits.shape[-1])
        index, ignored = terms.index_of(labels, logits.shape[-1])
        rows = kernels.cross_entropy_statistics(logits, index, num_valid, terms.smoothing > 0.0)
        losses, normaliser = terms.losses(RowStatistics(*rows), ignored)
        ctx.save_for_backward(logits, index, normaliser, ignored)
        ctx.terms = terms
        ctx.kernels = kernels
        ctx.num_valid = num_valid
        ctx.overwrites = overwrites
        ctx.overwritten = False
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "the backward pass of a loss must run once: it ran a second time, after the first "
                "one overwrote the logits with their gradient. Compute the loss again before each "
                "backward pass."
            )
        logits, index, normaliser, ignored = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        scale = grads[0].float().masked_fill(ignored, 0.0)
        # The capture of a CUDA graph overwrites nothing; if it fails, an eager pass may follow.
        is_captured = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        ctx.overwritten = ctx.overwrites and not is_captured
        grad = ctx.kernels.cross_entropy_gradient(
            logits,
            index,
            normaliser,
            scale,
            ctx.num_valid,
            terms.smoothing,
            terms.vocab_size,
            ctx.overwrites,
        )
        return grad, None, None, None, None


def assert_on_device(legal: Bool[Tensor, "..."]) -> None:
    """Assert on the GPU that labels are legal, without a synchronisation.

    Labels on the CPU have been checked by ``check_ids``.
    """
    if legal.is_cuda:
        torch._assert_async(legal.all(), "labels must lie in the vocabulary or be the ignored one")


def _sum_over(tp: MeshAxis, *parts: Tensor) -> tuple[Tensor, ...]:
    return parts if tp.size == 1 else all_reduce_(torch.stack(parts), tp).unbind(0)


def vocab_parallel_argmax(
    logits_shard: Float[Tensor, "*tokens vocab_local"], mesh: ParallelMesh, vocab_size: int
) -> Int[Tensor, "*tokens"]:
    """Return the id of the largest logit of every token without gathering the logits.

    Equal to ``torch.argmax`` of the full logits without the padded columns. If several logits are
    the largest, the lowest id is returned, on every device and layout. If a logit is NaN, the
    result is ``vocab_size``, which is not an id.

    Communication: one max and one min all-reduce over tp, of one number per token.
    """
    start = mesh.tp.rank * logits_shard.shape[-1]
    # A slice ends with the last column.
    logits = logits_shard[..., : max(vocab_size - start, 0)]
    # All columns of a rank may be padding.
    has_any = logits.shape[-1] > 0
    peak = logits.amax(-1) if has_any else logits.new_full(logits.shape[:-1], -torch.inf)
    # A maximum with a NaN depends on the order, so ranks with a NaN set the result to -1 below.
    has_nan = peak.isnan()
    peak = all_reduce_(peak.masked_fill(has_nan, torch.inf), mesh.tp, "max")
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)
    best = ids.new_full(peak.shape, vocab_size)
    if has_any:
        best = torch.where(logits == peak.unsqueeze(-1), ids, vocab_size).amin(-1)
    best = all_reduce_(best.masked_fill(has_nan, -1), mesh.tp, "min")
    return best.masked_fill(best < 0, vocab_size)
