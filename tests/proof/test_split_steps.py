"""Tests that backward passes in halves train as one process: same losses, gradient norms and final
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.plan.schedule import Schedule
from tests.pipeline.halves import with_halves
from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.world import run_world

pytestmark = pytest.mark.slow

JOBS = {
    "tied": Job("gpt2-tied", layout={"pp": 4}),
    "chunks": Job("llama-untied", layout={"pp": 2, "vpp": 2}),
    "everything": Job("llama-tied", layout={"tp": 2, "pp": 2, "sequence_parallel": True}),
    "recomputed": Job("llama-untied", layout={"pp": 4, "recompute": "full"}, compares=False),
    "data": Job("gpt2-untied", layout={"pp": 2, "zero": 0}, compares=False),
    "experts": Job("experts", layout={"pp": 2, "ep": 2}),
    "shared experts": Job("experts, some layers", layout={"pp": 2, "ep": 2}, compares=False),
}


def train_in_halves(rank: int, size: int, folder: str) -> dict[str, Report]:
    """Run the jobs with schedules whose weight halves wait for two input halves."""
    build_schedule: Any = PipelineExecutor._build_schedule

    def split(self: PipelineExecutor, number: int, forward_only: bool) -> Schedule:
        return with_halves(build_schedule(self, number, forward_only), 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineExecutor, "_build_schedule", split)
        return train_all(rank, size, JOBS, folder)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    """Train every job on four processes."""
    folder: Path = tmp_path_factory.mktemp("halves")
    return run_world(train_in_halves, 4, str(folder))


@pytest.mark.parametrize("name", JOBS)
def test_steps_with_split_backward_passes_train_as_one_process(
    name: str, reports: list[dict[str, Report]]
) -> None:
    job = JOBS[name]
    twin = train(Job(job.kind), 1, "cpu")
    check(job, [ranks[name] for ranks in reports], twin)
