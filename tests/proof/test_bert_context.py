"""Tests that BERT with sequences cut over cp trains as transformers' model in a plain loop: same
losses, gradient norms and weights, with every transport and with padding.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.proof.test_bert import ORDERS, Report, check_reports, train_all, train_in_plain_loop
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

#: Arguments of the strategy, and the order of norms in the layers; without an order, both orders.
LAYOUTS: dict[str, dict[str, Any]] = chosen(
    {
        "cp4 ring": {"cp": 4, "cp_transport": "ring"},
        "cp4": {"cp": 4, "zero": 0, "norms": "post"},
        "cp4 hierarchical": {
            **{"cp": 4, "cp_transport": "hierarchical"},
            **{"recompute": "selective", "norms": "pre"},
        },
        "cp2 dp2 ring recomputed": {
            **{"cp": 2, "cp_transport": "ring", "recompute": "full", "norms": "post"}
        },
        "cp2 tp2 +sp all_gather": {"cp": 2, "tp": 2, "cp_transport": "all_gather", "norms": "pre"},
        "cp2 tp2 ring": {
            **{"cp": 2, "tp": 2, "cp_transport": "ring"},
            **{"sequence_parallel": False, "norms": "post"},
        },
        "cp2 pp2 ring": {"cp": 2, "pp": 2, "cp_transport": "ring", "norms": "post"},
        "cp2 pp2 recomputed": {"cp": 2, "pp": 2, "recompute": "full", "norms": "pre"},
    },
    "cp4",
    "cp4 hierarchical",
    "cp2 dp2 ring recomputed",
    "cp2 tp2 +sp all_gather",
    "cp2 pp2 ring",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    return run_world(train_all, 4, str(tmp_path_factory.mktemp("bert")), LAYOUTS)


@pytest.mark.parametrize("order", ORDERS)
def test_every_context_parallel_layout_trains_as_transformers_in_a_plain_loop(
    reports: list[dict[str, Report]], order: str
) -> None:
    expected = train_in_plain_loop(order)
    for rank_reports in reports:
        assert len(rank_reports) == len(LAYOUTS) + ("cp4 ring" in LAYOUTS)
        check_reports(rank_reports, expected, order)
