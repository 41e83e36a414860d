"""Losses of labels under any language model, and whether labels are the most probable tokens."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.collectives import broadcast_
from lightning_megatron.layers.context_parallel.sequence_order import join_parts, length_multiple
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_argmax
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.lora import bare_model
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.side_calls import run_stage_by_stage
from lightning_megatron.models.token_module import IGNORED
from lightning_megatron.shapes import Bool, Float, Int
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM


class TokenScores(NamedTuple):
    """Losses and hits of given labels.

    Args:
        losses: Negative log-probability of each label, 0 for ignored labels (nats).
        hits: Whether each label has the largest logit; false for ignored labels.
    """

    losses: Float[Tensor, "batch seq"]
    hits: Bool[Tensor, "batch seq"]


def token_losses(
    model: nn.Module, tokens: Int[Tensor, "batch seq"], labels: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Return the loss of each label.

    Equal to the cross entropy of the full logits, in float32 (float64 for a float64 model). If the
    model is a ``GPT`` or a Hugging Face model that MegatronStrategy has replaced, its logits stay
    sharded over tp.

    Args:
        model: A ``GPT``, or a Hugging Face model, replaced or not.
        tokens: Token ids; rows may have any length.
        labels: Id of the token that follows each token, or -100 for positions without a loss.

    Raises:
        StageDone: On pipeline stages that do not compute the result.

    Communication: that of the model, communication of a few numbers per token over tp, and of the
        losses over cp.
    """
    gpt = _gpt_of(model)
    if gpt is None:
        return _losses_of(_logits_of(model, tokens), labels)
    return _losses_by(gpt, *_padded(gpt, tokens, labels))[:, : tokens.shape[1]]


def token_scores(
    model: nn.Module, tokens: Int[Tensor, "batch seq"], labels: Int[Tensor, "batch seq"]
) -> TokenScores:
    """Return the loss of each label, and whether the label is the most probable token.

    Arguments, errors and losses are the same as in :func:`token_losses`. Among equal logits, the
    logit of the lowest token id counts as the largest. A ``GPT`` computes its head a second time
    for the hits.

    Communication: that of :func:`token_losses`, two further numbers per token over tp, and a gather
        of the most probable tokens over cp; under sequence parallelism also an all-gather of the
        last hidden states.
    """
    gpt = _gpt_of(model)
    if gpt is None:
        logits = _logits_of(model, tokens)
        return TokenScores(_losses_of(logits, labels), logits.argmax(-1) == labels)
    length = tokens.shape[1]
    tokens, labels = _padded(gpt, tokens, labels)
    # The model appends the hidden states of all layers; only the output of the last norm is needed.
    last: Any = deque(maxlen=1)
    gpt.hidden_states = last
    try:
        losses = _losses_by(gpt, tokens, labels)
    finally:
        gpt.hidden_states = None
    # If the losses are a placeholder of another stage, the hits are a placeholder too.
    hits = losses > 0.0 if isinstance(losses, RemoteTensor) else _hits_of(gpt, last[0], labels)
    return TokenScores(losses[:, :length], hits[:, :length])


@torch.no_grad()
def row_scores(
    model: nn.Module, tokens: Int[Tensor, "batch seq"], labels: Int[Tensor, "batch seq"]
) -> list[tuple[float, bool]]:
    """Return each row's log-likelihood, and whether all its labels are the most probable tokens.

    Every rank of a replica returns the same values. The call is outside of steps, and all ranks
    make it together.

    Args:
        model: A ``GPT``, or a Hugging Face model that MegatronStrategy has replaced.
        tokens: Token ids, on the device of the model; rows may have any length.
        labels: Id of the token that follows each token, or -100 for positions that do not count.

    Communication: that of :func:`token_scores`, and a broadcast of the scores over pp.
    """
    gpt = _gpt_of(model)
    assert gpt is not None, "other models are not divided among ranks"
    mesh = gpt.mesh

    def summed() -> Tensor:
        losses, hits = token_scores(model, tokens, labels)
        is_best = (hits | (labels == IGNORED)).all(1)
        return torch.stack((-losses.double().sum(1), is_best.double()), 1)

    gpt.wait_for_parameters()
    scores = summed() if mesh.pp.size == 1 else run_stage_by_stage(gpt, summed)
    if scores is None:
        scores = torch.empty(len(tokens), 2, dtype=torch.float64, device=mesh.device)
    scores = broadcast_(scores, mesh.pp, mesh.layout.loss_stage)
    return [(score, bool(is_best)) for score, is_best in scores.tolist()]


def _gpt_of(model: nn.Module) -> GPT | None:
    """Return the GPT of a model; None if the model does not use layers of this package."""
    bare = bare_model(model)
    if isinstance(bare, HuggingFaceLM):
        return bare.gpt
    return bare if isinstance(bare, GPT) else None


def _padded(gpt: GPT, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to a length that cp and sequence parallelism can divide."""
    extra = -tokens.shape[1] % length_multiple(gpt.mesh)
    return F.pad(tokens, (0, extra)), F.pad(labels, (0, extra), value=IGNORED)


def _losses_by(gpt: GPT, tokens: Tensor, labels: Tensor) -> Tensor:
    output: Any = gpt(tokens, labels, ignore_index=IGNORED)
    # The GPT of a replaced model also returns its logits.
    losses: Tensor = output[0] if isinstance(output, tuple) else output
    return losses


@torch.no_grad()
def _hits_of(gpt: GPT, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return whether labels have the largest logit, from the output of the last norm."""
    best = vocab_parallel_argmax(gpt.logits(hidden), gpt.mesh, gpt.config.vocab_size)
    return join_parts(best, gpt.mesh.cp).t() == labels


def _logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output: Any = model(input_ids=tokens, use_cache=False)
    logits: Tensor = output.logits
    return logits


def _losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels.shape)
