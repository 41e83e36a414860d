"""Tests that a checkpoint of one layout continues in every other layout with the losses and norms
of one process.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.proof.test_layouts_equal import LAYOUTS, TOLERANCE
from tests.proof.training import STEPS, Job, Report, train
from tests.world import run_world

SAVED_AFTER = 2
WAYS = LAYOUTS | {"pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v"}}
KIND = "gpt2-tied"


def _job(layout: dict[str, Any] | None) -> Job:
    return Job(KIND, layout=layout, compares=False)


def _save_and_continue(
    rank: int, size: int, folder: str, checkpoint_of_one: str
) -> dict[str, Report]:
    saved = os.path.join(folder, "tp2 pp2")
    train(_job(LAYOUTS["tp2 pp2"]), size, "cpu", saved, steps=SAVED_AFTER)
    reports = {
        f"tp2 pp2 to {name}": train(_job(WAYS[name]), size, "cpu", resume_from=saved)
        for name in ("tp4+sp", "pp4", "pp2 vpp2 dp2", "pp2 zb-v dp2", "dp4", "tp2 pp2")
    }
    saved_v = os.path.join(folder, "v")
    train(_job(WAYS["pp2 zb-v dp2"]), size, "cpu", saved_v, steps=SAVED_AFTER)
    reports["pp2 zb-v dp2 to pp2 vpp2 dp2"] = train(
        _job(WAYS["pp2 vpp2 dp2"]), size, "cpu", resume_from=saved_v
    )
    reports["one to tp2 pp2"] = train(
        _job(LAYOUTS["tp2 pp2"]), size, "cpu", resume_from=checkpoint_of_one
    )
    return reports


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Return the reports of each rank of the steps after the save."""
    folder = tmp_path_factory.mktemp("resume")
    checkpoint_of_one = str(folder / "one")
    train(_job({}), 1, "cpu", checkpoint_of_one, steps=SAVED_AFTER)
    ranks = run_world(_save_and_continue, 4, str(folder), checkpoint_of_one)
    by_way = {name: [reports[name] for reports in ranks] for name in ranks[0]}
    by_way["tp2 pp2 to one"] = [train(_job({}), 1, "cpu", resume_from=str(folder / "tp2 pp2"))]
    return by_way


@pytest.fixture(scope="module")
def uninterrupted() -> Report:
    """Train without interruption, in one process of ordinary Lightning."""
    return train(_job(None), 1, "cpu")


@pytest.mark.parametrize(
    "way",
    [
        *(
            f"tp2 pp2 to {name}"
            for name in ("tp4+sp", "pp4", "pp2 vpp2 dp2", "pp2 zb-v dp2", "dp4", "tp2 pp2", "one")
        ),
        "pp2 zb-v dp2 to pp2 vpp2 dp2",
        "one to tp2 pp2",
    ],
)
def test_training_continues_under_another_layout(
    way: str, continued: dict[str, list[Report]], uninterrupted: Report
) -> None:
    for report in continued[way]:
        assert len(report.losses) == STEPS - SAVED_AFTER
        close = {"rtol": 0.0, "atol": TOLERANCE["64-true"]}
        torch.testing.assert_close(
            torch.tensor(report.losses), torch.tensor(uninterrupted.losses[SAVED_AFTER:]), **close
        )
        torch.testing.assert_close(
            torch.tensor(report.norms), torch.tensor(uninterrupted.norms[SAVED_AFTER:]), **close
        )
