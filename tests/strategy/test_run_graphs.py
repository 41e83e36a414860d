"""Graphs of a fit are captured after the warm-up, given up on all ranks, and captured again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import (
    CaptureError,
    RankMismatchError,
    SpeedWarning,
    UnsupportedError,
)
from lightning_megatron.graphs.report import GraphCounts, GraphReport
from lightning_megatron.graphs.step_kind import StepKind
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from tests.world import run_world


class Captures:
    """Note what is asked of the graphs of a rank."""

    def __init__(self, communicates_across_data: bool = False, is_joint: bool = False) -> None:
        self.communicates_across_data = communicates_across_data
        self.is_joint = is_joint
        self.failure: str | None = None
        self.eager: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        self.may_replay = False
        self.num_graphs = 0
        self.num_steps = 0

    def begin(self, kind: StepKind) -> None:
        self.calls.append("begin" if kind.has_backward else f"begin {kind.name}")

    def permit(self, kind: StepKind, replays: bool) -> None:
        self.may_replay = replays

    def end_step(self) -> None:
        self.num_steps += 1
        self.may_replay = False

    def report(self) -> GraphReport:
        return GraphReport("segments", ("layers 0..1",), GraphCounts(self.num_graphs))

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


def built(
    settings: CudaGraphs | None = None,
    mesh: ParallelMesh | None = None,
    joins: bool = False,
    is_joint: bool = False,
    **options: Any,
) -> tuple[RunGraphs, Captures, nn.Module]:
    """Return graphs of a small module whose captures are noted only."""
    captures = Captures(joins, is_joint)
    module = nn.Linear(2, 2)
    settings = settings or CudaGraphs("segments", warmup_steps=2)
    mesh = mesh or ParallelMesh.single()
    number = settings.warmup_steps
    graphs = RunGraphs(settings, captures, module, mesh, number, **options)
    return graphs, captures, module


def steps(
    graphs: RunGraphs,
    captures: Captures,
    number: int = 1,
    shapes: Hashable = (4, 8),
    epoch: int = 0,
) -> list[bool]:
    """Run steps; return for each whether it may replay."""
    found = []
    for _ in range(number):
        with graphs.step(shapes, epoch):
            found.append(captures.may_replay)
        assert graphs.is_off or captures.num_steps
    return found


def test_captures_begin_after_the_warm_up_and_when_the_schedule_is_final() -> None:
    settled = [False]
    graphs, captures, _ = built(is_final=lambda: settled[0])
    assert steps(graphs, captures, 3) == [False] * 3
    settled[0] = True
    assert steps(graphs, captures, 3) == [True] * 3
    assert captures.calls == ["begin"]


def test_a_moved_parameter_is_found_after_a_load_and_at_an_epoch() -> None:
    for epoch, load in ((0, True), (1, False)):
        graphs, captures, module = built()
        steps(graphs, captures, 3)
        module.weight.data = module.weight.data.clone()
        assert steps(graphs, captures) == [True], "nobody looks within an epoch"
        if load:
            graphs.recheck()
        # One eager step, then new graphs.
        assert steps(graphs, captures, 3, epoch=epoch) == [False, True, True]
        assert captures.calls == ["begin", "release", "begin"]


def test_every_step_looks_with_check() -> None:
    graphs, captures, module = built(CudaGraphs("segments", warmup_steps=1, check=True))
    assert steps(graphs, captures, 2) == [False, True]
    module.bias.requires_grad_(False)
    assert steps(graphs, captures, 2) == [False, True]


def test_a_load_that_moves_nothing_keeps_the_graphs() -> None:
    graphs, captures, module = built()
    steps(graphs, captures, 3)
    module.load_state_dict(nn.Linear(2, 2).state_dict())
    graphs.recheck()
    assert steps(graphs, captures, 2, epoch=1) == [True, True]
    assert captures.calls == ["begin"]


def test_a_rank_with_new_parameters_is_eager_until_all_look() -> None:
    graphs, captures, _ = built()
    steps(graphs, captures, 3)
    graphs.note_change()
    assert steps(graphs, captures, 2) == [False, False]
    assert steps(graphs, captures, 2, epoch=1) == [False, True]
    assert captures.calls == ["begin", "release", "begin"]


def test_parts_that_run_eagerly_are_named_once_or_refused() -> None:
    graphs, captures, _ = built()
    steps(graphs, captures, 3)
    captures.eager = {("microbatch tokens (2, 8)", "captured for (4, 8)"): 1}
    words = "CUDA graphs: microbatch tokens (2, 8), captured for (4, 8): run eagerly"
    with pytest.warns(SpeedWarning, match=re.escape(words)):
        steps(graphs, captures)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(graphs, captures)
    graphs, captures, _ = built(CudaGraphs("segments", warmup_steps=1, on_new_shape="error"))
    steps(graphs, captures, 2)
    captures.eager = {("tokens (2, 8)", "captured for (4, 8)"): 1}
    with pytest.raises(
        UnsupportedError, match="on_new_shape='error' every step .* tokens .2, 8., capt"
    ):
        steps(graphs, captures)


def test_a_failure_of_this_rank_ends_the_graphs_or_the_fit() -> None:
    text = "layers 4..5, backward, slot 1: RuntimeError: no memory"
    graphs, captures, _ = built(num_capturing=2)
    steps(graphs, captures, 3)
    captures.failure = text
    words = f"CUDA graphs are off: rank 0 could not capture {text}. All ranks continue eagerly."
    with pytest.warns(SpeedWarning, match=re.escape(words)):
        steps(graphs, captures)
    assert graphs.is_off
    assert steps(graphs, captures, 2) == [False, False]
    assert captures.calls == ["begin", "close"]
    graphs, captures, _ = built(CudaGraphs("segments", warmup_steps=1, on_failure="error"))
    captures.failure = text
    steps(graphs, captures)
    with pytest.raises(CaptureError, match="rank 0 could not capture layers 4"):
        steps(graphs, captures)


def test_shapes_are_promised_with_fixed_shapes() -> None:
    settings = CudaGraphs("segments", warmup_steps=1, fixed_shapes=True)
    graphs, captures, _ = built(settings, joins=True)
    assert steps(graphs, captures, 3) == [False, True, True]
    with pytest.raises(RankMismatchError, match="fixed_shapes=True"):
        steps(graphs, captures, shapes=(3, 8))


def evaluations(graphs: RunGraphs, captures: Captures, *key: Any, number: int = 1) -> list[bool]:
    """Run the first batches of an evaluation; return for each whether it may replay."""
    found = []
    for batch in range(number):
        with graphs.evaluation(key, (4, 8), batch):
            found.append(captures.may_replay)
    return found


def test_each_kind_of_evaluation_has_eager_batches_of_its_own() -> None:
    settings = CudaGraphs("segments", warmup_steps=2, evaluation=True)
    graphs, captures, module = built(settings)
    assert evaluations(graphs, captures, "validation_step", number=3) == [False, False, True]
    assert steps(graphs, captures, 3) == [False, False, True]
    assert evaluations(graphs, captures, "validation_step", 1, number=3) == [False, False, True]
    assert captures.calls == ["begin validation_step", "begin", "begin validation_step 1"]
    # Only the first batch of an evaluation looks, as weights may be exchanged before it.
    module.weight.data = module.weight.data.clone()
    assert evaluations(graphs, captures, "validation_step", number=3) == [False, True, True]
    assert captures.calls[3:] == ["release", "begin validation_step"]
    assert steps(graphs, captures, 2) == [False, True]


def test_evaluation_stays_eager_unless_it_is_asked_for() -> None:
    graphs, captures, _ = built()
    assert evaluations(graphs, captures, "test_step", number=4) == [False] * 4
    assert captures.num_steps == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that say what is captured, without the times."""
    found = [one for one in caplog.messages if one.startswith("CUDA graphs (segments)")]
    caplog.clear()
    return [one.partition(", captured in")[0] for one in found]


