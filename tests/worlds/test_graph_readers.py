"""Graphs of full steps gather updated parameters and sum gradients, and every other reader of
parameters gets the values of eager training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron.errors import ReplicaMismatchError
from lightning_megatron.graphs.step_graph import StepGraph
from lightning_megatron.training.gradients import GradientReducer
from lightning_megatron.training.main_parameters import MainParameters
from lightning_megatron.training.parameter_gather import ParameterGather
from tests.strategy.graph_fits import FULL, Fit, fit
from tests.strategy.tiny import VOCABULARY, TinyLM
from tests.world import run_world

#: Every fifth batch is smaller. A validation follows each third batch, a checkpoint the seventh,
#: and a read of ``parameter.data`` the eighth.
NUM_STEPS, SAVED, READ = 12, 7, 8


class Quiet(TinyLM):
    """The small GPT without hooks that might read parameters or gradients."""

    on_before_zero_grad = LightningModule.on_before_zero_grad
    on_after_backward = LightningModule.on_after_backward
    on_before_optimizer_step = LightningModule.on_before_optimizer_step


class Plain(Quiet):
    """Layers of torch, which do not wait for their parameters."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.net: Any = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["tokens"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@dataclass
class Readers(Callback):
    """Read parameters between steps in several ways.

    Args:
        folder: Place of the checkpoint.
        validated: Losses of all validations.
        read: Values of ``parameter.data``.
        saved: State that a hook gets when the checkpoint is made, and the contents of its files.
        replays: Number of replays by kind.
    """

    folder: Path
    validated: list[float] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    replays: Counter[str] = field(default_factory=Counter)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        number = trainer.fit_loop.total_batch_idx + 1
        if number == SAVED:
            trainer.save_checkpoint(self.folder)
            self.saved |= contents_of(self.folder)
        elif number == READ:
            self.read = [parameter.data.clone() for parameter in module.parameters()]

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: Any) -> None:
        self.saved = {name: tensor.tolist() for name, tensor in checkpoint["state_dict"].items()}

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated.append(float(trainer.callback_metrics["val_loss"]))


def contents_of(folder: Path) -> dict[str, Any]:
    """Return the contents of all files of a checkpoint that do not depend on the save."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents: dict[str, Any] = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    header = json.loads(contents["checkpoint.json"])
    timed = ("saved_at", "save_number", "checksum")
    contents["checkpoint.json"] = {key: value for key, value in header.items() if key not in timed}
    return contents


def fit_reading(
    folder: Path, is_captured: bool, layout: dict[str, Any], **options: Any
) -> tuple[Fit, Readers]:
    """Fit on two ranks, with validations, a checkpoint and smaller batches between the steps."""
    readers = Readers(folder / ("graphs" if is_captured else "eager"))
    replay = StepGraph.replay

    def count_replay(graph: StepGraph[Any], *args: Any) -> Any:
        readers.replays["gathers" if graph.effects.gathers else "complete"] += 1
        readers.replays["sums"] += bool(graph.effects.gradients.sums)
        return replay(graph, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "replay", count_replay)
        fitted = fit(
            FULL if is_captured else None,
            2,
            {"overlap_parameters": True, **layout},
            callbacks=(readers,),
            module=options.pop("kind", Quiet)(),
            num_samples=18 if {"tp", "pp"} & layout.keys() else 38,
            **{
                "max_steps": NUM_STEPS,
                "val_check_interval": 3,
                "check_val_every_n_epoch": None,
                **options,
            },
        )
    return fitted, readers


def differences(graphs: tuple[Fit, Readers], eager: tuple[Fit, Readers]) -> set[str]:
    """Return the names of records that are not equal bit by bit."""
    changed = set(graphs[0].differences_from(eager[0]))
    actual, expected = graphs[1], eager[1]
    if actual.validated != expected.validated:
        changed.add("validated")
    if not all(map(torch.equal, actual.read, expected.read)):
        changed.add("read")
    assert actual.saved.keys() == expected.saved.keys(), "both fits save the same files"
    if actual.saved != expected.saved:
        changed.add("saved")
    return changed


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"bucket_size": 600}, {}),
    "dp2, plain layers": ({}, {"kind": Plain}),
    "pp2, tied": ({"pp": 2}, {}),
    "tp2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, {}),
}
#: Replays of each case: those that gather parameters, those that find them complete, and those that
#: sum gradients over the ranks. Every second step is logged, and its gradients are checked before.
REPLAYS = {
    "dp2": (3, 3, 3),
    "dp2, plain layers": (3, 3, 3),
    "pp2, tied": (0, 8, 4),
    "tp2, sequence parallel": (0, 6, 3),
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
    for name, (layout, options) in CASES.items():
        place = folder / name
        eager[name] = fit_reading(place, False, layout, **options)
        graphs = fit_reading(place, True, layout, **options)
        replays = tuple(graphs[1].replays[kind] for kind in ("gathers", "complete", "sums"))
        outcomes[name] = differences(graphs, eager[name]), replays
    for name, (case, omit, _) in OMISSIONS.items():
        layout, options = CASES[case]
        with pytest.MonkeyPatch.context() as patch:
            omit(patch)
            try:
                graphs = fit_reading(folder / name, True, layout, **options)
                outcomes[name] = differences(graphs, eager[case])
            except ReplicaMismatchError:
                outcomes[name] = {"replicas"}
    layout, options = CASES["dp2"]
    resumed = [
        fit_reading(
            folder / "again",
            is_captured,
            layout,
            ckpt_path=folder / "dp2" / ("graphs" if is_captured else "eager"),
            max_steps=15,
        )
        for is_captured in (False, True)
    ]
    outcomes["resumed"] = differences(resumed[1], resumed[0]), resumed[1][1].replays["gathers"]
    return outcomes


def test_graphs_gather_and_sum_like_eager_steps_and_no_reader_gets_old_values(
    tmp_path: Path,
) -> None:
    for outcomes in run_world(_two_ranks, 2, tmp_path):
        assert {name: outcomes[name] for name in CASES} == {
            name: (set(), replays) for name, replays in REPLAYS.items()
        }
        for name, (_, _, changed) in OMISSIONS.items():
            assert changed <= outcomes[name], name
        unequal, num_gathers = outcomes["resumed"]
        assert unequal == set()
        assert num_gathers > 0
