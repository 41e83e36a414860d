"""With dropout, every layout and size of microbatches trains as one process does."""

from __future__ import annotations

import pytest

from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.world import run_world

LAYOUTS = {
    "dp2": {"microbatch_size": 1},
    "tp2": {"tp": 2, "microbatch_size": 4, "recompute": "selective"},
    "tp2 without sp": {"tp": 2, "sequence_parallel": False, "microbatch_size": 8},
    "pp2": {"pp": 2, "recompute": "full"},
    "cp2": {"cp": 2, "microbatch_size": 4},
}


@pytest.fixture(scope="module")
def one_process() -> Report:
    return train(Job("dropout"), 1, "cpu")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    jobs = {name: Job("dropout", layout=layout) for name, layout in LAYOUTS.items()}
    return run_world(train_all, 2, jobs, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_dropout_train_as_plain_lightning(name, reports, one_process):
    check(Job("dropout"), [ranks[name] for ranks in reports], one_process)
