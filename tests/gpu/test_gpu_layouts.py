"""Tests that every layout of GPUs matches one GPU, in float32 and in the mixed precisions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.fits import GPT2, LLAMA, Job, Report, run_job, run_jobs
from tests.gpu.ranks import (
    assert_losses_near,
    assert_near,
    gpu_job,
    on_one_to_four_gpus,
    on_two_and_four_gpus,
    run_ranks,
)
from tests.worlds.test_experts import KINDS

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"dp1": {}},
    2: {
        "tp2+sp": {"tp": 2},
        "pp2": {"pp": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "pp2 zb-h1": {"pp": 2, "schedule": "zb-h1"},
        "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
        "pp2 dualpipe-v": {"pp": 2, "vpp": 2, "schedule": "dualpipe-v", "microbatch_size": 1},
        "dp2": {},
    },
    4: {
        "tp4+sp": {"tp": 4},
        "tp4": {"tp": 4, "sequence_parallel": False},
        "pp4": {"pp": 4},
        "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
        "pp4 zb-h1": {"pp": 4, "schedule": "zb-h1"},
        "tp2 pp2 zb-v": {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zb-v"},
        "tp2 pp2": {"tp": 2, "pp": 2},
        "dp4": {},
    },
}
#: Layouts whose ranks share sequences.
CONTEXT: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "cp2": {"cp": 2},
        "cp2 ring": {"cp": 2, "context.transport": "ring"},
        "cp2 all_gather": {"cp": 2, "context.transport": "all_gather"},
    },
    4: {
        "cp4 ring": {"cp": 4, "context.transport": "ring"},
        "cp2 dp2 ring": {"cp": 2, "context.transport": "ring"},
        "tp2 cp2": {"tp": 2, "cp": 2},
        "pp2 cp2 all_gather": {"pp": 2, "cp": 2, "context.transport": "all_gather"},
    },
}
#: Layouts whose products run on symmetric memory.
OVERLAPPED = {
    2: {"tp2+sp overlapped": {"tp": 2, "linear.overlap": True}},
    4: {
        "tp4+sp overlapped": {"tp": 4, "linear.overlap": True},
        "tp2+sp dp2 overlapped": {"tp": 2, "linear.overlap": True},
    },
}
#: Layouts of mixtures of experts.
EXPERT_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "experts again": {"recompute": "experts"}},
    2: {
        "ep2": {"ep": 2},
        "ep2, all-to-all": {"ep": 2, "experts.transport": "all_to_all"},
        "ep2, one-sided": {"ep": 2, "experts.transport": "one_sided"},
        "tp2 +sp, ep2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2": {"tp": 2, "sequence_parallel": False},
        "pp2": {"pp": 2},
        "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    },
    4: {
        "ep4": {"ep": 4},
        "ep4, all-to-all": {"ep": 4, "experts.transport": "all_to_all"},
        "ep4, one-sided": {"ep": 4, "experts.transport": "one_sided"},
        "ep2 edp2": {"ep": 2},
        "tp2 +sp, ep2": {"tp": 2, "ep": 2, "etp": 1},
        "tp2, etp2 ep2": {"tp": 2, "ep": 2, "sequence_parallel": False},
        "tp2 pp2 +sp, ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    },
}
on_gpu = partial(gpu_job, steps=4)
TWINS = {"gpt2": on_gpu(GPT2), "llama": on_gpu(LLAMA)}
#: Only the strategy updates the router's bias and the shares of the last step.
EXPERTS = {
    "experts": on_gpu(KINDS["plain"]),
    "experts, whole step": on_gpu(KINDS["whole step"], {}),
}
# Half precision rounds at 2^-8 and 2^-11; the losses are near 5.7.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "16-mixed": 1e-2}


def compare(size: int, twins: dict[str, Job], layouts: dict[str, dict[str, Any]]) -> None:
    """Train every kind of model in every layout and precision, and compare with the job of this
    kind on one GPU.
    """
    jobs = {
        (kind, name, precision): replace(
            twin, strategy={"job.check_microbatches": True, **layout}, precision=precision
        )
        for kind, twin in twins.items()
        for name, layout in layouts.items()
        for precision in TOLERANCE
    }
    ranks = run_ranks(run_jobs, size, jobs)
    twin_reports = {kind: run_job(job) for kind, job in twins.items()}
    for rank, reports in enumerate(ranks):
        for (kind, layout, precision), report in reports.items():
            where = f"{kind}, {layout}, {precision}, rank {rank}"
            assert_near(report, twin_reports[kind], TOLERANCE[precision], where)


@on_one_to_four_gpus
def test_every_layout_matches_ordinary_lightning(size):
    compare(size, TWINS, LAYOUTS[size])


@on_one_to_four_gpus
def test_experts_in_all_layouts_match_one_gpu(size):
    compare(size, EXPERTS, EXPERT_LAYOUTS[size])


@on_two_and_four_gpus
def test_ranks_that_share_sequences_match_one_gpu(size):
    compare(size, TWINS, CONTEXT[size])


@on_two_and_four_gpus
def test_overlapped_layouts_match_one_gpu(size):
    compare(size, TWINS, OVERLAPPED[size])


# By number of ranks: the layout that saves, and the layouts that resume.
CHANGES = {2: ("pp2", ("tp2+sp", "dp2", "pp2 vpp2")), 4: ("tp2 pp2", ("tp4+sp", "pp4", "dp4"))}


def _save_and_resume(rank: int, size: int, folder: str) -> dict[str, Report]:
    first, resuming = CHANGES[size]
    jobs = {name: on_gpu(GPT2, LAYOUTS[size][name], "bf16-mixed") for name in (first, *resuming)}
    run_job(replace(jobs[first], steps=3, save=folder), size)
    return {name: run_job(replace(jobs[name], resume=folder), size) for name in resuming}


@on_two_and_four_gpus
def test_a_checkpoint_continues_under_other_layouts(size, tmp_path):
    ranks = run_ranks(_save_and_resume, size, str(tmp_path / "saved"))
    uninterrupted = run_job(TWINS["gpt2"])
    for reports in ranks:
        for layout, report in reports.items():
            losses = uninterrupted.losses[3:]
            assert_losses_near(report.losses, losses, TOLERANCE["bf16-mixed"], layout)
