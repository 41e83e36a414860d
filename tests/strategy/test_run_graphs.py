"""Graphs of a fit are captured after the warm-up, and released and captured again on all ranks."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import pytest
from torch import nn

from lightning_megatron.errors import CaptureError, RankMismatchError, SpeedWarning
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.step.run_graphs import RunGraphs


class RecordedCaptures:
    """Record the calls to the graphs of a rank."""

    def __init__(self, communicates_across_data: bool = False, is_joint: bool = False) -> None:
        self.communicates_across_data = communicates_across_data
        self.is_joint = is_joint
        self.failure: str | None = None
        self.eager: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        self.may_replay = False
        self.num_graphs = 0
        self.num_steps = 0

    def begin(self, kind: str) -> None:
        self.calls.append("begin" if kind == TRAINING else f"begin {kind}")

    def permit(self, kind: str, replays: bool) -> None:
        self.may_replay = replays

    def end_step(self) -> None:
        self.num_steps += 1
        self.may_replay = False

    def report(self) -> str:
        return "CUDA graphs"

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


def make_graphs(
    mode: str = "segments",
    mesh: ParallelMesh | None = None,
    joins: bool = False,
    is_joint: bool = False,
    options: Any = (),
    **settings: Any,
) -> tuple[RunGraphs, RecordedCaptures, nn.Module]:
    """Return graphs of a small module, whose captures are only recorded, after two eager steps."""
    captures, module = RecordedCaptures(joins, is_joint), nn.Linear(2, 2)
    chosen = CudaGraphs(mode, **{"warmup_steps": 2, **settings})  # type: ignore[arg-type]
    mesh = mesh or ParallelMesh.single()
    graphs = RunGraphs(chosen, captures, module, mesh, **dict(options))
    return graphs, captures, module


def run_steps(
    graphs: RunGraphs,
    captures: RecordedCaptures,
    number: int = 1,
    shapes: Hashable = (4, 8),
    epoch: int = 0,
    is_final: bool = True,
) -> list[bool]:
    """Run steps; return for each whether it may replay."""
    replays = []
    for _ in range(number):
        with graphs.step(shapes, epoch, is_final):
            replays.append(captures.may_replay)
        assert graphs.is_off or captures.num_steps
    return replays


def test_captures_begin_after_the_warm_up_and_when_the_schedule_is_final():
    graphs, captures, _ = make_graphs()
    assert run_steps(graphs, captures, 3, is_final=False) == [False] * 3
    assert run_steps(graphs, captures, 3) == [True] * 3
    assert captures.calls == ["begin"]


def test_changes_are_noticed_after_a_load_at_a_new_epoch_and_with_check_at_every_step():
    for epoch, load in ((0, True), (1, False)):
        graphs, captures, module = make_graphs()
        run_steps(graphs, captures, 3)
        # A load that moves no parameter keeps the graphs.
        module.load_state_dict(nn.Linear(2, 2).state_dict())
        graphs.recheck()
        assert run_steps(graphs, captures) == [True]
        module.weight.data = module.weight.data.clone()
        assert run_steps(graphs, captures) == [True], "parameters are not examined within an epoch"
        if load:
            graphs.recheck()
        # One eager step, then new graphs.
        assert run_steps(graphs, captures, 3, epoch=epoch) == [False, True, True]
        assert captures.calls == ["begin", "release", "begin"]
    graphs, captures, module = make_graphs(warmup_steps=1, check=True)
    assert run_steps(graphs, captures, 2) == [False, True]
    module.bias.requires_grad_(False)
    assert run_steps(graphs, captures, 2) == [False, True]


def test_rank_with_new_parameters_is_eager_until_the_next_epoch():
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 3)
    graphs.note_change()
    assert run_steps(graphs, captures, 2) == [False, False]
    assert run_steps(graphs, captures, 2, epoch=1) == [False, True]
    assert captures.calls == ["begin", "release", "begin"]


def test_new_shapes_in_every_step_leave_no_entries_and_few_warnings():
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 3)

    def run_new_shapes() -> None:
        for number in range(20):
            captures.eager["a part", f"of shape {number}"] = 1
            run_steps(graphs, captures)
            assert not captures.eager

    with pytest.warns(SpeedWarning) as warned:
        run_new_shapes()
    assert len(warned) == len(graphs._logged) == 8


FAILURE = "layers 4..5, backward, slot 1: RuntimeError: no memory"
OFF = re.escape(f"off: rank 0 could not capture {FAILURE}. All ranks run their steps eagerly.")


def test_a_failed_capture_turns_graphs_off_or_ends_the_fit():
    graphs, captures, _ = make_graphs(options={"num_capturing": 2})
    run_steps(graphs, captures, 3)
    captures.failure = FAILURE
    with pytest.warns(SpeedWarning, match=OFF):
        run_steps(graphs, captures)
    assert graphs.is_off
    assert run_steps(graphs, captures, 2) == [False, False]
    assert captures.calls == ["begin", "close"]
    graphs, captures, _ = make_graphs(on_failure="error")
    captures.failure = FAILURE
    run_steps(graphs, captures, 2)
    with pytest.raises(CaptureError, match="rank 0 could not capture layers 4"):
        run_steps(graphs, captures)


def test_failures_after_the_first_captures_turn_graphs_off():
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 4)
    captures.failure = FAILURE
    # One rank fails to capture a new slot; all ranks learn of it at the next examination.
    run_steps(graphs, captures)
    assert not graphs.is_off
    with pytest.warns(SpeedWarning, match=OFF):
        run_steps(graphs, captures, epoch=1)
    assert graphs.is_off
    graphs, captures, _ = make_graphs(on_new_shape="capture")
    run_steps(graphs, captures, 5)
    captures.failure, captures.num_graphs = FAILURE, 1
    with pytest.warns(SpeedWarning, match=OFF):
        run_steps(graphs, captures)
    assert graphs.is_off


def test_other_shapes_with_fixed_shapes_are_refused():
    graphs, captures, _ = make_graphs(joins=True, fixed_shapes=True)
    assert run_steps(graphs, captures, 4) == [False, False, True, True]
    with pytest.raises(RankMismatchError, match="fixed_shapes=True"):
        run_steps(graphs, captures, shapes=(3, 8))


def run_evaluation(
    graphs: RunGraphs, captures: RecordedCaptures, *key: Any, number: int = 1
) -> list[bool]:
    """Run the first batches of an evaluation; return for each whether it may replay."""
    replays = []
    for batch in range(number):
        with graphs.evaluation(key, (4, 8), batch):
            replays.append(captures.may_replay)
    return replays


def test_each_kind_of_evaluation_has_its_own_eager_batches_and_is_eager_by_default():
    graphs, captures, _ = make_graphs()
    assert run_evaluation(graphs, captures, "test_step", number=4) == [False] * 4
    graphs, captures, module = make_graphs(evaluation=True)
    assert run_evaluation(graphs, captures, "validation_step", number=3) == [False, False, True]
    assert run_steps(graphs, captures, 3) == [False, False, True]
    assert run_evaluation(graphs, captures, "validation_step", 1, number=3) == [False, False, True]
    assert captures.calls == [
        "begin validation_step",
        "begin",
        "begin validation_step 1",
    ]
    # Parameters are examined only at the first batch, as weights may be exchanged before it.
    module.weight.data = module.weight.data.clone()
    assert run_evaluation(graphs, captures, "validation_step", number=3) == [False, True, True]
    assert captures.calls[3:] == ["release", "begin validation_step"]
    assert run_steps(graphs, captures, 2) == [False, True]
