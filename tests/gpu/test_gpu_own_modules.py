"""Modules of users train on two GPUs without a plan as on one: in float64, and in bfloat16 with main
parameters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fits import Job, check_equal, run_job, run_jobs
from tests.gpu.ranks import assert_losses_near, run_ranks
from tests.worlds.test_automatic_plans import KNOWN, fit
from tests.worlds.test_own_experts import fit as fit_experts

MODULES = {name: fit(name, None) for name in (*KNOWN, "torch", "experts")}
MODULES |= {kinds: fit_experts(kinds, None) for kinds in ("all", "loops")}
AXES = dict.fromkeys(("all", "loops"), ("ep",))


def on_gpu(job: Job) -> Job:
    """Return the job with its trainer on GPUs."""
    return replace(job, trainer={**job.trainer, "accelerator": "gpu"})


def over(axis: str, job: Job) -> Job:
    """Return the job over two ranks of an axis."""
    return replace(job, strategy={axis: 2, "job.check_microbatches": True})


JOBS = {
    f"{name} {axis}2": on_gpu(over(axis, job))
    for name, job in MODULES.items()
    for axis in AXES.get(name, ("tp", "pp"))
}


@pytest.mark.gpu2
def test_modules_train_on_two_gpus_as_on_one():
    ranks = run_ranks(run_jobs, 2, JOBS)
    twins = {name: run_job(on_gpu(job)) for name, job in MODULES.items()}
    for name in JOBS:
        check_equal([rank[name] for rank in ranks], twins[name.rpartition(" ")[0]], 1e-9)


@pytest.mark.gpu2
def test_modules_train_in_bfloat16_near_one_gpu():
    halves = {name: replace(job, precision="bf16-mixed") for name, job in JOBS.items()}
    (first, _) = run_ranks(run_jobs, 2, halves)
    for name, job in MODULES.items():
        expected = run_job(on_gpu(replace(job, precision="bf16-mixed")))
        for axis in AXES.get(name, ("tp", "pp")):
            what = f"{name} {axis}2"
            assert_losses_near(first[what].losses, expected.losses, 0.05, what)
