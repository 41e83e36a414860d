"""Tests that models with expert biases and attention sinks train as one process in every layout,
and gpt-oss as the code of Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracles import assert_equal
from tests.proof.family_training import (
    STEPS,
    FineTune,
    train_family,
    train_with_hugging_face,
    weights_by_name,
)
from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.sweeps import chosen
from tests.world import run_world

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

KIND = "experts with biases"
CASE = "gpt_oss"
#: Layouts of models of this package.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2},
    "tp2+sp ep2, recomputed": {"tp": 2, "ep": 2, "etp": 1, "recompute": "full"},
    "ep2": {"ep": 2, "recompute": "experts"},
    "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "cp2 ring": {"cp": 2, "cp_transport": "ring"},
}
CHOSEN = chosen(LAYOUTS, "tp2+sp ep2, recomputed", "ep2", "pp2 zb-v", "cp2 ring")
#: Layouts of Hugging Face's models.
OF_THEIRS: dict[str, dict[str, Any]] = chosen(
    {
        "tp2": {"tp": 2, "sequence_parallel": False},
        "tp2+sp ep2": {"tp": 2, "ep": 2, "etp": 1},
        "pp2": {"pp": 2, "recompute": "full"},
        "cp2 all_to_all": {"cp": 2, "cp_transport": "all_to_all"},
    },
    "tp2",
)


@dataclass(frozen=True)
class RankReport:
    """Report of a rank."""

    reports: dict[str, Report]
    losses: dict[str, list[float]]


def train_everything(rank: int, size: int, folder: str, expected: Any) -> RankReport:
    # The layouts with stages make the trial of their microbatches.
    jobs = {
        name: Job(KIND, layout=layout, compares="pp" in layout) for name, layout in CHOSEN.items()
    }
    reports = train_all(rank, size, jobs, folder, STEPS)
    half = Job(KIND, layout=LAYOUTS["tp2+sp"], compares=False)
    train(half, size, "cpu", f"{folder}/half", steps=2)
    losses = {
        name: train_family(CASE, layout, size, expected[CASE]) for name, layout in OF_THEIRS.items()
    }
    return RankReport(reports, losses)


@pytest.fixture(scope="module")
def theirs() -> dict[str, FineTune]:
    return train_with_hugging_face([CASE])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path, theirs: dict[str, FineTune]) -> list[RankReport]:
    """Train under all layouts on two processes."""
    return run_world(train_everything, 2, str(folder), weights_by_name(theirs))


@pytest.fixture(scope="module")
def twin() -> Report:
    """Train in this process."""
    return train(Job(KIND, layout={}), 1, "cpu", steps=STEPS)


@pytest.mark.parametrize("name", CHOSEN)
def test_every_layout_trains_as_one_process(
    name: str, ranks: list[RankReport], twin: Report
) -> None:
    check(Job(KIND), [rank.reports[name] for rank in ranks], twin, STEPS)


@pytest.mark.parametrize("name", OF_THEIRS)
def test_every_layout_trains_as_the_code_of_hugging_face(
    name: str, ranks: list[RankReport], theirs: dict[str, FineTune]
) -> None:
    expected = torch.tensor(theirs[CASE].losses, dtype=torch.float64)
    assert len(expected) == STEPS
    for rank in ranks:
        losses = torch.tensor(rank.losses[name], dtype=torch.float64)
        assert_equal(losses, expected, name, 1e-10)


def test_one_process_continues_a_checkpoint_of_two_processes(
    ranks: list[RankReport], folder: Path, twin: Report, tmp_path: Path
) -> None:
    job = Job(KIND, layout={})
    saved = str(folder / "half")
    report = train(job, 1, "cpu", str(tmp_path / "end"), steps=STEPS, resume_from=saved)
    assert report.losses == pytest.approx(twin.losses[2:], abs=1e-9)
    biases = {name for name in report.weights if "experts" in name and name.endswith(".bias")}
    assert len(biases) == 4 * 8 * 2
    for name, weight in report.weights.items():
        expected = twin.weights[name].narrow(0, 0, weight.shape[0])
        assert_equal(weight, expected, name, 1e-8)
