"""Tests that every layout of GPUs matches one GPU, in float32 and in the mixed precisions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fits import BATCH, GPT2, LLAMA, Job, Report, Tokens, run_job, run_jobs
from tests.gpu.shared_gpu import require_gpus
from tests.world import run_world

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
        "pp4 zb-h2": {"pp": 4, "schedule": "zb-h2"},
        "tp2 pp2 zb-v": {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zb-v"},
        "tp2 pp2": {"tp": 2, "pp": 2},
        "dp4": {},
    },
}
#: Layouts whose ranks share sequences.
CONTEXT: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "cp2": {"cp": 2},
        "cp2 ring": {"cp": 2, "cp_transport": "ring"},
        "cp2 all_gather": {"cp": 2, "cp_transport": "all_gather"},
    },
    4: {
        "cp4 ring": {"cp": 4, "cp_transport": "ring"},
        "cp4 hierarchical": {"cp": 4, "cp_transport": "hierarchical"},
        "cp2 dp2 ring": {"cp": 2, "cp_transport": "ring"},
        "tp2 cp2": {"tp": 2, "cp": 2},
        "pp2 cp2 all_gather": {"pp": 2, "cp": 2, "cp_transport": "all_gather"},
    },
}
#: Layouts whose products run on symmetric memory.
OVERLAPPED = {
    2: {"tp2+sp overlapped": {"tp": 2, "overlap_tensor_parallel": True}},
    4: {
        "tp4+sp overlapped": {"tp": 4, "overlap_tensor_parallel": True},
        "tp2+sp dp2 overlapped": {"tp": 2, "overlap_tensor_parallel": True},
    },
}
STEPS = 4
on_gpu = partial(
    Job, steps=STEPS, trainer={"accelerator": "gpu"}, data=partial(Tokens, STEPS * BATCH)
)
TWINS = {
    name: on_gpu(kind, precision="32-true") for name, kind in {"gpt2": GPT2, "llama": LLAMA}.items()
}
# Half precision rounds at 2^-8 and 2^-11; the losses are near 5.7.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "16-mixed": 1e-2}


SIZES = [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
Case = tuple[str, str, str]


def compare(size: int, twins: dict[str, Job], layouts: dict[str, dict[str, Any]]) -> None:
    """Train every kind of model in every layout and precision, and compare with the job of this
    kind on one GPU.
    """
    require_gpus(size)
    jobs = {
        (kind, name, precision): replace(
            twin, strategy={"check_microbatches": True, **layout}, precision=precision
        )
        for kind, twin in twins.items()
        for name, layout in layouts.items()
        for precision in TOLERANCE
    }
    twin_reports = {kind: run_job(job) for kind, job in twins.items()}
    for rank, reports in enumerate(run_world(run_jobs, size, jobs, backend="nccl")):
        for (kind, layout, precision), report in reports.items():
            where = f"{kind}, {layout}, {precision}, rank {rank}"
            twin = twin_reports[kind]
            gaps = [abs(a - b) for a, b in zip(report.losses, twin.losses, strict=True)]
            assert max(gaps) < TOLERANCE[precision], f"{where}: {gaps}"
            norms = [abs(a - b) / b for a, b in zip(report.norms, twin.norms, strict=True)]
            assert max(norms) < 10 * TOLERANCE[precision], f"{where}: {norms}"


@pytest.mark.gpu
def test_one_gpu_matches_ordinary_lightning():
    compare(1, TWINS, LAYOUTS[1])


@pytest.mark.gpu2
def test_layouts_of_two_gpus_match_one_gpu():
    compare(2, TWINS, LAYOUTS[2])


@pytest.mark.gpu4
def test_layouts_of_four_gpus_match_one_gpu():
    compare(4, TWINS, LAYOUTS[4])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_share_sequences_match_one_gpu(size: int):
    compare(size, TWINS, CONTEXT[size])


@pytest.mark.parametrize("size", SIZES)
def test_overlapped_layouts_match_one_gpu(size: int):
    compare(size, TWINS, OVERLAPPED[size])


# By number of ranks: the layout that saves, and the layouts that resume.
CHANGES = {2: ("pp2", ("tp2+sp", "dp2", "pp2 vpp2")), 4: ("tp2 pp2", ("tp4+sp", "pp4", "dp4"))}


def _save_and_resume(rank: int, size: int, folder: str) -> dict[str, Report]:
    first, resuming = CHANGES[size]
    half = partial(on_gpu, GPT2, precision="bf16-mixed")
    run_job(half(LAYOUTS[size][first], steps=3, save=folder), size)
    return {name: run_job(half(LAYOUTS[size][name], resume=folder), size) for name in resuming}


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_continues_under_other_layouts(size: int, tmp_path: Path):
    require_gpus(size)
    uninterrupted = run_job(TWINS["gpt2"])
    for reports in run_world(_save_and_resume, size, str(tmp_path / "saved"), backend="nccl"):
        for layout, report in reports.items():
            gaps = [
                abs(a - b) for a, b in zip(report.losses, uninterrupted.losses[3:], strict=True)
            ]
            assert max(gaps) < TOLERANCE["bf16-mixed"], f"{layout}: {gaps}"
