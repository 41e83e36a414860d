"""Tests that custom schedules train and evaluate as one process: same losses, gradient norms and
final weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron.errors import ParallelPlanError, RankMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan import Action, Placement, StageCosts, build_schedule, format_schedule
from lightning_megatron.plan.custom_order import order_from_function
from lightning_megatron.plan.greedy_schedule import GreedyConstruction, GreedyRule
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import PlacementShape
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.step.custom_order_check import CustomOrderCheck
from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.strategy.tiny import TinyLM, loader
from tests.world import run_world

pytestmark = pytest.mark.slow


def halves_from_the_last(rank: int, pp: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    """All forwards, all input halves from the last microbatch on, and then all weight halves."""
    for number in range(num_microbatches):
        yield Action("F", 0, number)
    for number in reversed(range(num_microbatches)):
        yield Action("I", 0, number)
    for number in range(num_microbatches):
        yield Action("W", 0, number)


def chunk_after_chunk(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Full backward passes, one microbatch after the other, chunk after chunk."""
    chunks = range(vpp)
    numbers = range(num_microbatches)
    forwards = [Action("F", chunk, number) for chunk in chunks for number in numbers]
    return forwards + [
        Action("B", action.chunk, action.microbatch) for action in reversed(forwards)
    ]


def other_rows_on_each_rank(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows that are legal, but of a different schedule on process 1 from four microbatches on."""
    is_different = num_microbatches > 3 and os.environ["LOCAL_RANK"] == "1"
    name = "gpipe" if is_different else "1f1b"
    return list(build_schedule(name, pp, num_microbatches, vpp).actions(rank))


def fails_on_one_rank(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows of a function that one process cannot run from four microbatches on."""
    if num_microbatches > 3 and os.environ["LOCAL_RANK"] == "1":
        raise KeyError(num_microbatches)
    return list(build_schedule("1f1b", pp, num_microbatches, vpp).actions(rank))


def forgets_the_last(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows of at most three microbatches."""
    return list(build_schedule("1f1b", pp, min(num_microbatches, 3), vpp).actions(rank))


def search_schedule(
    shape: PlacementShape, num_stages: int, num_chunks: int, num_microbatches: int
) -> Schedule:
    """Construct the rows for stages of unequal times."""
    placement = Placement(shape, num_stages, num_chunks)
    count = placement.num_virtual_stages
    costs = StageCosts(*(tuple(range(first, first + count)) for first in (2, 3, 1)), transfer=1)
    rule = GreedyRule(num_chunks * 2.0, (1.0,) * count, 0.9, True, True, 0.5)
    rows = GreedyConstruction(placement, num_microbatches, costs, rule).rows()
    assert rows is not None, "the limit is above one microbatch in each chunk"
    return Schedule("", num_stages, num_microbatches, num_chunks, rows, shape=shape).validate()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("schedules")

    def file(name: str, schedule: Schedule) -> str:
        path = folder / f"{name}.csv"
        path.write_text(format_schedule(schedule))
        return str(path)

    single: dict[str, Any] = {"microbatch_size": 1}
    return {
        "halves, tied": Job(
            "gpt2-tied",
            layout={
                "pp": 2,
                "schedule": file("halves", search_schedule("loop", 2, 1, 4)),
                **single,
            },
        ),
        "a V": Job(
            "llama-tied",
            layout={
                "tp": 2,
                "pp": 2,
                "vpp": 2,
                "schedule": file("v", search_schedule("v", 2, 2, 4)),
            },
        ),
        "three chunks in a V": Job(
            "eight layers",
            layout={
                "pp": 2,
                "vpp": 3,
                "schedule": file("v3", search_schedule("v", 2, 3, 4)),
                **single,
            },
        ),
        "experts": Job(
            "experts",
            layout={
                "pp": 2,
                "ep": 2,
                "schedule": file("e", search_schedule("loop", 2, 1, 4)),
                **single,
            },
        ),
        "function": Job("gpt2-tied", layout={"pp": 4, "schedule": halves_from_the_last, **single}),
        "function, chunks": Job(
            "llama-untied", layout={"pp": 2, "vpp": 2, "schedule": chunk_after_chunk}
        ),
    }


@pytest.fixture(scope="module")
def reports(
    jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Report]]:
    """Train every job on four processes."""
    return run_world(train_all, 4, jobs, str(tmp_path_factory.mktemp("four")))


@pytest.mark.parametrize(
    "name",
    ["halves, tied", "a V", "three chunks in a V", "experts", "function", "function, chunks"],
)
def test_custom_orders_train_as_one_process(
    name: str, jobs: dict[str, Job], reports: list[dict[str, Report]]
) -> None:
    check(jobs[name], [ranks[name] for ranks in reports], train(Job(jobs[name].kind), 1, "cpu"))


def fit(schedule: Any) -> dict[str, float]:
    """Train on batches of four samples, and evaluate batches of other sizes."""
    pl.seed_everything(3, verbose=False)
    strategy: Any = "auto"
    if schedule is not None:
        strategy = MegatronStrategy(pp=2, schedule=schedule)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if schedule is None else 2,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = TinyLM()
    trainer.fit(module, loader(16), loader(5, batch_size=3))
    # The largest loss of microbatches is not that of batches.
    logged = trainer.callback_metrics.items()
    metrics = {name: float(value) for name, value in logged if name != "largest"}
    (tested,) = trainer.test(module, loader(6, batch_size=2), verbose=False)
    return {**metrics, **tested}


def fit_and_disagree(rank: int, size: int, path: str) -> tuple[dict[str, float], list[str]]:
    """Fit with a file; return the logged metrics, and errors about functions."""
    metrics = fit(path)
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    errors = []
    for function, error in (
        (other_rows_on_each_rank, RankMismatchError),
        (fails_on_one_rank, RankMismatchError),
        (forgets_the_last, ParallelPlanError),
    ):
        check = CustomOrderCheck(mesh, order_from_function(function, 2, 1))
        check.check(2)
        with pytest.raises(error) as caught:
            check.check(4)
        errors.append(str(caught.value))
    mesh.destroy()
    return metrics, errors


def test_evaluation_and_refusals_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(format_schedule(search_schedule("loop", 2, 1, 4)))
    ranks = run_world(fit_and_disagree, 2, str(path))
    expected = fit(None)
    for metrics, (rows, failure, illegal) in ranks:
        assert metrics == pytest.approx(expected, abs=1e-10)
        assert "rank 1 has rows of other_rows_on_each_rank for 4 microbatches=" in rows
        assert rows.endswith("The function must return the same rows on every rank.")
        assert "rank 1 has rows of fails_on_one_rank for 4 microbatches=" in failure
        assert "it raised KeyError" in failure
        assert "schedule 'forgets_the_last' is not legal: on stage 0, F of microbatch 3" in illegal
