"""Tests that fits with clones of experts match one process and exchange checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.experts.transport import cloning_dispatcher
from tests.proof.test_layouts_equal import check
from tests.proof.training import Job, Report, train, train_all
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

STEPS = 4
GRIDS: dict[str, dict[str, Any]] = {
    "ep4, 1": {"ep": 4, "expert_clones": 1},
    "ep4, 2, experts recomputed": {"ep": 4, "expert_clones": 2, "recompute": "experts"},
    # Buckets of few parameters start during the backward pass.
    "ep2 edp2, 1": {"ep": 2, "expert_clones": 1, "bucket_size": 2000},
    "ep2 edp2, 2, zero 0": {"ep": 2, "expert_clones": 2, "zero": 0, "bucket_size": 2000},
    "tp2 +sp, ep2, 2, all recomputed": {
        **{"tp": 2, "ep": 2, "etp": 1, "expert_clones": 2},
        "recompute": "full",
    },
    "tp2, etp2 ep2, 1": {"tp": 2, "ep": 2, "sequence_parallel": False, "expert_clones": 1},
    "tp4 +sp, ep4, 1": {"tp": 4, "ep": 4, "etp": 1, "expert_clones": 1},
    # Only experts have replicas.
    "tp4 +sp, ep2 edp2, 2": {"tp": 4, "ep": 2, "etp": 1, "expert_clones": 2},
    "pp2, ep2, 1, all recomputed": {"pp": 2, "ep": 2, "expert_clones": 1, "recompute": "full"},
    "ep4, 2, inputs of experts again": {
        **{"ep": 4, "expert_clones": 2},
        "recompute": "expert_inputs",
    },
    "pp2, ep2, 2, zb-h1": {"pp": 2, "ep": 2, "expert_clones": 2, "schedule": "zb-h1"},
}
#: Two batches of half the size are one step.
ACCUMULATED = {"accumulate_grad_batches": 2}
#: A clone needs more rows than there are.
NEVER = {"places": 2, "min_rows": 10**6}


def jobs() -> dict[str, Job]:
    """Return every job of four processes by name."""
    # One grid makes the trial of its microbatches.
    runs = {
        name: Job("experts", layout=layout, compares=name == "ep4, 2, experts recomputed")
        for name, layout in GRIDS.items()
    }
    grid = GRIDS["ep2 edp2, 1"]
    runs["accumulated"] = Job("experts", layout=grid, trainer=ACCUMULATED, compares=False)
    runs["shared expert"] = Job("experts, some layers", layout=GRIDS["ep4, 1"], compares=False)
    tensor_grid = GRIDS["tp2, etp2 ep2, 1"]
    runs["whole step"] = Job("experts, whole step", layout=tensor_grid, compares=False)
    for name, clones in (("nothing moves", NEVER), ("without", 0)):
        runs[name] = Job("experts", layout=grid | {"expert_clones": clones}, compares=False)
    return chosen(
        runs,
        "ep4, 2, experts recomputed",
        "ep2 edp2, 1",
        "ep2 edp2, 2, zero 0",
        "tp2 +sp, ep2, 2, all recomputed",
        "ep4, 2, inputs of experts again",
        "accumulated",
        "shared expert",
        "whole step",
        "nothing moves",
        "without",
    )


#: Every fit continues from the checkpoint of the fit before it, up to a step.
CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "clones": (2, GRIDS["ep4, 1"]),
    "no clones": (3, {"tp": 2, "ep": 2, "etp": 1}),
    "other clones": (STEPS, GRIDS["pp2, ep2, 2, zb-h1"]),
}


def _run_jobs_and_chain(
    rank: int, size: int, folder: str
) -> tuple[dict[str, Report], dict[str, int], Report]:
    """Train every job, count the rows that clones take, and go through the chain."""
    place_clones, moved = cloning_dispatcher.place_clones, dict.fromkeys(jobs(), 0)
    reports = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, job in jobs().items():

            def counted(*sizes: Any, name: str = name) -> Any:
                clones = place_clones(*sizes)
                moved[name] += int(clones.amounts.sum())
                return clones

            patch.setattr(cloning_dispatcher, "place_clones", counted)
            reports |= train_all(rank, size, {name: job}, f"{folder}/{name}", STEPS)
    chain, last_saved = Report(), None
    for number, (step, layout) in enumerate(CHAIN.values()):
        saved = f"{folder}/chain/{number}"
        job = Job("experts", layout=layout, compares=False)
        report = train(job, size, "cpu", saved, steps=step, resume_from=last_saved)
        chain = replace(
            report, losses=chain.losses + report.losses, norms=chain.norms + report.norms
        )
        last_saved = saved
    return reports, moved, chain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clones")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[tuple[dict[str, Report], dict[str, int], Report]]:
    return run_world(_run_jobs_and_chain, 4, str(folder))


@pytest.fixture(scope="module")
def twins() -> dict[str, Report]:
    """Train every kind in this process."""
    kinds = {kind: Job(kind) for kind in ("experts", "experts, some layers")}
    kinds["experts, whole step"] = Job("experts, whole step", layout={})
    # Without the strategy, losses of routers are not divided by the number of batches.
    kinds["accumulated"] = Job("experts", layout={}, trainer=ACCUMULATED)
    return {name: train(job, 1, "cpu", steps=STEPS) for name, job in kinds.items()}


@pytest.mark.parametrize("name", list(jobs()))
def test_every_fit_with_clones_trains_as_one_process(name: str, ranks: Any, twins: Any) -> None:
    job = jobs()[name]
    moves = name not in ("nothing moves", "without")
    assert all((moved[name] > 0) == moves for _, moved, _ in ranks)
    is_accumulated = name == "accumulated"
    twin = twins["accumulated" if is_accumulated else job.kind]
    check(
        job, [reports[name] for reports, _, _ in ranks], twin, STEPS * (2 if is_accumulated else 1)
    )


def test_layouts_with_and_without_clones_load_each_others_checkpoints(
    ranks: Any, twins: Any
) -> None:
    check(Job("experts"), [chain for _, _, chain in ranks], twins["experts"], STEPS)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the content of every file, without the time of the save."""
    contents = {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    record = json.loads(contents["checkpoint.json"])
    untimed = {
        name: value for name, value in record.items() if name not in ("saved_at", "checksum")
    }
    return contents | {"checkpoint.json": json.dumps(untimed).encode()}


def test_checkpoints_with_clones_have_the_files_of_checkpoints_without(
    folder: Path, ranks: Any
) -> None:
    without = files_of(folder / "without" / "0")
    assert files_of(folder / "nothing moves" / "0") == without
    # A different order of sums changes only the last bits of numbers.
    moved = files_of(folder / "ep2 edp2, 1" / "0")
    assert {name: len(content) for name, content in moved.items()} == {
        name: len(content) for name, content in without.items()
    }
    assert moved != without
