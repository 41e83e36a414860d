"""Tests that context parallelism trains as one process with every transport."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import CudaGraphs
from tests.models.test_packed_documents import trained
from tests.proof import test_hugging_face as hugging_face
from tests.proof.test_layouts_equal import check
from tests.proof.training import STEPS, Job, Report, train, train_all
from tests.strategy.graph_fits import FULL, SEGMENTS, Fit, fit
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2 dp2": {"cp": 2},
    "cp4": {"cp": 4, "zero": 0},
    "cp4 hierarchical": {"cp": 4, "cp_transport": "hierarchical"},
    "cp2 dp2 ring": {"cp": 2, "cp_transport": "ring", "recompute": "selective"},
    "cp2 tp2+sp ring": {"cp": 2, "tp": 2, "cp_transport": "ring"},
    "cp2 pp2 all_gather": {"cp": 2, "pp": 2, "cp_transport": "all_gather"},
    "cp2 pp2 vpp2 ring": {
        **{"cp": 2, "pp": 2, "vpp": 2},
        **{"cp_transport": "ring", "recompute": "full"},
    },
    "cp2 ep2": {"cp": 2, "ep": 2},
    "cp4 ep4 ring": {"cp": 4, "ep": 4, "cp_transport": "ring"},
    "cp2 tp2+sp ep2": {"cp": 2, "tp": 2, "ep": 2, "etp": 1},
}
KINDS_OF = {
    # Learned positions.
    "gpt2-tied": ("cp2 dp2", "cp4 hierarchical", "cp2 tp2+sp ring", "cp2 pp2 all_gather"),
    "llama-untied": ("cp4", "cp2 tp2+sp ring", "cp2 pp2 vpp2 ring"),
    # A window that ends inside a piece.
    "gemma-tied": ("cp4", "cp2 dp2 ring"),
    "experts": ("cp2 ep2", "cp4 ep4 ring", "cp2 pp2 all_gather"),
    "experts, whole step": ("cp2 tp2+sp ep2",),
}


COMPARING = ("gpt2-tied", "experts")


def jobs() -> dict[str, Job]:
    """Return every job of four processes by name."""
    # Two kinds make the trials of their microbatches.
    runs = {
        f"{kind}, {name}": Job(kind, layout=LAYOUTS[name], compares=kind in COMPARING)
        for kind, names in KINDS_OF.items()
        for name in names
    }
    counted = Job("gpt2-tied", layout=LAYOUTS["cp2 dp2"], counts=True, compares=False)
    return chosen(
        runs | {"counted, cp2 dp2": counted},
        "gpt2-tied, cp4 hierarchical",
        "llama-untied, cp2 pp2 vpp2 ring",
        "gemma-tied, cp2 dp2 ring",
        "experts, cp2 pp2 all_gather",
        "experts, whole step, cp2 tp2+sp ep2",
        "counted, cp2 dp2",
    )


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of four."""

    reports: dict[str, Report]
    continued: dict[str, Report]
    fine_tuned: dict[str, hugging_face.Report]
    differences: dict[str, list[str]]
    packed: dict[str, Fit]


#: Layout that saves a checkpoint, and layout that continues from it.
WAYS = {
    "cp2 tp2+sp to dp4": ("cp2 tp2+sp ring", {}),
    "pp2 dp2 to cp4": ("pp2 dp2", LAYOUTS["cp4"]),
}
SAVED = LAYOUTS | {"pp2 dp2": {"pp": 2}}
TUNED = chosen(
    {
        "cp2 tp2+sp": {"cp": 2, "tp": 2},
        "cp2 pp2": {"cp": 2, "pp": 2},
    },
    "cp2 tp2+sp",
)
GRAPHS = chosen(
    {
        "segments, ring": (SEGMENTS, {"cp": 4, "cp_transport": "ring"}),
        "segments, pp2": (SEGMENTS, {"cp": 2, "pp": 2, "cp_transport": "all_gather"}),
        "full, all_to_all": (FULL, {"cp": 2}),
    },
    "segments, pp2",
)
#: Rows of documents, whose length is no multiple of 2 cp.
PACKED: dict[str, tuple[CudaGraphs | None, dict[str, Any]]] = chosen(
    {
        "cp4": (None, {"cp": 4}),
        "cp4 ring": (None, {"cp": 4, "cp_transport": "ring"}),
        "cp2 pp2 ring": (None, {"cp": 2, "pp": 2, "cp_transport": "ring"}),
        "cp2 tp2+sp all_gather": (None, {"cp": 2, "tp": 2, "cp_transport": "all_gather"}),
        "cp4 ring, segments": (SEGMENTS, {"cp": 4, "cp_transport": "ring"}),
        "cp4 hierarchical, full": (FULL, {"cp": 4, "cp_transport": "hierarchical"}),
    },
    "cp2 tp2+sp all_gather",
    "cp4 ring, segments",
    "cp4 hierarchical, full",
)


