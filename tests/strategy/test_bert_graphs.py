"""Fits of a BERT by graphs on rows whose lengths differ between batches."""

from __future__ import annotations

import pytest

from lightning_megatron import CudaGraphs
from tests.models.flash_stand_in import without_masks
from tests.strategy.bert_fits import bert_fit
from tests.strategy.graph_fits import FULL, SEGMENTS


@pytest.mark.parametrize("graphs", [SEGMENTS, FULL], ids=["segments", "full"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_fits_by_graphs_equal_eager_fits_on_padded_rows(graphs: CudaGraphs, order: str) -> None:
    with without_masks() as spans:
        eager = bert_fit(None, order=order, dropout=(0.1, 0.0))
        assert spans
        actual = bert_fit(graphs, order=order, dropout=(0.1, 0.0))
    assert actual.num_graphs[-1] > 0
    assert actual.differences_from(eager) == []


def test_training_with_lengths_matches_training_with_masks() -> None:
    expected = bert_fit(None, has_lengths=False)
    with without_masks() as spans:
        actual = bert_fit(None)
    assert spans
    assert actual.losses == pytest.approx(expected.losses, rel=1e-9)
    assert len(set(expected.losses)) == len(expected.losses)
