"""Steps that need more rows than ``expert_rows`` allows are run again with equal results; clones of
experts change no results; and every layout logs the same load of experts.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import GPT, ExpertLoad, GPTConfig, ParallelPlanError, UnsupportedError
from lightning_megatron.strategy.logs import run_table
from tests.fits import GPT2, SEQUENCE, Job, Report, run_job
from tests.graphs.jobs import FULL, SEGMENTS
from tests.graphs.updates import fused
from tests.strategy.steered import (
    Changing,
    Excess,
    FusedSteered,
    Steered,
    differences,
    run_steered,
)
from tests.world import run_world

AGAIN = "the step was run again without a limit"
#: The first step needs too many rows in several passes. Then the validation does, and the limit
#: grows to 256 rows, which are enough for the second validation, and for all rows on one rank.
EXCESS: Excess = {
    ("train", 0, 0, 0): 3,
    ("train", 0, 1, 1): -7,
    ("val", 0, 1, 0): 2,
    ("train", 2, 0, 1): 100,
    ("train", 3, 1, 1): -128,
}
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
    "num_batches": 15,
    "steps": 5,
    "trainer": {"accumulate_grad_batches": 3, "limit_val_batches": 0, "val_check_interval": None},
}
FUSED: dict[str, Any] = {
    "kind": FusedSteered,
    "num_batches": 8,
    "precision": "32-true",
    "norms": False,
    "trainer": {"limit_val_batches": 0},
}
#: Excess, graphs of the fit with a limit, number of repeated steps, and options of both fits.
CASES: dict[str, tuple[Excess, Any, int, dict[str, Any]]] = {
    "eager": (EXCESS, None, 2, {"kind": Changing}),
    "inputs of experts again": (
        ONE_ROW,
        None,
        1,
        {"kind": Changing, "layout": {"recompute": "expert_inputs"}},
    ),
    "all recomputed, all_gather, zero 0": (
        ONE_ROW,
        None,
        1,
        {"layout": {"recompute": "full", "expert_transport": "all_gather", "zero": 0}},
    ),
    "full": (CAPTURED, replace(FULL, evaluation=True), 2, EVALUATED),
    "segments": (CAPTURED, replace(SEGMENTS, evaluation=True), 2, EVALUATED),
    "sums by graphs": (ACCUMULATED, FULL, 2, SUMS),
    "updates by graphs": (UPDATED, replace(FULL, optimizer=True), 1, FUSED),
}
#: The same on four ranks, in stages.
CASES_OF_STAGES: dict[str, tuple[Excess, Any, int, dict[str, Any]]] = {
    "zb-h1": (STAGES, None, 2, {"layout": {"pp": 2, "schedule": "zb-h1", "stage_layers": [1, 1]}}),
    "recomputed segments": (
        STAGES,
        SEGMENTS,
        2,
        {"layout": {"pp": 2, "recompute": "full", "stage_layers": [1, 1]}, "num_batches": 5},
    ),
}
#: Layouts in which the load of experts is logged.
LAYOUTS: dict[str, dict[str, Any]] = {
    "vpp": {"pp": 2, "vpp": 2},
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


class HidesConfiguration(Changing):
    """Have no configuration until the model is built."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.sizes, self.config = self.config, None  # type: ignore[assignment]

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        self.model = GPT(self.sizes, mesh=mesh)


def run_pairs(
    cases: dict[str, tuple[Excess, Any, int, dict[str, Any]]], size: int
) -> dict[str, tuple[Report, Report, list[str]]]:
    """Train each case without a limit, and with one; return also their differences."""
    results = {}
    for name, (excess, graphs, _, options) in cases.items():
        with fused():
            without = run_steered(None, excess, size=size, **options)
            limited = run_steered(1.0, excess, graphs, size=size, **options)
        results[name] = without, limited, differences(limited, without)
    return results


def refusal(kind: type[Steered], clones: int = 1) -> str:
    """Return the message of the refusal to train a module with clones."""
    with pytest.raises((ParallelPlanError, UnsupportedError)) as raised:
        run_steered(None, {}, kind=kind, layout={"expert_clones": clones})
    return str(raised.value)