def test_a_line_says_what_is_captured_after_the_captures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    graphs, captures, _ = built(is_joint=True)
    steps(graphs, captures, 5)
    assert not lines(caplog), "whole steps may have more eager steps than the run counts"
    captures.num_graphs = 3
    steps(graphs, captures)
    assert not lines(caplog), "the next step may capture, too"
    steps(graphs, captures, 3)
    assert lines(caplog) == ["CUDA graphs (segments): layers 0..1 in 3 graphs"]
    graphs, captures, _ = built(CudaGraphs("segments", warmup_steps=1, on_new_shape="capture"))
    captures.num_graphs = 6
    steps(graphs, captures, 4)
    assert lines(caplog) == ["CUDA graphs (segments): layers 0..1 in 6 graphs"]
    captures.num_graphs = 12
    steps(graphs, captures, 3)
    assert lines(caplog) == ["CUDA graphs (segments): layers 0..1 in 12 graphs"]


def test_a_failure_after_the_first_captures_ends_the_graphs() -> None:
    text = "layers 0..1, forward, slot 2: RuntimeError: no memory"
    graphs, captures, _ = built()
    steps(graphs, captures, 4)
    captures.failure = text
    # A new slot of one rank: all ranks hear of it at the next point at which they look.
    steps(graphs, captures)
    assert not graphs.is_off
    with pytest.warns(SpeedWarning, match=re.escape(f"rank 0 could not capture {text}")):
        steps(graphs, captures, epoch=1)
    assert graphs.is_off
    graphs, captures, _ = built(CudaGraphs("segments", warmup_steps=1, on_new_shape="capture"))
    steps(graphs, captures, 4)
    captures.failure = text
    captures.num_graphs = 1
    with pytest.warns(SpeedWarning, match=re.escape(f"rank 0 could not capture {text}")):
        steps(graphs, captures)
    assert graphs.is_off


def _on_two_ranks(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = ParallelMesh.create(ParallelLayout(size))
    found: dict[str, Any] = {}
    graphs, captures, module = built(mesh=mesh)
    steps(graphs, captures, 3)
    if rank == 1:
        module.weight.data = module.weight.data.clone()
    found["moved on one"] = steps(graphs, captures, 2, epoch=1)
    if rank == 0:
        captures.failure = "layers 0..1, forward: RuntimeError: no"
    graphs.recheck()
    module.bias.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(graphs, captures, 2, epoch=1)
    found["off"] = graphs.is_off
    found["calls"] = captures.calls
    found["warned"] = [str(one.message) for one in caught if one.category is SpeedWarning]
    graphs, captures, _ = built(mesh=mesh, joins=True)
    steps(graphs, captures, 2)
    found["same shapes"] = steps(graphs, captures, shapes=(4, 8))
    found["other shapes"] = steps(graphs, captures, shapes=(4, 8 + rank))
    mesh.destroy()
    return found


def test_all_ranks_do_the_same() -> None:
    first, second = run_world(_on_two_ranks, 2)
    warned = first.pop("warned")
    assert any("rank 0 could not capture layers 0..1" in one for one in warned)
    second.pop("warned")
    assert first == second
    assert first == {
        "moved on one": [False, True],
        "off": True,
        "calls": ["begin", "release", "begin", "close"],
        "same shapes": [True],
        "other shapes": [False],
    }
