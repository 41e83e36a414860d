"""Steps that need more rows than ``experts.rows`` allows are run again with equal results; clones of
experts change no results; and every layout logs the same load of experts.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ExpertLoad
from lightning_megatron.errors import UnsupportedError
from tests.fits import GPT2, Job, Report, run_job
from tests.graphs.jobs import FULL, SEGMENTS
from tests.optimizer.fused_fits import fused
from tests.strategy.steered import (
    Changing,
    Excess,
    FusedSteered,
    differences,
    run_steered,
)
from tests.world import run_world

#: The first step needs too many rows in several passes. Then the validation does, and the limit
#: grows to 256 rows, which are enough for the second validation, and for all rows on one rank.
EXCESS: Excess = {
    ("train", 0, 0, 0): 3, ("train", 0, 1, 1): -7, ("val", 0, 1, 0): 2, ("train", 2, 0, 1): 100,
    ("train", 3, 1, 1): -128,
}  # fmt: skip
ONE_ROW: Excess = {("train", 1, 0, 0): 1}
#: The fourth batch runs by graphs; after the validation that follows, the limit is 256 rows.
CAPTURED: Excess = {("train", 3, 0, 0): -1, ("val", 0, 1, 0): 2, ("train", 6, 1, 1): 120}
#: In the middle of the second optimizer step, and at the end of the last one.
ACCUMULATED: Excess = {("train", 4, 1, 0): 3, ("train", 14, 0, 1): -40}
UPDATED: Excess = {("train", 6, 1, 1): 9}
#: Steps of several stages, and a validation.
STAGES: Excess = {("train", 2, 1, 1): 5, ("train", 3, 0, 0): -9, ("val", 0, 0, 1): 5}
#: Rows above an even share that clones take over, in several layers and steps.
UNEVEN: Excess = {("train", 0, 0, 0): 12, ("train", 1, 1, 1): -100, ("val", 0, 0, 0): 9}
#: Twelve rows are enough for a clone, and one row is not.
TOO_FEW: Excess = {("train", 1, 0, 0): 12, ("train", 1, 0, 1): 1}

EVALUATED = {"num_batches": 8, "trainer": {"val_check_interval": 4}}
SUMS: dict[str, Any] = {
    "num_batches": 15, "steps": 5,
    "trainer": {"accumulate_grad_batches": 3, "limit_val_batches": 0, "val_check_interval": None},
}  # fmt: skip
FUSED: dict[str, Any] = {
    "kind": FusedSteered, "num_batches": 8, "precision": "32-true", "norms": False,
    "trainer": {"limit_val_batches": 0},
}  # fmt: skip
#: Excess, graphs of the fit with a limit, number of repeated steps, and options of both fits, by the
#: number of ranks and name.
CASES: dict[int, dict[str, tuple[Excess, Any, int, dict[str, Any]]]] = {
    2: {
        "eager": (EXCESS, None, 2, {"kind": Changing}),
        "all recomputed": (
            ONE_ROW, None, 1,
            {"layout": {"recompute": "full", "experts.transport": "all_gather", "optimizer.zero": 0}},
        ),
        "segments": (CAPTURED, replace(SEGMENTS, evaluation=True), 2, EVALUATED),
        "sums by full graphs": (ACCUMULATED, FULL, 2, SUMS),
        "updates by full graphs": (UPDATED, replace(FULL, optimizer=True), 1, FUSED),
    },
    4: {
        "recomputed segments": (
            STAGES, SEGMENTS, 2,
            {"layout": {"pp": 2, "recompute": "full", "pipeline.stage_layers": [1, 1]}, "num_batches": 5},
        ),
    },
}  # fmt: skip
#: Layouts in which the load of experts is logged.
LAYOUTS: dict[str, dict[str, Any]] = {
    "vpp": {"pp": 2, "vpp": 2},
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "again": {"ep": 2, "recompute": "full"},
}


class FrozenExperts(Changing):
    """Freeze the experts whose numbers are in ``numbers``."""

    numbers = "01"

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            expert = re.search(r"\.experts\.(\d)\.", name)
            parameter.requires_grad_(expert is None or expert.group(1) not in self.numbers)


class AllExpertsFrozen(FrozenExperts):
    numbers = "0123"


class FreezesExperts(Changing):
    """Freeze all experts in the third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(batch_idx < 2 or ".experts." not in name)