def load_job(folder: str, **layout: Any) -> Job:
    """Return a job that logs the load of experts. With one sequence in a microbatch, every layout
    has the same microbatches.
    """
    experts = {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 8,
        "layers": 2,
        "aux_loss": 0.01,
        "z_loss": 0.001,
        "capacity_factor": 1.0,
    }
    return Job(
        replace(GPT2, mlp_bias=False, ffn_hidden_size=16, experts=experts),
        {"microbatch_size": 1, **layout},
        steps=5,
        trainer={"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 2},
        callbacks=lambda: [ExpertLoad()],
    )


def world_of_two(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = run_pairs(CASES, size)
    half = f"{folder}/half"
    run_steered(1.0, ONE_ROW, kind=Changing, steps=2, save=half)
    later = [
        run_steered(rows, {**EXCESS, **ONE_ROW}, kind=Changing, resume=half) for rows in (None, 1.0)
    ]
    results["resumed"] = *later, differences(*later)
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_table, "rank_zero_info", messages.append)
        layout = {"expert_clones": 1, "expert_transport": "auto"}
        results["clones"] = run_steered(None, UNEVEN, layout=layout)
    results["table"] = messages
    results["no clones"] = run_steered(None, UNEVEN)
    within = run_steered(1.0, UNEVEN, layout={"expert_clones": 1})
    results["clones, limit"] = results["clones"], within, differences(within, results["clones"])
    few = {"layout": {"expert_clones": {"places": 1, "min_rows": 2}}}
    enough, too_small = (run_steered(rows, TOO_FEW, **few) for rows in (None, 1.0))
    results["clones, over the limit"] = enough, too_small, differences(too_small, enough)
    for name, clones in (("no clones, frozen", 0), ("clones, frozen", 1)):
        layout = {"expert_clones": clones}
        results[name] = run_steered(None, UNEVEN, kind=AllExpertsFrozen, layout=layout)
    results["some frozen"] = refusal(FrozenExperts)
    results["freezing"] = refusal(FreezesExperts)
    results["too many"] = refusal(HidesConfiguration, 3)
    for name, layout in LAYOUTS.items():
        run_job(load_job(f"{folder}/{name}", **layout), size)
    return results


def world_of_four(rank: int, size: int) -> dict[str, tuple[Report, Report, list[str]]]:
    return run_pairs(CASES_OF_STAGES, size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_world(world_of_two, 2, str(folder))


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    return run_world(world_of_four, 4)


def check(name: str, num_failures: int, ranks: list[dict[str, Any]]) -> None:
    """Check that a fit with a limit equals the fit without one, after this many repeats."""
    for rank, results in enumerate(ranks):
        without, limited, differing = results[name]
        assert differing == [], f"{name}, rank {rank}"
        assert (without.outcomes["failures"], limited.outcomes["failures"]) == (0, num_failures)
        warnings = limited.outcomes["warnings"]
        assert warnings == [] if rank else len(warnings) == num_failures
        assert len(limited.losses) > 1


@pytest.mark.parametrize("name", CASES)
def test_a_step_over_the_row_limit_equals_a_step_without_a_limit(name: str, ranks: Any) -> None:
    check(name, CASES[name][2], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_OF_STAGES)
def test_all_pipeline_stages_repeat_a_step_over_the_row_limit(name: str, stages: Any) -> None:
    check(name, CASES_OF_STAGES[name][2], stages)


def test_warnings_name_the_largest_need_and_the_limit_grows_after_the_second(ranks: Any) -> None:
    first, second = ranks[0]["eager"][1].outcomes["warnings"]
    assert first == (
        f"experts: layer 1 needed 135 rows on rank 1, expert_rows=1 has 128: {AGAIN}; 1.06 would be "
        "enough."
    )
    assert "layer 0 needed 130 rows on rank 0, expert_rows=1 has 128" in second
    assert re.search(r"and expert_rows is 1\.1\d? from now on", second)
    for results in ranks:
        assert 1.1 < results["eager"][1].outcomes["factor"] < 1.2
        assert results["inputs of experts again"][1].outcomes["factor"] == 1.0


def test_graphs_run_before_a_repeat_and_are_captured_again_after_the_limit_grows(
    ranks: Any,
) -> None:
    for results in ranks:
        graphs = results["segments"][1].outcomes["graphs"]
        assert graphs[2] > 0
        assert graphs[4] < max(graphs[5:])
        assert graphs[-1] > 0
        assert results["full"][1].outcomes["graphs"][-1] > 0


def test_a_fit_resumes_from_a_checkpoint_after_a_repeated_step(ranks: Any) -> None:
    for results in ranks:
        _, limited, differing = results["resumed"]
        assert differing == []
        assert limited.outcomes["failures"] > 0
        assert len(limited.losses) == 2


# ---- clones


@pytest.mark.parametrize("kind", ["", ", frozen"])
def test_a_fit_with_clones_matches_a_fit_without_clones(ranks: Any, kind: str) -> None:
    for results in ranks:
        actual, expected = results[f"clones{kind}"], results[f"no clones{kind}"]
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
    assert "layer 1 needed 129 rows on rank 0, expert_rows=1 has 128" in warning


def test_the_run_table_shows_clones_and_the_transport_that_they_need(ranks: Any) -> None:
    rows = [line for text in ranks[0]["table"] for line in text.splitlines()]
    (clones,) = [row for row in rows if "clones of experts" in row]
    assert re.search(r"at most 1 per rank +of any number of rows on cpu", clones)
    (transport,) = [row for row in rows if "expert transport" in row]
    assert "one_sided" in transport
    assert "expert_clones needs it" in transport


def test_experts_frozen_on_some_ranks_or_within_an_epoch_and_too_many_places_are_refused(
    ranks: Any,
) -> None:
    for results in ranks:
        assert (
            "of some experts of layer 0, on [0] of the 2 ranks of ep, is frozen"
            in (results["some frozen"])
        )
        assert "only between epochs" in results["freezing"]
        assert results["too many"].startswith("expert_clones (3) must be at most 2: with ep (2)")


# ---- load of experts

FIGURES = {"max_over_mean", "dropped", "entropy", "balance_loss", "z_loss"}
RANK_FIGURES = (
    "rank_max_over_mean",
    "rank_max_over_mean_after",
    "moved",
    "clones",
    "rows_needed",
)


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """Read the logged values of experts, by step."""
    rows: dict[int, dict[str, float]] = {}
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {n: float(v) for n, v in row.items() if n.startswith("experts/") and v}
            if values:
                rows[int(row["step"])] = values
    return rows


def check_rows(rows: dict[int, dict[str, float]]) -> None:
    assert list(rows) == [1, 3]
    for row in rows.values():
        for layer in (1, 3):
            figures = {name: row[f"experts/layer_{layer}/{name}"] for name in FIGURES}
            shares = [row[f"experts/layer_{layer}/load/expert_{expert}"] for expert in range(4)]
            assert sum(shares) == pytest.approx(1.0)
            assert figures["max_over_mean"] == pytest.approx(4 * max(shares))
            assert 0.0 < figures["entropy"] <= math.log(4)
            assert 0.9 < figures["balance_loss"] < 4
            assert 0.0 <= figures["dropped"] < 0.5
        for name in FIGURES:
            mean = (row[f"experts/layer_1/{name}"] + row[f"experts/layer_3/{name}"]) / 2
            assert row[f"experts/{name}"] == pytest.approx(mean)
    assert any(row["experts/dropped"] > 0 for row in rows.values())


def check_ranks(row: dict[str, float], recomputed: dict[str, float]) -> None:
    """Check the figures of ranks also against a fit with full recomputation, and remove them."""
    for layer in (1, 3):
        before, after, moved, clones, needed = (
            row[f"experts/layer_{layer}/{name}"] for name in RANK_FIGURES
        )
        assert 1.0 <= before <= 2.0
        assert (after, moved, clones) == (before, 0.0, 0.0)
        # In some microbatch some rank has at least the mean.
        dropped = row[f"experts/layer_{layer}/dropped"]
        assert (1.0 - dropped) * SEQUENCE * 2 <= needed <= 2 * SEQUENCE * 2
    for name in [name for name in row if name.rpartition("/")[2] in RANK_FIGURES]:
        assert row.pop(name) == recomputed[name], name


def test_every_layout_logs_the_load_of_experts_of_one_process(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "lightning-megatron[plot]"')
    run_job(load_job(str(tmp_path)))
    expected = logged(tmp_path)
    check_rows(expected)
    recomputed = logged(folder / "again")
    for name in ("vpp", "ep"):
        rows = logged(folder / name)
        assert list(rows) == list(expected), name
        for step, row in expected.items():
            if name == "ep":
                check_ranks(rows[step], recomputed[step])
            assert rows[step] == pytest.approx(row, rel=1e-4), f"{name}, step {step}"
    for place in (tmp_path, folder / "vpp", folder / "ep"):
        assert (place / "expert_load.png").read_bytes().startswith(b"\x89PNG")
