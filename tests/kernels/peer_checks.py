"""Checks of kernels that put tokens into the memory of several ranks. All ranks are on one device,
and all numbers are integers, so that sums are exact.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_megatron.experts.transport.permute import sort_by_expert
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.plan.experts import TokenBuffer
from tests.kernels.checks import Draw

UNTOUCHED = 0xFF  # bytes of this value are NaN in every dtype


class Ranks:
    """Memory of several ranks, and the experts that their tokens choose."""

    def __init__(
        self, draw: Draw, num_ranks: int, num_tokens: int, num_experts: int, top_k: int, width: int
    ) -> None:
        self.draw, self.experts_per_rank = draw, num_experts // num_ranks
        sizes = {"num_ranks": num_ranks, "num_tokens": num_tokens, "width": width, "top_k": top_k}
        self.slots = TokenBuffer(**sizes, element=draw.dtype.itemsize, scale=4)
        # The memory of every rank is aligned like memory that GPUs share.
        padded = -(-self.slots.num_bytes // 64) * 64
        self.memory = torch.empty(num_ranks, padded, dtype=torch.uint8, device=draw.device)
        self.pointers = torch.tensor([part.data_ptr() for part in self.memory], device=draw.device)
        scores = torch.rand(
            self.slots.count, num_experts, generator=draw.generator, device=draw.device
        )
        # Where there are several ranks, no token chooses an expert of the last one.
        scores[:, -self.experts_per_rank :] -= 1.0
        self.experts = scores.topk(top_k, -1).indices
        self.experts[draw.integers(3, *self.experts.shape) == 0] = -1
        self.experts[0] = -1

    def clear(self) -> None:
        self.memory.fill_(UNTOUCHED)

    def draw_integers(self, *shape: int) -> Tensor:
        return (self.draw.integers(9, *shape) - 4).to(self.draw.dtype)

    def of_rank(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.unflatten(0, (self.slots.num_ranks, -1))[rank]

    def views(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = self.slots
        size = slots.count * slots.top_k
        starts = (0, slots.scales_at, slots.experts_at)
        sizes = (slots.count * slots.width * slots.element, size * slots.scale, size * 8)
        parts = [
            self.memory[rank, at : at + length] for at, length in zip(starts, sizes, strict=True)
        ]
        dtypes = (self.draw.dtype, torch.float32, torch.int64)
        views = [
            part.view(dtype).view(slots.count, -1)
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        return views[0], views[1], views[2]


def check_peer_rows(draw: Draw, cases: tuple[tuple[int, int, int, int, int], ...]) -> None:
    """Check that tokens arrive at their slots without a change of other memory, and that sums
    arrive at the ranks of the tokens.
    """
    for case in cases:
        ranks = Ranks(draw, *case)
        check_tokens(ranks, f"ranks, tokens, experts, choices, width {case}")
        check_sums(ranks, f"ranks, tokens, experts, choices, width {case}")
        check_sums(ranks, f"limited rows; ranks, tokens, experts, choices, width {case}", limit=0.5)


def check_tokens(ranks: Ranks, what: str) -> None:
    count, width, top_k = ranks.slots.count, ranks.slots.width, ranks.slots.top_k
    hidden, probabilities = (
        ranks.draw_integers(count, width),
        torch.rand(count, top_k, device=ranks.draw.device),
    )
    for has_choices in (True, False):
        ranks.clear()
        for rank in range(ranks.slots.num_ranks):
            tokens, scales, experts = (
                ranks.of_rank(tensor, rank) for tensor in (hidden, probabilities, ranks.experts)
            )
            kernels.put_tokens(
                tokens,
                scales if has_choices else None,
                experts,
                ranks.pointers,
                rank,
                ranks.experts_per_rank,
                ranks.slots,
            )
        for rank in range(ranks.slots.num_ranks):
            rows, scales, choices = ranks.views(rank)
            chosen = (ranks.experts >= 0) & (ranks.experts // ranks.experts_per_rank == rank)
            expected = hidden.masked_fill(~chosen.any(1, keepdim=True), torch.nan)
            assert torch.equal(rows.nan_to_num(99), expected.nan_to_num(99)), (
                f"{what}: rows on rank {rank}"
            )
            if has_choices:
                assert torch.equal(scales, probabilities), f"{what}: probabilities on rank {rank}"
                assert torch.equal(choices, ranks.experts), f"{what}: choices on rank {rank}"
            else:
                assert scales.isnan().all(), (
                    f"{what}: probabilities that nobody gave on rank {rank}"
                )


def check_sums(ranks: Ranks, what: str, limit: float = 1.0) -> None:
    """Check sums in which rows beyond a limit count as zero, even all rows of a token."""
    count, width, top_k = ranks.slots.count, ranks.slots.width, ranks.slots.top_k
    ranks.clear()
    total = torch.zeros(count, width, dtype=torch.float64, device=ranks.draw.device)
    gathered = torch.zeros(count * top_k, device=ranks.draw.device)
    for rank in range(ranks.slots.num_ranks):
        sort = partial(
            sort_by_expert, ranks.experts, rank * ranks.experts_per_rank, ranks.experts_per_rank
        )
        row_map = sort()
        if limit < 1.0:
            row_map = sort(int(limit * int(row_map.needed)))
        values, scales = (
            ranks.draw_integers(row_map.num_rows, width),
            torch.rand(row_map.num_rows, device=gathered.device),
        )
        end = int(row_map.ends[-1])
        values[end:], scales[end:] = torch.nan, torch.nan
        kernels.put_sums(
            values,
            scales,
            row_map.rows,
            row_map.ends,
            row_map.needed,
            ranks.pointers,
            rank,
            ranks.slots,
        )
        pairs = row_map.pairs[:end]
        total.index_add_(0, pairs // top_k, values[:end].double())
        gathered[pairs] = scales[:end]
    for rank in range(ranks.slots.num_ranks):
        rows, scales, _ = ranks.views(rank)
        sums, gathered_scales = kernels.add_buffer_rows(
            rows, scales, ranks.of_rank(ranks.experts, rank), ranks.experts_per_rank
        )
        assert torch.equal(sums.double(), ranks.of_rank(total, rank)), (
            f"{what}: sums on rank {rank}"
        )
        assert torch.equal(gathered_scales, ranks.of_rank(gathered.view(count, top_k), rank)), (
            f"{what}: scales on rank {rank}"
        )
        alone, nothing = kernels.add_buffer_rows(
            rows, None, ranks.of_rank(ranks.experts, rank), ranks.experts_per_rank
        )
        assert nothing is None, f"{what}: scales of nothing"
        assert torch.equal(alone, sums), f"{what}: sums without scales"
