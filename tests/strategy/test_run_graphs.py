"""Graphs of a fit are captured after the warm-up, and released and captured again on all ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable
from typing import Any

import pytest
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


def make_graphs(
    settings: CudaGraphs | None = None,
    mesh: ParallelMesh | None = None,
    joins: bool = False,
    is_joint: bool = False,
    **options: Any,
) -> tuple[RunGraphs, RecordedCaptures, nn.Module]:
    """Return graphs of a small module whose captures are only recorded."""
    captures = RecordedCaptures(joins, is_joint)
    module = nn.Linear(2, 2)
    settings = settings or CudaGraphs("segments", warmup_steps=2)
    mesh = mesh or ParallelMesh.single()
    number = settings.warmup_steps
    graphs = RunGraphs(settings, captures, module, mesh, number, **options)
    return graphs, captures, module


def run_steps(
    graphs: RunGraphs,
    captures: RecordedCaptures,
    number: int = 1,
    shapes: Hashable = (4, 8),
    epoch: int = 0,
) -> list[bool]:
    """Run steps; return for each whether it may replay."""
    replays = []
    for _ in range(number):
        with graphs.step(shapes, epoch):
            replays.append(captures.may_replay)
        assert graphs.is_off or captures.num_steps
    return replays


def test_captures_begin_after_the_warm_up_and_when_the_schedule_is_final() -> None:
    final_flag = [False]
    graphs, captures, _ = make_graphs(is_final=lambda: final_flag[0])
    assert run_steps(graphs, captures, 3) == [False] * 3
    final_flag[0] = True
    assert run_steps(graphs, captures, 3) == [True] * 3
    assert captures.calls == ["begin"]


def test_moved_parameter_is_noticed_after_a_load_and_at_a_new_epoch() -> None:
    for epoch, load in ((0, True), (1, False)):
        graphs, captures, module = make_graphs()
        run_steps(graphs, captures, 3)
        module.weight.data = module.weight.data.clone()
        assert run_steps(graphs, captures) == [True], "parameters are not examined within an epoch"
        if load:
            graphs.recheck()
        # One eager step, then new graphs.
        assert run_steps(graphs, captures, 3, epoch=epoch) == [False, True, True]
        assert captures.calls == ["begin", "release", "begin"]


def test_check_option_notices_changed_parameters_at_every_step() -> None:
    graphs, captures, module = make_graphs(CudaGraphs("segments", warmup_steps=1, check=True))
    assert run_steps(graphs, captures, 2) == [False, True]
    module.bias.requires_grad_(False)
    assert run_steps(graphs, captures, 2) == [False, True]


def test_load_that_moves_no_parameter_keeps_the_graphs() -> None:
    graphs, captures, module = make_graphs()
    run_steps(graphs, captures, 3)
    module.load_state_dict(nn.Linear(2, 2).state_dict())
    graphs.recheck()
    assert run_steps(graphs, captures, 2, epoch=1) == [True, True]
    assert captures.calls == ["begin"]


def test_rank_with_new_parameters_is_eager_until_the_next_epoch() -> None:
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 3)
    graphs.note_change()
    assert run_steps(graphs, captures, 2) == [False, False]
    assert run_steps(graphs, captures, 2, epoch=1) == [False, True]
    assert captures.calls == ["begin", "release", "begin"]


def test_parts_that_run_eagerly_are_named_once_or_refused() -> None:
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 3)
    captures.eager = {("microbatch tokens (2, 8)", "captured for (4, 8)"): 1}
    message = "CUDA graphs: microbatch tokens (2, 8), captured for (4, 8): run eagerly"
    with pytest.warns(SpeedWarning, match=re.escape(message)):
        run_steps(graphs, captures)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_steps(graphs, captures)
    graphs, captures, _ = make_graphs(CudaGraphs("segments", warmup_steps=1, on_new_shape="error"))
    run_steps(graphs, captures, 2)
    captures.eager = {("tokens (2, 8)", "captured for (4, 8)"): 1}
    with pytest.raises(
        UnsupportedError, match="on_new_shape='error' every step .* tokens .2, 8., capt"
    ):
        run_steps(graphs, captures)


def test_capture_failure_turns_graphs_off_or_ends_the_fit() -> None:
    text = "layers 4..5, backward, slot 1: RuntimeError: no memory"
    graphs, captures, _ = make_graphs(num_capturing=2)
    run_steps(graphs, captures, 3)
    captures.failure = text
    message = f"CUDA graphs are off: rank 0 could not capture {text}. All ranks continue eagerly."
    with pytest.warns(SpeedWarning, match=re.escape(message)):
        run_steps(graphs, captures)
    assert graphs.is_off
    assert run_steps(graphs, captures, 2) == [False, False]
    assert captures.calls == ["begin", "close"]
    graphs, captures, _ = make_graphs(CudaGraphs("segments", warmup_steps=1, on_failure="error"))
    captures.failure = text
    run_steps(graphs, captures)
    with pytest.raises(CaptureError, match="rank 0 could not capture layers 4"):
        run_steps(graphs, captures)


def test_other_shapes_with_fixed_shapes_are_refused() -> None:
    settings = CudaGraphs("segments", warmup_steps=1, fixed_shapes=True)
    graphs, captures, _ = make_graphs(settings, joins=True)
    assert run_steps(graphs, captures, 3) == [False, True, True]
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


def test_each_kind_of_evaluation_has_its_own_eager_batches() -> None:
    settings = CudaGraphs("segments", warmup_steps=2, evaluation=True)
    graphs, captures, module = make_graphs(settings)
    assert run_evaluation(graphs, captures, "validation_step", number=3) == [False, False, True]
    assert run_steps(graphs, captures, 3) == [False, False, True]
    assert run_evaluation(graphs, captures, "validation_step", 1, number=3) == [False, False, True]
    assert captures.calls == ["begin validation_step", "begin", "begin validation_step 1"]
    # Parameters are examined only at the first batch, as weights may be exchanged before it.
    module.weight.data = module.weight.data.clone()
    assert run_evaluation(graphs, captures, "validation_step", number=3) == [False, True, True]
    assert captures.calls[3:] == ["release", "begin validation_step"]
    assert run_steps(graphs, captures, 2) == [False, True]


def test_evaluation_is_eager_by_default() -> None:
    graphs, captures, _ = make_graphs()
    assert run_evaluation(graphs, captures, "test_step", number=4) == [False] * 4
    assert captures.num_steps == 0


def capture_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that report captures, without the times."""
    messages = [text for text in caplog.messages if text.startswith("CUDA graphs (segments)")]
    caplog.clear()
    return [text.partition(", captured in")[0] for text in messages]


