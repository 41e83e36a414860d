"""Tests that losses, gradient norms and final weights match one process in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.proof.training import STEPS, Job, Report, train, train_all
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

LAYOUTS = {
    # Without stages, two microbatches per step test as much as four, with half of the messages.
    "tp4": {"tp": 4, "sequence_parallel": False, "microbatch_size": 4},
    "tp4+sp": {"tp": 4, "sequence_parallel": True, "microbatch_size": 4},
    "pp4": {"pp": 4},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "dp4": {},
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "tp2 pp2 +sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}


def jobs() -> dict[str, Job]:
    """Return every job of four processes by name."""
    plain = [(kind, layout) for layout in LAYOUTS for kind in ("gpt2-tied", "llama-untied")]
    further_kinds = ("gpt2-untied", "llama-tied", "post-norm")
    plain += [
        (kind, layout) for layout in ("tp4+sp", "pp2 vpp2 dp2", "tp2 pp2") for kind in further_kinds
    ]
    plain += [("gemma-tied", layout) for layout in ("tp4", "tp2 pp2 +sp")]
    runs = {
        f"{kind}, {layout}": Job(kind, layout=LAYOUTS[layout], compares=kind == "gpt2-tied")
        for kind, layout in plain
    }
    for layout in ("tp4+sp", "pp2 vpp2 dp2", "dp4", "tp2 pp2 +sp"):
        runs[f"dropout, {layout}"] = Job(
            "dropout", layout=LAYOUTS[layout], compares=layout == "tp2 pp2 +sp"
        )
    for layout in ("tp4+sp", "pp2 vpp2 dp2", "dp4", "tp2 pp2"):
        runs[f"gpt2-tied, {layout}, float32"] = Job(
            "gpt2-tied", "32-true", LAYOUTS[layout], compares=layout == "tp2 pp2"
        )
    special = [
        ("llama-untied", "tp2 pp2 +sp", {"recompute": "full"}),
        ("dropout", "pp4", {"recompute": "full"}),
        ("dropout", "tp2 pp2", {"recompute": "selective"}),
        ("gpt2-tied", "pp4", {"schedule": "gpipe"}),
        ("gpt2-tied", "tp2 pp2 +sp", {"recompute": {"parts": ["norms", "activations"]}}),
        ("llama-untied", "tp2 pp2", {"recompute": {"layers": 1, "at": "last"}}),
        ("dropout", "pp4", {"recompute": {"offload": True}}),
    ]
    for kind, layout, option in special:
        runs[f"{kind}, {layout}, {option}"] = Job(
            kind, layout=LAYOUTS[layout] | option, compares=False
        )
    return chosen(
        runs,
        "gpt2-tied, tp4",
        "gpt2-tied, dp4",
        "llama-tied, tp4+sp",
        "gpt2-untied, pp2 vpp2 dp2",
        "post-norm, tp2 pp2",
        "gemma-tied, tp2 pp2 +sp",
        "gpt2-tied, tp2 pp2, float32",
        "dropout, pp2 vpp2 dp2",
        "dropout, pp4, {'recompute': 'full'}",
        "dropout, tp2 pp2, {'recompute': 'selective'}",
        "gpt2-tied, pp4, {'schedule': 'gpipe'}",
        "gpt2-tied, tp2 pp2 +sp, {'recompute': {'parts': ['norms', 'activations']}}",
        "llama-untied, tp2 pp2, {'recompute': {'layers': 1, 'at': 'last'}}",
        "dropout, pp4, {'recompute': {'offload': True}}",
    )


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, str], Report]:
    """Train every kind in this process, with ordinary Lightning."""
    return {
        (kind, precision): train(Job(kind, precision), 1, "cpu")
        for kind, precision in {(job.kind, job.precision) for job in jobs().values()}
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    """Train every job on four processes."""
    return run_world(train_all, 4, jobs(), str(tmp_path_factory.mktemp("four")))


@pytest.mark.parametrize("name", list(jobs()))
def test_every_layout_trains_as_one_process(name, reports, twins):
    job = jobs()[name]
    check(job, [ranks[name] for ranks in reports], twins[job.kind, job.precision])


def test_tensor_pipeline_and_data_parallel_together_train_as_one_process(twins, tmp_path: Path):
    options = {"tp": 2, "pp": 2, "sequence_parallel": True}
    kinds = chosen(("gpt2-tied", "llama-untied"), "llama-untied")
    cases = {kind: Job(kind, "64-true", options) for kind in kinds}
    ranks = run_world(train_all, 8, cases, str(tmp_path))
    for kind, job in cases.items():
        check(job, [reports[kind] for reports in ranks], twins[kind, "64-true"])


def check(job: Job, ranks: list[Report], twin: Report, steps: int = STEPS) -> None:
    """Compare the reports of all ranks with the report of one process."""
    close = {"rtol": 0.0, "atol": TOLERANCE[job.precision]}
    assert len(twin.losses) == steps
    assert twin.losses[-1] < twin.losses[0]
    for report in ranks:
        torch.testing.assert_close(torch.tensor(report.losses), torch.tensor(twin.losses), **close)
        torch.testing.assert_close(torch.tensor(report.norms), torch.tensor(twin.norms), **close)
    weights = ranks[0].weights
    assert set(weights) == set(twin.weights)
    for name, weight in weights.items():
        # The vocabulary's padding belongs to no full tensor.
        expected = twin.weights[name].narrow(0, 0, weight.shape[0])
        torch.testing.assert_close(
            weight, expected, **close, msg=f"{name}: {(weight - expected).abs().max()}"
        )
