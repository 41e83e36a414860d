"""Experts with a limit on their rows equal experts whose selections beyond the limit are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.experts.transport.dispatchers import LocalDispatcher
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit, RowNeed
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.shards import ShardRange

NUM_TOKENS, TOP_K, SIZE = 300, 2, 3
LOCAL_EXPERTS = ShardRange(1, 3)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_selections() -> torch.Tensor:
    """Choose two of four experts for each token; some choices are dropped."""
    experts = draw(NUM_TOKENS, 4).topk(TOP_K, -1).indices
    experts[draw(NUM_TOKENS, TOP_K) > 1.5] = -1
    return experts


def output_and_gradients(experts: torch.Tensor, limit: LayerRows | None) -> list[torch.Tensor]:
    """Square each row, and return the sums of tokens and all gradients."""
    hidden, probabilities = draw(NUM_TOKENS, SIZE), draw(NUM_TOKENS, TOP_K)
    leaves = hidden.requires_grad_(), probabilities.requires_grad_()
    dispatcher = LocalDispatcher(LOCAL_EXPERTS, limit)
    received = dispatcher.receive(dispatcher.send(dispatcher.prepare(*leaves, experts)))
    rows = received.rows**2 * received.probabilities.unsqueeze(1)
    # Rows past the last end must not count, even if they are NaN.
    is_past_end = torch.arange(rows.shape[0]) >= received.ends[-1]
    rows = rows.masked_fill(is_past_end.unsqueeze(1), torch.nan)
    output = dispatcher.combine(dispatcher.send_back(rows, received))
    output.backward(draw(*output.shape))
    gradients = [leaf.grad for leaf in leaves]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_selections_beyond_the_limit_are_dropped() -> None:
    experts = draw_selections()
    needed = int(((experts >= LOCAL_EXPERTS.start) & (experts < LOCAL_EXPERTS.stop)).sum())
    limit = LayerRows(RowLimit(1.0, ParallelMesh.single()), 5, num_ranks=3)
    assert needed > 256
    with limit.limit.limit_rows():
        actual_results = output_and_gradients(experts, limit)
        limit.limit.start_read()()
    assert limit.limit.was_too_small()
    with limit.limit.measure_rows() as measured:
        output_and_gradients(experts, limit)
    (need,) = measured.needs()
    assert need == RowNeed(layer=5, share=NUM_TOKENS * TOP_K // 3, rows=needed)
    full_map = map_rows(experts, LOCAL_EXPERTS.start, LOCAL_EXPERTS.stop - LOCAL_EXPERTS.start)
    dropped = experts.clone()
    dropped.view(-1)[full_map.pairs[256:needed]] = -1
    for actual, expected in zip(actual_results, output_and_gradients(dropped, None), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("max_rows", [0, 1, 128, 10_000])
def test_a_limited_map_is_the_start_of_the_full_map(max_rows: int) -> None:
    experts = draw_selections()
    full_map = map_rows(experts, 1, 2)
    limited = map_rows(experts, 1, 2, max_rows)
    num_rows = min(max_rows, full_map.num_rows)
    assert torch.equal(limited.pairs, full_map.pairs[:num_rows])
    assert torch.equal(limited.rows, full_map.rows)
    assert torch.equal(limited.ends, full_map.ends.clamp(max=num_rows))
    assert limited.ends.dtype == torch.int32
    assert torch.equal(limited.needed, full_map.ends[-1:])
    assert torch.equal(full_map.needed, full_map.ends[-1:])


def test_the_limit_applies_only_inside_its_block() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    layer = LayerRows(limit, 0, num_ranks=1)
    experts = draw_selections()[:64]
    assert limit.rows_for(64) is None
    with limit.limit_rows():
        assert limit.rows_for(64) == 128
        assert layer.map(experts, 0, 4).num_rows == 128
    assert layer.map(torch.zeros(100, 2, dtype=torch.int64), 0, 4).num_rows == 200


@pytest.mark.parametrize(
    ("numbers", "is_too_small"),
    [
        ([(0, 129, 128)], True),
        ([(0, 128, 128), (1, 0, 128)], False),
        # The share of 129 has another limit, of 256 rows.
        ([(0, 128, 128), (1, 256, 129)], False),
        ([(0, 128, 128), (1, 257, 129), (0, 3, 128)], True),
        ([(1, 200, 129), (0, 129, 128)], True),
        ([], False),
    ],
)
def test_the_limit_of_a_run_is_too_small_if_one_pass_needs_more_rows(
    numbers: list[tuple[int, int, int]], is_too_small: bool
) -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    for _ in range(2):
        with limit.limit_rows():
            for layer, needed, share in numbers:
                limit.note(layer, share, torch.tensor([needed], dtype=torch.int32))
            limit.start_read()()
        assert limit.was_too_small() == is_too_small
        with limit.limit_rows():
            limit.start_read()()
        assert not limit.was_too_small()


def test_measure_rows_finds_the_largest_need_of_each_layer_and_share() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    layers = [LayerRows(limit, number, num_ranks=1) for number in (0, 1)]
    experts = draw_selections()[:64]
    no_selections, all_selections = torch.full_like(experts, -1), torch.zeros_like(experts)
    with limit.measure_rows() as measured:
        for layer, chosen in (
            (0, all_selections),
            (0, no_selections),
            (1, no_selections),
            (1, all_selections[:32]),
        ):
            layers[layer].map(chosen, 0, 4)
    needs = measured.needs()
    rows: dict[tuple[int, int], Any] = {(need.layer, need.share): need.rows for need in needs}
    assert rows == {(0, 128): 128, (1, 128): 0, (1, 64): 64}
    layers[0].map(all_selections, 0, 4)
    assert measured.needs() == needs


def test_a_larger_factor_raises_the_limit() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    needed = torch.tensor([200], dtype=torch.int32)
    for factor, is_too_small in ((1.0, True), (1.2, False)):
        limit.grow(factor)
        with limit.limit_rows():
            limit.note(0, 128, needed)
            limit.start_read()()
        assert limit.was_too_small() == is_too_small
