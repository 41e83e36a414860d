"""Within a limit on their rows experts compute what they do if selections beyond it are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.experts.transport.dispatchers import LocalDispatcher
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit, RowNeed
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
    limit = LayerRows(RowLimit(1.0), 5, num_ranks=3)
    assert needed > 256
    with limit.limit.limiting():
        found = outcome(experts, limit)
        (need,) = limit.limit.start_read().wait()
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


def test_the_limit_holds_inside_the_block_only_and_keeps_the_largest_need_of_each_layer() -> None:
    limit = RowLimit(1.0)
    layers = [LayerRows(limit, number, num_ranks=1) for number in (0, 1)]
    experts = selections()[:64]
    few, many = torch.full_like(experts, -1), torch.zeros_like(experts)
    assert limit.rows_for(64) is None
    with limit.limiting():
        assert limit.rows_for(64) == 128
        for layer, chosen in ((0, many), (0, few), (1, few), (1, many[:32])):
            layers[layer].map(chosen, 0, 4)
        needs = limit.start_read().wait()
    found: dict[tuple[int, int], Any] = {(one.layer, one.share): one.rows for one in needs}
    assert found == {(0, 128): 128, (1, 128): 0, (1, 64): 64}
    with limit.limiting():
        assert limit.start_read().wait() == []
    layers[0].map(many, 0, 4)
    assert limit.start_read().wait() == []
