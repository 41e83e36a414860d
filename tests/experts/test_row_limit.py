"""Within a limit on their rows experts compute what they do if selections beyond it are dropped."""

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
HERE = ShardRange(1, 3)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def selections() -> torch.Tensor:
    """Choose two of four experts for each token; some choices are dropped."""
    experts = draw(NUM_TOKENS, 4).topk(TOP_K, -1).indices
    experts[draw(NUM_TOKENS, TOP_K) > 1.5] = -1
    return experts


def outcome(experts: torch.Tensor, limit: LayerRows | None) -> list[torch.Tensor]:
    """Square each row, and return the sums of tokens and all gradients."""
    hidden, probabilities = draw(NUM_TOKENS, SIZE), draw(NUM_TOKENS, TOP_K)
    leaves = hidden.requires_grad_(), probabilities.requires_grad_()
    dispatcher = LocalDispatcher(HERE, limit)
    sent = dispatcher.receive(dispatcher.send(dispatcher.prepare(*leaves, experts)))
    rows = sent.rows**2 * sent.probabilities.unsqueeze(1)
    # What lies past the last end must not count, whatever it is.
    past = torch.arange(rows.shape[0]) >= sent.ends[-1]
    rows = rows.masked_fill(past.unsqueeze(1), torch.nan)
    output = dispatcher.combine(dispatcher.send_back(rows, sent))
    output.backward(draw(*output.shape))
    gradients = [one.grad for one in leaves]
    return [output.detach(), *(one for one in gradients if one is not None)]


def test_selections_beyond_the_limit_count_as_dropped() -> None:
    experts = selections()
    needed = int(((experts >= HERE.start) & (experts < HERE.stop)).sum())
    limit = LayerRows(RowLimit(1.0, ParallelMesh.single()), 5, num_ranks=3)
    assert needed > 256
    with limit.limit.limit_rows():
        found = outcome(experts, limit)
        limit.limit.start_read()()
    assert limit.limit.was_too_small()
    with limit.limit.measure_rows() as measured:
        outcome(experts, limit)
    (need,) = measured.needs()
    assert need == RowNeed(layer=5, share=NUM_TOKENS * TOP_K // 3, rows=needed)
    whole = map_rows(experts, HERE.start, HERE.stop - HERE.start)
    dropped = experts.clone()
    dropped.view(-1)[whole.pairs[256:needed]] = -1
    for one, other in zip(found, outcome(dropped, None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("most", [0, 1, 128, 10_000])
def test_a_limited_map_is_the_start_of_the_whole_map(most: int) -> None:
    experts = selections()
    whole = map_rows(experts, 1, 2)
    limited = map_rows(experts, 1, 2, most)
    num_rows = min(most, whole.num_rows)
    assert torch.equal(limited.pairs, whole.pairs[:num_rows])
    assert torch.equal(limited.rows, whole.rows)
    assert torch.equal(limited.ends, whole.ends.clamp(max=num_rows))
    assert limited.ends.dtype == torch.int32
    assert torch.equal(limited.needed, whole.ends[-1:])
    assert torch.equal(whole.needed, whole.ends[-1:])


def test_the_limit_holds_inside_the_block_only() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    layer = LayerRows(limit, 0, num_ranks=1)
    experts = selections()[:64]
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
        # Of another shape: the limit on a share of 129 is 256 rows.
        ([(0, 128, 128), (1, 256, 129)], False),
        ([(0, 128, 128), (1, 257, 129), (0, 3, 128)], True),
        ([(1, 200, 129), (0, 129, 128)], True),
        ([], False),
    ],
)
def test_a_run_is_too_small_if_one_pass_needs_more_than_its_own_limit(
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


def test_the_largest_need_of_each_layer_and_shape_is_measured() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    layers = [LayerRows(limit, number, num_ranks=1) for number in (0, 1)]
    experts = selections()[:64]
    few, many = torch.full_like(experts, -1), torch.zeros_like(experts)
    with limit.measure_rows() as measured:
        for layer, chosen in ((0, many), (0, few), (1, few), (1, many[:32])):
            layers[layer].map(chosen, 0, 4)
    needs = measured.needs()
    found: dict[tuple[int, int], Any] = {(one.layer, one.share): one.rows for one in needs}
    assert found == {(0, 128): 128, (1, 128): 0, (1, 64): 64}
    layers[0].map(many, 0, 4)
    assert measured.needs() == needs


def test_another_factor_counts_in_rows_of_its_own_limit() -> None:
    limit = RowLimit(1.0, ParallelMesh.single())
    layer = torch.tensor([200], dtype=torch.int32)
    for factor, is_too_small in ((1.0, True), (1.2, False)):
        limit.grow(factor)
        with limit.limit_rows():
            limit.note(0, 128, layer)
            limit.start_read()()
        assert limit.was_too_small() == is_too_small
