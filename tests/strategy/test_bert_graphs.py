"""Graphs of a BERT follow the lengths of the rows of each batch."""

from __future__ import annotations

import pytest

from lightning_megatron import CudaGraphs
from tests.models.flash_stand_in import without_masks
from tests.strategy.bert_fits import bert_fit
from tests.strategy.graph_fits import FULL, SEGMENTS


@pytest.mark.parametrize("graphs", [SEGMENTS, FULL], ids=["segments", "full"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_graphs_of_padded_rows_have_the_bits_of_eager_steps(graphs: CudaGraphs, order: str) -> None:
    with without_masks() as spans:
        eager = bert_fit(None, order=order, dropout=(0.1, 0.0))
        assert spans
        found = bert_fit(graphs, order=order, dropout=(0.1, 0.0))
    assert found.num_graphs[-1] > 0
    assert found.differences_from(eager) == []


def test_lengths_train_like_their_mask() -> None:
    expected = bert_fit(None, has_lengths=False)
    with without_masks() as spans:
        found = bert_fit(None)
    assert spans
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert len(set(expected.losses)) == len(expected.losses)
