"""Tests that experts train as one process in every expert grid: same losses, gradient norms and
final weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import GPT
from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.proof.test_layouts_equal import check
from tests.proof.training import KINDS as KINDS_OF_MODELS
from tests.proof.training import SEQUENCE, Job, Report, train, train_all
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

GRIDS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "ep4, all-to-all": {"ep": 4, "expert_transport": "all_to_all"},
    "ep4, one-sided": {"ep": 4, "expert_transport": "one_sided"},
    "ep2 edp2": {"ep": 2},
    "tp2 +sp, ep2": {"tp": 2, "ep": 2, "etp": 1},
    "tp2, etp2 ep2": {"tp": 2, "ep": 2, "sequence_parallel": False},
    "tp4 +sp, ep4, all-to-all": {"tp": 4, "ep": 4, "etp": 1, "expert_transport": "all_to_all"},
    # Only experts have replicas.
    "tp4 +sp, ep2 edp2": {"tp": 4, "ep": 2, "etp": 1},
    "tp4, etp4": {"tp": 4, "sequence_parallel": False},
    "tp2, etp2 ep2, one-sided": {
        "tp": 2,
        "ep": 2,
        "sequence_parallel": False,
        "expert_transport": "one_sided",
    },
    "pp2, ep2": {"pp": 2, "ep": 2},
    "pp2, ep2, one-sided": {"pp": 2, "ep": 2, "expert_transport": "one_sided"},
    "pp2 vpp2, edp2": {"pp": 2, "vpp": 2},
    "tp2 pp2 +sp, ep2": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
}
COMPARING = ("ep2 edp2", "tp4 +sp, ep4, all-to-all", "tp2, etp2 ep2, one-sided")
#: Layouts of the twins: only the strategy changes the router's bias and the shares of the last
#: step.
KINDS = {"experts": None, "experts, some layers": None, "experts, whole step": {}}


def jobs() -> dict[str, Job]:
    """Return every job of four processes by name."""
    # Grids of every transport of rows make the trial of their microbatches.
    runs = {
        f"experts, {name}": Job("experts", layout=options, compares=name in COMPARING)
        for name, options in GRIDS.items()
    }
    for kind in ("experts, some layers", "experts, whole step"):
        for name in ("ep4", "tp2 +sp, ep2", "tp2, etp2 ep2", "pp2, ep2"):
            runs[f"{kind}, {name}"] = Job(kind, layout=GRIDS[name], compares=False)
    special = [
        ("pp2, ep2", {"recompute": "full"}),
        ("tp2 +sp, ep2", {"recompute": "experts"}),
        ("ep2 edp2", {"zero": 0}),
        ("ep4, one-sided", {"recompute": "experts"}),
        ("pp2, ep2, one-sided", {"recompute": "full"}),
        ("pp2, ep2, one-sided", {"recompute": "expert_inputs", "schedule": "zb-h1"}),
        ("tp2, etp2 ep2", {"recompute": "expert_inputs"}),
    ]
    for name, option in special:
        runs[f"experts, {name}, {option}"] = Job(
            "experts", layout=GRIDS[name] | option, compares=False
        )
    runs["experts, ep2 edp2, float32"] = Job(
        "experts", "32-true", GRIDS["ep2 edp2"], compares=False
    )
    # Losses of routers are weighted by the counted tokens, also on stages that do not count tokens.
    for name in ("pp2, ep2", "pp2 vpp2, edp2", "tp2 +sp, ep2"):
        options = GRIDS[name] | {"microbatch_size": 1}
        runs[f"experts, {name}, counted"] = Job("experts", layout=options, counts=True)
    return chosen(
        runs,
        "experts, tp4 +sp, ep4, all-to-all",
        "experts, tp4 +sp, ep2 edp2",
        "experts, tp2, etp2 ep2, one-sided",
        "experts, some layers, ep4",
        "experts, whole step, pp2, ep2",
        "experts, pp2, ep2, {'recompute': 'full'}",
        "experts, tp2 +sp, ep2, {'recompute': 'experts'}",
        "experts, ep2 edp2, {'zero': 0}",
        "experts, pp2, ep2, one-sided, {'recompute': 'expert_inputs', 'schedule': 'zb-h1'}",
        "experts, ep2 edp2, float32",
        "experts, pp2 vpp2, edp2, counted",
    )


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, str], Report]:
    """Train every kind in this process."""
    reports = {
        (kind, "64-true"): train(Job(kind, layout=layout), 1, "cpu")
        for kind, layout in KINDS.items()
    }
    reports["experts", "32-true"] = train(Job("experts", "32-true"), 1, "cpu")
    reports["experts", "counted"] = train(
        Job("experts", layout={"microbatch_size": 1}, counts=True), 1, "cpu"
    )
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    """Train every job on four processes."""
    return run_world(train_all, 4, jobs(), str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("name", list(jobs()))
def test_every_expert_grid_trains_as_one_process(name, reports, twins):
    job = jobs()[name]
    check(
        job,
        [ranks[name] for ranks in reports],
        twins[job.kind, "counted" if job.counts else job.precision],
    )


def _error_of_unequal_sequences(rank: int, size: int) -> str:
    mesh = ParallelMesh.create(ParallelLayout(size, ep=2))
    model = GPT(KINDS_OF_MODELS["experts"], mesh)
    try:
        model(torch.zeros(1, SEQUENCE - 4 * rank, dtype=torch.long))
    except RankMismatchError as error:
        return str(error)
    finally:
        mesh.destroy()
    return ""


def test_microbatches_of_unequal_sizes_are_refused_on_all_ranks():
    for rank, error in enumerate(run_world(_error_of_unequal_sequences, 2)):
        assert (
            f"this rank has {SEQUENCE - 4 * rank}, the others have {SEQUENCE - 4} to {SEQUENCE}"
            in error
        )


def test_one_process_under_the_strategy_trains_as_ordinary_lightning(twins, tmp_path: Path):
    """One process under the strategy, in microbatches, equals ordinary Lightning."""
    for kind in ("experts", "experts, some layers"):
        job = Job(kind, layout={})
        check(job, [train(job, 1, "cpu", str(tmp_path / kind))], twins[kind, "64-true"])
