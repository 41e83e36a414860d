"""Graphs of full steps gather updated parameters and sum gradients, and every other reader of
parameters gets the values of eager training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import ReplicaMismatchError
from lightning_megatron.graphs.step_graph import StepGraph
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.parameter_gather import ParameterGather
from lightning_megatron.optimizer.reduction import GradientReducer
from tests.fits import VOCABULARY, Job, Module, Report, Tokens
from tests.graphs import jobs
from tests.graphs.jobs import FULL, run_graphs
from tests.optimizer.fused_fits import SMALL
from tests.world import run_world

#: Every fifth batch is smaller. A validation follows each third batch, a checkpoint the seventh,
#: and a read of ``parameter.data`` the eighth.
NUM_STEPS, SAVED, READ = 12, 7, 8


class Plain(Module):
    """Layers of torch, which do not wait for their parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Readers(pl.Callback):
    """Read parameters between steps in several ways: by a checkpoint, of which a hook gets the state,
    and directly.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        number = trainer.fit_loop.total_batch_idx + 1
        if number == SAVED:
            trainer.save_checkpoint(self.folder)
            self.outcomes["files"] = contents_of(self.folder)
        elif number == READ:
            self.outcomes["read"] = [p.data.tolist() for p in module.parameters()]

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        self.outcomes["saved"] = {name: tensor.tolist() for name, tensor in state.items()}


def contents_of(folder: Path) -> dict[str, Any]:
    """Return the contents of all files of a checkpoint that do not depend on the save."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents: dict[str, Any] = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    header = json.loads(contents["checkpoint.json"])
    timed = ("saved_at", "save_number", "checksum")
    contents["checkpoint.json"] = {key: value for key, value in header.items() if key not in timed}
    return contents


def fit_reading(folder: Path, is_captured: bool, job: Job) -> Report:
    """Fit on two ranks, with validations, a checkpoint and smaller batches between the steps."""
    replays: Counter[str] = Counter()
    replay = StepGraph.replay

    def count_replay(graph: StepGraph[Any], *args: Any) -> Any:
        replays["gathers" if graph.effects.gathers else "complete"] += 1
        replays["sums"] += bool(graph.effects.gradients.sums)
        return replay(graph, *args)

    place = folder / ("graphs" if is_captured else "eager")
    job = replace(job, callbacks=lambda: [Readers(place)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "replay", count_replay)
        report = run_graphs(job, FULL if is_captured else None, 2)
    report.outcomes["kinds"] = {kind for kind, number in replays.items() if number}
    return report


def differences(actual: Report, expected: Report) -> set[str]:
    """Return the names of records that are not equal bit by bit."""
    readers = ("files", "read", "saved")
    assert actual.outcomes.keys() == expected.outcomes.keys(), "both read alike"
    unequal = {name for name in readers if actual.outcomes.get(name) != expected.outcomes.get(name)}
    return unequal | set(jobs.differences(actual, expected))


def job_of(layout: dict[str, Any], model: Any = SMALL) -> Job:
    """Return a job of two epochs and a half."""
    batch = 4 if layout.keys() & {"tp", "pp"} else 8
    reads = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    return Job(
        model, {"optimizer.overlap_parameters": True, **layout}, steps=NUM_STEPS, norms=False, batch=batch,
        data=partial(Tokens, 5 * batch - 2, 5 * batch), validation=partial(Tokens, 8, 8),
        trainer={**reads, "log_every_n_steps": 2},
    )  # fmt: skip


#: Jobs, and what their replays do: gather parameters, find them complete, sum gradients over ranks.
CASES: dict[str, tuple[Job, set[str]]] = {
    "dp2": (job_of({"optimizer.bucket_size": 600}), {"gathers", "complete", "sums"}),
    "dp2, plain layers": (job_of({}, Plain), {"gathers", "complete", "sums"}),
    "pp2, tied": (job_of({"pp": 2}), {"complete", "sums"}),
    "tp2, sequence parallel": (job_of({"tp": 2}), {"complete", "sums"}),
}


def _skip_gathers(patch: pytest.MonkeyPatch, by_graphs: bool) -> None:
    """Let graphs, or only eager steps, treat parameters as complete that must be gathered."""
    begin = ParameterGather.begin

    def begin_or_skip(gather: ParameterGather) -> None:
        if (gather._recorded is not None) != by_graphs:
            begin(gather)
        elif gather.is_deferred:
            gather.mark_gathered()
            if gather._recorded is not None:
                gather._recorded.gathers = True

    patch.setattr(ParameterGather, "begin", begin_or_skip)


def _skip_sums(patch: pytest.MonkeyPatch) -> None:
    """Let graphs omit sums that eager steps compute at their end."""
    patch.setattr(GradientReducer, "sum_up", _start_without_sums)


def _start_without_sums(reducer: GradientReducer) -> None:
    reducer._starts.end()
    for bucket in reducer._starts.buckets:
        reducer._start(bucket)
        bucket.wait()


#: Omissions: the case that reveals each of them, and records that change.
OMISSIONS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "a graph does not gather": ("dp2", lambda patch: _skip_gathers(patch, True), {"losses"}),
    "others do not gather": ("dp2", lambda patch: _skip_gathers(patch, False), {"replicas"}),
    "readers do not wait": (
        "dp2, plain layers",
        lambda patch: patch.setattr(MainParameters, "wait", lambda main: None),
        {"validated", "read", "saved"},
    ),
    "a graph does not add tied gradients": ("pp2, tied", _skip_sums, {"losses"}),
    "a graph does not add partial gradients": ("tp2, sequence parallel", _skip_sums, {"losses"}),
}


def _two_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    eager = {}
    for name, (job, _) in CASES.items():
        eager[name] = fit_reading(folder / name, False, job)
        graphs = fit_reading(folder / name, True, job)
        outcomes[name] = differences(graphs, eager[name]), graphs.outcomes["kinds"]
    for name, (case, omit, _) in OMISSIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            omit(patch)
            try:
                graphs = fit_reading(folder / name, True, CASES[case][0])
                outcomes[name] = differences(graphs, eager[case])
            except ReplicaMismatchError:
                outcomes[name] = {"replicas"}
    resumed = [
        fit_reading(
            folder / "again",
            is_captured,
            replace(CASES["dp2"][0], steps=15, resume=str(folder / "dp2" / way)),
        )
        for way, is_captured in (("eager", False), ("graphs", True))
    ]
    outcomes["resumed"] = differences(resumed[1], resumed[0]), resumed[1].outcomes["kinds"]
    return outcomes


def test_graphs_gather_and_sum_like_eager_steps_and_no_reader_gets_old_values(
    tmp_path: Path,
) -> None:
    for outcomes in run_world(_two_ranks, 2, tmp_path):
        for name, (_, kinds) in CASES.items():
            assert outcomes[name] == (set(), kinds), name
        for name, (_, _, changed) in OMISSIONS.items():
            assert changed <= outcomes[name], name
        unequal, kinds = outcomes["resumed"]
        assert unequal == set()
        assert "gathers" in kinds
