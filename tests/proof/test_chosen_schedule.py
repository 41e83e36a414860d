"""Tests that a schedule chosen by measured times trains as one process: same losses, gradient norms
and final weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.schedule_costs import read_costs
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.action_times import MeasuredStages
from lightning_megatron.pipeline.transfer_times import measure_transfer
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


Chosen = tuple[dict[str, Report], list[Schedule], list[MeasuredStages], list[str]]


def train_and_choose(rank: int, size: int, folder: str) -> Chosen:
    """Run the jobs with a choice after two of their four steps.

    Return the reports, the chosen schedules, the measured times and the log messages. The time of a
    transfer follows from the size of the message and the rank.
    """
    chosen: list[Schedule] = []
    measured: list[MeasuredStages] = []
    messages: list[str] = []
    search: Any = ScheduleChoice._search

    def search_and_record(self: ScheduleChoice, *args: Any) -> Schedule:
        chosen.append(search(self, *args))
        assert self.measured is not None, "the choice follows the measurement"
        measured.append(self.measured)
        return chosen[-1]

    def slow_transfer(num_bytes: int, mesh: ParallelMesh) -> float:
        measure_transfer(num_bytes, mesh)
        return (num_bytes + mesh.rank) / 1e6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_choice, "WARMUP_STEPS", 1)
        patch.setattr(schedule_choice, "MEASURED_STEPS", 1)
        patch.setattr(ScheduleChoice, "_search", search_and_record)
        patch.setattr(schedule_choice, "measure_transfer", slow_transfer)
        patch.setattr(schedule_choice, "rank_zero_info", messages.append)
        return train_all(rank, size, JOBS, folder), chosen, measured, messages


def test_chosen_schedules_train_as_one_process(tmp_path: Path) -> None:
    ranks = run_world(train_and_choose, 4, str(tmp_path))
    for _, chosen, measured, _ in ranks:
        assert len(chosen) == len(JOBS)
        assert chosen == ranks[0][1], "all ranks choose the same order"
        assert measured == ranks[0][2], "all ranks have the same times"
    assert [
        (schedule.num_stages, schedule.num_chunks, schedule.shape) for schedule in ranks[0][1]
    ] == [
        (4, 1, "loop"),
        (2, 2, "v"),
        (2, 1, "loop"),
    ]
    # A message is one sample of 16 tokens with 32 features in float64, or with tp its half; with
    # experts the samples of a data-parallel rank are as large. The slowest rank counts.
    transfers = [stages.costs.transfer for stages in ranks[0][2]]
    assert transfers == [4096 + 3, 2048 + 3, 4096 + 3]
    for transfer, line in zip(transfers, ranks[0][3], strict=True):
        assert f"and {transfer / 1e3:.3g} ms for a transfer between stages." in line
    costs = tmp_path / "costs.yaml"
    costs.write_text(yaml.safe_dump(ranks[0][2][0].as_dict()))
    assert read_costs(costs, 4).times == ranks[0][2][0].costs
    for name, job in JOBS.items():
        check(job, [reports[name] for reports, *_ in ranks], train(Job(job.kind), 1, "cpu"))


def test_automatic_schedules_with_microbatch_groups_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"microbatch_group_size \(4\) must be None"):
        MegatronStrategy(pp=2, vpp=4, schedule="auto", microbatch_group_size=4)