def run_all(rank: int, size: int, folder: Path, models: Path) -> RankReport:
    """Run all jobs, continued and packed trainings, and graphs on four processes."""
    continued = {}
    for way, (before, after) in WAYS.items():
        saved = os.path.join(folder, f"saved {before}")
        job = Job("gpt2-tied", layout=SAVED[before], compares=False)
        train(job, size, "cpu", saved, steps=2)
        job = Job("gpt2-tied", layout=after, compares=False)
        continued[way] = train(job, size, "cpu", resume_from=saved)
    tuned = {
        name: hugging_face.train(str(models / "llama" / "tokens"), "tokens", layout, size)
        for name, layout in TUNED.items()
    }
    differences = {}
    for name, (graphs, layout) in GRAPHS.items():
        by_graphs = fit(graphs, size, layout)
        assert all(by_graphs.num_graphs[4:]), by_graphs.num_graphs
        differences[name] = by_graphs.differences_from(fit(None, size, layout))
    packed = {
        name: trained(graphs, "none", size, layout) for name, (graphs, layout) in PACKED.items()
    }
    reports = train_all(rank, size, jobs(), str(folder))
    return RankReport(reports, continued, tuned, differences, packed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama as Hugging Face does."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    name, settings = hugging_face.CONFIGS["llama"]
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path / "llama" / "tokens")
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[RankReport]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4, tmp_path_factory.mktemp("four"), models)


@pytest.fixture(scope="module")
def twins() -> dict[tuple[str, bool], Report]:
    """Train every kind in this process; only the strategy measures the load of full steps."""
    return {
        (kind, counts): train(Job(kind, layout={"microbatch_size": 8}, counts=counts), 1, "cpu")
        for kind, counts in {(job.kind, job.counts) for job in jobs().values()}
    }


@pytest.mark.parametrize("name", list(jobs()))
def test_every_layout_trains_as_one_process(name, ranks, twins):
    job = jobs()[name]
    check(job, [rank.reports[name] for rank in ranks], twins[job.kind, job.counts])


@pytest.mark.parametrize("way", list(WAYS))
def test_checkpoints_continue_with_and_without_context_parallelism(way, ranks, twins):
    twin = twins["gpt2-tied", False]
    for rank in ranks:
        losses = torch.tensor(rank.continued[way].losses)
        assert len(losses) == STEPS - 2
        torch.testing.assert_close(losses, torch.tensor(twin.losses[2:]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", list(TUNED))
def test_an_unchanged_hugging_face_module_trains_as_one_process(name, ranks, models):
    twin = hugging_face.train(str(models / "llama" / "tokens"), "tokens", None, 1)
    for rank in ranks:
        report = rank.fine_tuned[name]
        assert report.is_swapped
        losses = torch.tensor(report.losses)
        torch.testing.assert_close(losses, torch.tensor(twin.losses), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(GRAPHS))
def test_graphs_are_bitwise_equal_to_eager_steps(name, ranks):
    assert [rank.differences[name] for rank in ranks] == [[]] * 4


@pytest.fixture(scope="module")
def packed_twin() -> Fit:
    """Train on rows of documents in this process."""
    return trained(None, "none")


@pytest.mark.parametrize("name", list(PACKED))
def test_rows_of_documents_train_as_in_one_process(name, ranks, packed_twin):
    close = {"rtol": 0, "atol": 1e-10}
    for rank in ranks:
        fit = rank.packed[name]
        assert PACKED[name][0] is None or fit.num_graphs[-1] > 0
        if fit.losses:
            losses = torch.tensor(fit.losses), torch.tensor(packed_twin.losses)
            torch.testing.assert_close(*losses, **close)
        for key, weight in fit.weights.items():
            torch.testing.assert_close(weight, packed_twin.weights[key], **close)
    assert len(set(packed_twin.losses)) == 5
