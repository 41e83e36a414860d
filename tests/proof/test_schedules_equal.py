"""Tests that schedules that split backward passes train as one process: same losses, gradient norms
and final weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

V = {"pp": 2, "vpp": 2}
JOBS: dict[str, Job] = {}


def _add_job(schedule: str, kind: str, counts: bool = False, **options: Any) -> None:
    shape = {"pp": 2} if schedule in ("zb-h1", "zb-h2") else V
    layout = {**shape, "schedule": schedule, **options}
    if schedule == "dualpipe-v":
        # This schedule needs two microbatches for each stage.
        layout["microbatch_size"] = 1
    label = ", ".join(f"{name}={value}" for name, value in layout.items() if name != "schedule")
    # The first job of a schedule makes the trial of its microbatches.
    compares = not any(job.layout and job.layout["schedule"] == schedule for job in JOBS.values())
    JOBS[f"{schedule}, {kind}, {label}"] = Job(
        kind, layout=layout, counts=counts, compares=compares
    )


for name in ("zb-h1", "zb-h2"):
    _add_job(name, "gpt2-tied", pp=4)
    _add_job(name, "llama-untied", pp=4, recompute="full", microbatch_size=1)
_add_job("zb-v", "eight layers", pp=4)
_add_job("zb-v", "eight layers", pp=4, microbatch_size=1, recompute="selective")
_add_job("dualpipe-v", "eight layers", pp=4)
_add_job("zb-h1", "llama-tied", tp=2)
_add_job("zb-h1", "llama-untied", tp=2, overlap_tensor_parallel=True)
_add_job("zb-h1", "experts", ep=2)
_add_job("zb-h1", "gpt2-untied", zero=0)
_add_job("zb-h2", "gpt2-tied", tp=2, sequence_parallel=False)
_add_job("zb-h2", "experts, some layers", ep=2, microbatch_size=1)
_add_job("zb-v", "llama-tied", tp=2)
_add_job("zb-v", "gpt2-tied", tp=2, sequence_parallel=False, recompute="full")
_add_job("zb-v", "llama-untied", tp=2, recompute="selective")
_add_job("zb-v", "gpt2-tied", recompute={"parts": ["norms", "activations", "selective"]})
_add_job("zb-v", "llama-tied", zero=0, overlap_gradients=False)
_add_job("zb-v", "experts, whole step", ep=2)
_add_job("zb-v", "experts", ep=2, recompute="experts", microbatch_size=1, counts=True)
_add_job("zb-v", "gpt2-untied", tp=2, overlap_tensor_parallel=True)
_add_job("dualpipe-v", "gemma-tied", tp=2)
_add_job("dualpipe-v", "gpt2-untied", optimizer_slices="parameters")
_add_job("dualpipe-v", "post-norm", recompute="full")
_add_job("dualpipe-v", "experts, some layers", tp=2, ep=2, etp=1)
JOBS = chosen(
    JOBS,
    "zb-h1, gpt2-tied, pp=4",
    "zb-h1, llama-untied, pp=2, tp=2, overlap_tensor_parallel=True",
    "zb-h2, gpt2-tied, pp=4",
    "zb-v, eight layers, pp=4, vpp=2",
    "zb-v, gpt2-tied, pp=2, vpp=2, tp=2, sequence_parallel=False, recompute=full",
    "zb-v, gpt2-tied, pp=2, vpp=2, recompute={'parts': ['norms', 'activations', 'selective']}",
    "zb-v, llama-tied, pp=2, vpp=2, zero=0, overlap_gradients=False",
    "zb-v, experts, pp=2, vpp=2, ep=2, recompute=experts, microbatch_size=1",
    "dualpipe-v, gpt2-untied, pp=2, vpp=2, optimizer_slices=parameters, microbatch_size=1",
    "dualpipe-v, experts, some layers, pp=2, vpp=2, tp=2, ep=2, etp=1, microbatch_size=1",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    """Train every job on four processes."""
    return run_world(train_all, 4, JOBS, str(tmp_path_factory.mktemp("four")))


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, bool], Report]:
    """Train every kind in this process."""
    reports = {}
    for job in JOBS.values():
        # Only the strategy changes the router's bias, and counted steps have its microbatches.
        layout: dict[str, Any] | None = {} if job.kind == "experts, whole step" else None
        if job.counts:
            layout = {"microbatch_size": 1}
        if (job.kind, job.counts) not in reports:
            twin = Job(job.kind, layout=layout, counts=job.counts)
            reports[job.kind, job.counts] = train(twin, 1, "cpu")
    return reports


@pytest.mark.parametrize("name", JOBS)
def test_every_schedule_trains_as_one_process(
    name: str, reports: list[dict[str, Report]], twins: dict[tuple[str, bool], Report]
) -> None:
    job = JOBS[name]
    check(job, [ranks[name] for ranks in reports], twins[job.kind, job.counts])


def test_v_schedules_with_tensor_and_data_parallel_ranks_train_as_one_process(
    tmp_path: Path,
) -> None:
    jobs = chosen(
        {
            "zb-v": Job("llama-tied", layout={**V, "tp": 2, "schedule": "zb-v"}),
            "dualpipe-v": Job(
                "gpt2-tied", layout={**V, "tp": 2, "schedule": "dualpipe-v", "microbatch_size": 1}
            ),
        },
        "dualpipe-v",
    )
    ranks = run_world(train_all, 8, jobs, str(tmp_path))
    for name, job in jobs.items():
        check(job, [reports[name] for reports in ranks], train(Job(job.kind), 1, "cpu"))