def test_captured_layers_and_number_of_graphs_are_logged_after_the_captures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    graphs, captures, _ = make_graphs(is_joint=True)
    run_steps(graphs, captures, 5)
    assert not capture_messages(caplog), "full steps may have more eager steps than the run counts"
    captures.num_graphs = 3
    run_steps(graphs, captures)
    assert not capture_messages(caplog), "the next step may capture, too"
    run_steps(graphs, captures, 3)
    assert capture_messages(caplog) == ["CUDA graphs (segments): layers 0..1 in 3 graphs"]
    graphs, captures, _ = make_graphs(
        CudaGraphs("segments", warmup_steps=1, on_new_shape="capture")
    )
    captures.num_graphs = 6
    run_steps(graphs, captures, 4)
    assert capture_messages(caplog) == ["CUDA graphs (segments): layers 0..1 in 6 graphs"]
    captures.num_graphs = 12
    run_steps(graphs, captures, 3)
    assert capture_messages(caplog) == ["CUDA graphs (segments): layers 0..1 in 12 graphs"]


def test_failure_after_the_first_captures_turns_graphs_off() -> None:
    text = "layers 0..1, forward, slot 2: RuntimeError: no memory"
    graphs, captures, _ = make_graphs()
    run_steps(graphs, captures, 4)
    captures.failure = text
    # One rank fails to capture a new slot; all ranks learn of it at the next examination.
    run_steps(graphs, captures)
    assert not graphs.is_off
    with pytest.warns(SpeedWarning, match=re.escape(f"rank 0 could not capture {text}")):
        run_steps(graphs, captures, epoch=1)
    assert graphs.is_off
    graphs, captures, _ = make_graphs(
        CudaGraphs("segments", warmup_steps=1, on_new_shape="capture")
    )
    run_steps(graphs, captures, 4)
    captures.failure = text
    captures.num_graphs = 1
    with pytest.warns(SpeedWarning, match=re.escape(f"rank 0 could not capture {text}")):
        run_steps(graphs, captures)
    assert graphs.is_off