def load_job(folder: str, **layout: Any) -> Job:
    """Return a job that logs the load of experts. With one sequence in a microbatch, every layout
    has the same microbatches.
    """
    experts = {
        "num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "layers": 2, "aux_loss": 0.01,
        "z_loss": 0.001, "capacity_factor": 1.0,
    }  # fmt: skip
    return Job(
        replace(GPT2, mlp_bias=False, ffn_hidden_size=16, experts=experts),
        {"microbatch_size": 1, **layout},
        steps=5,
        trainer={"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 2},
        callbacks=lambda: [ExpertLoad()],
    )


def compared(limited: Report, without: Report) -> tuple[Report, Report, list[str]]:
    return without, limited, differences(limited, without)


def run_pairs(size: int) -> dict[str, tuple[Report, Report, list[str]]]:
    """Train each case without a limit, and with one; return also their differences."""
    results = {}
    for name, (excess, graphs, _, options) in CASES[size].items():
        with fused():
            without = run_steered(None, excess, size=size, **options)
            limited = run_steered(1.0, excess, graphs, size=size, **options)
        results[name] = compared(limited, without)
    return results


def world(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = run_pairs(size)
    if size == 4:
        return results
    half = f"{folder}/half"
    run_steered(1.0, ONE_ROW, kind=Changing, steps=2, save=half)
    later = [
        run_steered(rows, {**EXCESS, **ONE_ROW}, kind=Changing, resume=half) for rows in (1.0, None)
    ]
    results["resumed"] = compared(*later)
    cloned = {"layout": {"experts.clones": 1}}
    results["clones"] = run_steered(None, UNEVEN, **cloned)
    within = run_steered(1.0, UNEVEN, **cloned)
    results["clones, limit"] = compared(within, results["clones"])
    few = {"layout": {"experts.clones": {"places": 1, "min_rows": 2}}}
    over = [run_steered(rows, TOO_FEW, **few) for rows in (1.0, None)]
    results["clones, over the limit"] = compared(*over)
    for name, clones in (("no clones, frozen", 0), ("clones, frozen", 1)):
        layout = {"experts.clones": clones}
        results[name] = run_steered(None, UNEVEN, kind=AllExpertsFrozen, layout=layout)
    for kind, message in (
        (FrozenExperts, r"of some experts of layer 0, on \[0\] of the 2 ranks of ep, is frozen"),
        (FreezesExperts, "only between epochs"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run_steered(None, {}, kind=kind, **cloned)
    for name, layout in LAYOUTS.items():
        run_job(load_job(f"{folder}/{name}", **layout), size)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_world(world, 2, str(folder))


@pytest.mark.parametrize("size", CASES)
def test_a_step_over_the_row_limit_equals_a_step_without_a_limit(size: int, request: Any) -> None:
    found = request.getfixturevalue("ranks") if size == 2 else run_world(world, 4, "")
    for name, (*_, num_failures, _) in CASES[size].items():
        for rank, results in enumerate(found):
            without, limited, differing = results[name]
            assert differing == [], f"{name}, rank {rank}"
            assert without.outcomes["failures"] == 0
            assert limited.outcomes["failures"] == num_failures, name
            assert len(limited.outcomes["warnings"]) == (0 if rank else num_failures), name
            assert len(limited.losses) > 1


def test_warnings_name_the_largest_need_and_the_limit_grows_after_the_second(ranks: Any) -> None:
    first, second = ranks[0]["eager"][1].outcomes["warnings"]
    assert (
        "layer 1 needed 135 rows on rank 1, experts.rows=1 has 128: the step was run again" in first
    )
    assert "1.06 would be enough" in first
    assert "layer 0 needed 130 rows on rank 0, experts.rows=1 has 128" in second
    assert re.search(r"and experts.rows is 1\.1\d? from now on", second)
    for results in ranks:
        assert 1.1 < results["eager"][1].outcomes["factor"] < 1.2
        assert results["all recomputed"][1].outcomes["factor"] == 1.0


def test_graphs_run_before_a_repeat_and_are_captured_again_after_the_limit_grows(
    ranks: Any,
) -> None:
    for results in ranks:
        graphs = results["segments"][1].outcomes["graphs"]
        assert graphs[2] > 0
        assert graphs[4] < max(graphs[5:])
        assert graphs[-1] > 0
        assert results["sums by full graphs"][1].outcomes["graphs"][-1] > 0


def test_a_fit_resumes_from_a_checkpoint_after_a_repeated_step(ranks: Any) -> None:
    for results in ranks:
        _, limited, differing = results["resumed"]
        assert differing == []
        assert limited.outcomes["failures"] > 0
        assert len(limited.losses) == 2


# ---- clones


def test_a_fit_with_clones_of_frozen_experts_matches_a_fit_without_clones(ranks: Any) -> None:
    for results in ranks:
        actual, expected = results["clones, frozen"], results["no clones, frozen"]
        assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-12)
        # Routers count the same experts; clones have moved rows.
        loads = [[step[layer][0] for step in run.outcomes["routed"] for layer in step]
                 for run in (actual, expected)]  # fmt: skip
        assert loads[0] == loads[1]
        assert actual.outcomes["routed"] != expected.outcomes["routed"]
        for name, (weight, _) in actual.pieces.items():
            torch.testing.assert_close(weight, expected.pieces[name][0], rtol=0, atol=1e-12)


def test_clones_keep_rows_within_a_limit_and_too_few_rows_for_a_clone_are_repeated(
    ranks: Any,
) -> None:
    for results in ranks:
        _, limited, differing = results["clones, limit"]
        assert (limited.outcomes["failures"], differing) == (0, [])
        _, too_small, differing = results["clones, over the limit"]
        assert (too_small.outcomes["failures"], differing) == (1, [])
    (warning,) = ranks[0]["clones, over the limit"][1].outcomes["warnings"]
    assert "layer 1 needed 129 rows on rank 0, experts.rows=1 has 128" in warning


# ---- load of experts


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """Read the logged values of experts, by step."""
    rows: dict[int, dict[str, float]] = {}
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {n: float(v) for n, v in row.items() if n.startswith("experts/") and v}
            if values:
                rows[int(row["step"])] = values
    return rows


def test_every_layout_logs_the_load_of_experts_of_one_process(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    run_job(load_job(str(tmp_path)))
    expected = logged(tmp_path)
    assert list(expected) == [1, 3]
    assert any(row["experts/dropped"] > 0 for row in expected.values())
    for name in ("vpp", "tp", "ep"):
        rows = logged(folder / name)
        assert list(rows) == [1, 3], name
        for step, row in expected.items():
            # With ep there are figures of ranks, too.
            of_ranks = {key: rows[step].pop(key) for key in rows[step].keys() - row.keys()}
            assert bool(of_ranks) == (name == "ep"), name
            assert rows[step] == pytest.approx(row, rel=1e-4), f"{name}, step {step}"
            assert of_ranks.items() <= logged(folder / "again")[step].items()
    for place in (tmp_path, folder / "vpp", folder / "ep"):
        assert (place / "expert_load.png").read_bytes().startswith(b"\x89PNG")
