"""Most probable token of logits whose vocabulary is sharded over the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.shapes import Float, Int


def vocab_parallel_argmax(
    logits_shard: Float[Tensor, "*tokens vocab_local"], mesh: ParallelMesh, vocab_size: int
) -> Int[Tensor, "*tokens"]:
    """Return the id of the largest logit of every token without gathering the logits.

    Equal to ``torch.argmax`` of the full logits without the padded columns. If several logits are
    the largest, the lowest id is returned, on every device and layout. If a logit is NaN, the
    result is ``vocab_size``, which is not an id.

    Args:
        logits_shard: This rank's columns of the logits.
        mesh: Process groups of this rank.
        vocab_size: Size of the vocabulary without padding (tokens).

    Communication: one max and one min all-reduce over tp, of one number per token.
    """
    width = logits_shard.shape[-1]
    start = mesh.tp.rank * width
    logits = logits_shard[..., : min(max(vocab_size - start, 0), width)]
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
