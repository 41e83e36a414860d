"""Cut of rows into windows, one for each group of the ranks that share the rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.layers.attention_span import AttentionSpan, borders_of
from lightning_megatron.layers.document_cut import DocumentCut, TokenOrder
from lightning_megatron.plan.context_groups import ContextGroups
from lightning_megatron.shapes import Int


def group_size(
    lengths: Int[Tensor, "batch documents"], seq_length: int, cp: int, host: HostValues
) -> int:
    """Return the smallest group size at which no document crosses groups (ranks).

    All ranks with the same rows compute the same number, without communication. The host waits for
    the device only if it does not know the lengths.

    Args:
        lengths: Lengths of the documents of each row. The rest of a row is one more document
            (tokens).
        seq_length: Length of the rows (tokens).
        cp: Number of ranks that share the rows (ranks).
        host: Host copies of values of tensors on the device.
    """
    borders = borders_of(host.read(lengths), seq_length)
    return ContextGroups.of(borders.tolist(), seq_length, cp).size


def in_groups(
    span: AttentionSpan, num_sequences: int, groups: ContextGroups, rank: int
) -> AttentionSpan:
    """Return the span of the window of a rank's group, with the cut of its documents.

    Every group cuts the documents of its window over the group's ranks. The borders of the result
    describe the window; positions and the order of tokens still describe whole rows.

    Args:
        span: Documents of the rows, laid out; none of them lies in two windows.
        num_sequences: Number of rows (sequences).
        groups: Cut of the rows into windows.
        rank: This rank's place among the ranks that share the rows.
    """
    assert span.borders is not None, "rows without documents have no windows"
    window = groups.window
    place = rank % groups.size
    firsts = torch.arange(0, groups.seq_length, window, device=span.borders.device)
    # A window becomes a row with all documents of the original row, most of which are empty.
    borders = _borders_of_windows(span.borders, num_sequences, groups.seq_length, firsts, window)
    num_windows = num_sequences * len(firsts)
    cuts = DocumentCut.of(borders, num_windows, window, groups.size, place)
    in_windows = cuts.order.unflatten(0, (num_sequences, -1))
    order = (in_windows + firsts[:, None, None]).flatten(1, 2)

    starts = firsts[rank // groups.size][None]
    borders = _borders_of_windows(span.borders, num_sequences, groups.seq_length, starts, window)
    longest = min(span.longest or window, window)
    cut = DocumentCut.of(borders, num_sequences, window, groups.size, place, longest=longest)
    held = TokenOrder(groups.cp, order, order.flatten(1).argsort(1))
    return replace(span, borders=borders, longest=longest, cut=cut, order=held)


def _borders_of_windows(
    borders: Tensor, num_sequences: int, seq_length: int, firsts: Tensor, window: int
) -> Tensor:
    """Return the cumulative lengths of the documents of consecutive windows."""
    ends = borders[1:].view(num_sequences, 1, -1)
    starts = torch.arange(num_sequences, device=borders.device)[:, None, None] * seq_length
    ends = (ends - starts - firsts[:, None]).clamp(0, window)
    before = torch.arange(ends.shape[0] * ends.shape[1], device=borders.device) * window
    ends = ends.flatten(0, 1) + before[:, None]
    return F.pad(ends.flatten(), (1, 0)).to(torch.int32)
