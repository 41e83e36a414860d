"""A schedule that measured times have chosen keeps the promise: losses, gradient norms and final
weights are one process's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.step import schedule_choice
from lightning_megatron.strategy.step.schedule_choice import ScheduleChoice
from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.world import run_world

pytestmark = pytest.mark.slow

AUTO = {"schedule": "auto", "microbatch_size": 1}
JOBS = {
    "four stages": Job("gpt2-tied", layout={"pp": 4, **AUTO}),
    "in a V": Job("llama-tied", layout={"tp": 2, "pp": 2, "vpp": 2, **AUTO}),
    "experts": Job("experts", layout={"pp": 2, "ep": 2, **AUTO}),
}


def train_and_choose(rank: int, size: int, folder: str) -> tuple[dict[str, Report], list[Schedule]]:
    """Run the jobs with a choice after two of their four steps, and return what was chosen."""
    chosen: list[Schedule] = []
    search: Any = ScheduleChoice._search

    def recorded(self: ScheduleChoice, *args: Any) -> Schedule:
        chosen.append(search(self, *args))
        return chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_choice, "WARMUP_STEPS", 1)
        patch.setattr(schedule_choice, "MEASURED_STEPS", 1)
        patch.setattr(ScheduleChoice, "_search", recorded)
        return train_all(rank, size, JOBS, folder), chosen


def test_chosen_schedules_train_as_one_process(tmp_path: Path) -> None:
    ranks = run_world(train_and_choose, 4, str(tmp_path))
    for _, chosen in ranks:
        assert len(chosen) == len(JOBS)
        assert chosen == ranks[0][1], "all ranks choose the same order"
    assert [(one.num_stages, one.num_chunks, one.shape) for one in ranks[0][1]] == [
        (4, 1, "loop"),
        (2, 2, "v"),
        (2, 1, "loop"),
    ]
    for name, job in JOBS.items():
        check(job, [reports[name] for reports, _ in ranks], train(Job(job.kind), 1, "cpu"))


def test_a_choice_has_no_microbatch_groups() -> None:
    with pytest.raises(ParallelPlanError, match=r"microbatch_group_size \(4\) must be None"):
        MegatronStrategy(pp=2, vpp=4, schedule="auto", microbatch_group_size=4)
