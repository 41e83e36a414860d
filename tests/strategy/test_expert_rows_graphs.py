"""Steps by graphs that need more rows than ``expert_rows`` allows are run again eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import CudaGraphs
from lightning_megatron.experts.transport.row_limit import RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.strategy.step.limited_rows import LimitedRows
from tests.strategy.limited_fits import Excess
from tests.strategy.steered_fits import NUM_LAYERS, SteeredRecord, fit
from tests.strategy.update_fits import fused
from tests.sweeps import all_run, chosen
from tests.world import run_world

MODES = chosen(["segments", "full"], "full")
ACCUMULATING = chosen(["eager", "full"], "full")
SEGMENTS = CudaGraphs("segments", warmup_steps=1, evaluation=True, on_failure="error")
FULL = CudaGraphs("full", warmup_steps=1, evaluation=True, on_failure="error")
#: One row too many in the fourth batch and two in the validation after it; then the limit is 384
#: rows. The second validation and the eighth batch fit into this limit, the ninth batch does not.
EXCESS: Excess = {
    ("train", 3, 0, 0): -1,
    ("val", 1, 1, 0): 2,
    ("train", 7, 1, 1): 120,
    ("train", 8, 1, 1): 150,
}
#: In the middle of the second optimizer step, and at the end of the last one.
ACCUMULATED: Excess = {("train", 4, 1, 0): 3, ("train", 14, 0, 1): -40}
#: One step, at which the update is already a graph.
UPDATED: Excess = {("train", 6, 1, 1): 9}
AGAIN = "the step was run again without a limit"
WARNINGS = [
    f"layer 0 needed 257 rows on rank 1, expert_rows=1 has 256: {AGAIN}; 1.01 would be enough.",
    f"layer 0 needed 258 rows on rank 0, expert_rows=1 has 256: {AGAIN}; 1.01 would be enough, and "
    "expert_rows is 1.11 from now on.",
    f"layer 1 needed 406 rows on rank 0, expert_rows=1.11 has 384: {AGAIN}; 1.59 would be enough, and "
    "expert_rows is 1.75 from now on.",
]


def world_of_two(rank: int, size: int, folder: str) -> dict[str, SteeredRecord]:
    options: dict[str, Any] = {"num_batches": 10, "val_check_interval": 4}
    results = {
        "without": fit(None, EXCESS, **options),
        "full": fit(1.0, EXCESS, FULL, saves={6: f"{folder}/half"}, **options),
        "resumed": fit(1.0, EXCESS, SEGMENTS, ckpt_path=f"{folder}/half", **options),
        "resumed without": fit(None, EXCESS, ckpt_path=f"{folder}/half", **options),
    }
    if all_run():
        results["segments"] = fit(1.0, EXCESS, SEGMENTS, **options)
    sum_options: dict[str, Any] = {
        **{"num_batches": 15, "max_steps": 5, "accumulate_grad_batches": 3},
        **{"limit_val_batches": 0, "val_check_interval": None},
    }
    results["sums, without"] = fit(None, ACCUMULATED, **sum_options)
    for name in ACCUMULATING:
        graphs = FULL if name == "full" else None
        results[f"sums, {name}"] = fit(1.0, ACCUMULATED, graphs, **sum_options)
    update_options: dict[str, Any] = {
        **{"precision": "32-true", "num_batches": 8, "limit_val_batches": 0},
        **{"model": {"is_fused": True}, "gradient_clip_val": 0.1},
    }
    with fused():
        results["updates, without"] = fit(None, UPDATED, **update_options)
        results["updates, full"] = fit(
            1.0, UPDATED, replace(FULL, optimizer=True), **update_options
        )
    # Graphs without a limit, to compare the number of their entries.
    results["unlimited graphs"] = fit(None, {}, FULL, num_batches=6, limit_val_batches=0)
    return results


def world_of_four(rank: int, size: int) -> dict[str, SteeredRecord]:
    excess: Excess = {("train", 4, 1, 1): 5, ("train", 5, 0, 0): -9, ("val", 0, 0, 1): 5}
    stages: dict[str, Any] = {"devices": 4, "layout": {"pp": 2}, "num_batches": 8}
    recomputed = {**stages, "layout": {"pp": 2, "recompute": "full"}}
    plain = {}
    if all_run():
        plain = {graphs.mode: fit(1.0, excess, graphs, **stages) for graphs in (SEGMENTS, FULL)}
        plain["without"] = fit(None, excess, **stages)
    return {
        **plain,
        "recomputed without": fit(None, excess, **recomputed),
        "recomputed segments": fit(1.0, excess, SEGMENTS, **recomputed),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, SteeredRecord]]:
    return run_world(world_of_two, 2, str(tmp_path_factory.mktemp("rows")))


@pytest.mark.parametrize("mode", MODES)
def test_a_fit_by_graphs_with_a_row_limit_equals_an_eager_fit_without_a_limit(
    ranks: list[dict[str, SteeredRecord]], mode: str
) -> None:
    for rank, results in enumerate(ranks):
        without, limited = results["without"], results[mode]
        assert limited.differences_from(without) == [], f"rank {rank}"
        assert len(limited.losses) == 10
        assert len(limited.evaluated) == 4
        assert (limited.num_failures, limited.factor) == (3, 1.75)
    for words, warning in zip(WARNINGS, ranks[0][mode].warnings, strict=True):
        assert words in warning


@pytest.mark.parametrize("mode", MODES)
def test_graphs_run_before_a_repeat_and_are_captured_again_after_the_limit_grows(
    ranks: list[dict[str, SteeredRecord]], mode: str
) -> None:
    for results in ranks:
        record = results[mode]
        replays = [
            after - before
            for before, after in zip([0, *record.num_replays[:-1]], record.num_replays, strict=True)
        ]
        # Batches that needed too much were first run by graphs, and no graph is left afterwards.
        for batch in (3, 8):
            assert replays[batch] > 0, batch
            assert record.num_graphs[batch] > 0, batch
        assert record.num_graphs[9] < record.num_graphs[8]
        # Between them the graphs have been captured with more rows.
        assert record.num_graphs[4] < record.num_graphs[7]
        assert replays[7] > 0


def test_a_resumed_fit_by_graphs_with_a_row_limit_equals_a_fit_without_a_limit(
    ranks: list[dict[str, SteeredRecord]],
) -> None:
    for results in ranks:
        resumed = results["resumed"]
        assert resumed.differences_from(results["resumed without"]) == []
        assert len(resumed.losses) == 4
        assert resumed.num_failures == 2, "its limit is again that of its strategy"
        assert resumed.num_replays[-1] > 0


@pytest.mark.parametrize("name", ACCUMULATING)
def test_accumulated_gradients_with_a_row_limit_equal_those_without_a_limit(
    ranks: list[dict[str, SteeredRecord]], name: str
) -> None:
    for rank, results in enumerate(ranks):
        without, limited = results["sums, without"], results[f"sums, {name}"]
        assert limited.differences_from(without) == [], f"rank {rank}"
        assert len(limited.losses) == 15
        assert limited.num_failures == 2
    if name == "full":
        assert ranks[0]["sums, full"].num_replays[14] > ranks[0]["sums, full"].num_replays[13]


def test_captured_updates_with_a_row_limit_equal_eager_updates_without_a_limit(
    ranks: list[dict[str, SteeredRecord]],
) -> None:
    for results in ranks:
        without, limited = results["updates, without"], results["updates, full"]
        assert limited.differences_from(without) == []
        assert limited.num_failures == 1
        # Graphs of the step with and without gathers of parameters, and of the update.
        assert limited.num_graphs[5:] == [3, 3, 3]


def test_a_row_limit_adds_two_graph_entries_per_layer_pass_and_ten_per_step(
    ranks: list[dict[str, SteeredRecord]],
) -> None:
    for results in ranks:
        limited, unlimited = (
            max(results["full"].num_entries),
            max(results["unlimited graphs"].num_entries),
        )
        num_passes = 2 * NUM_LAYERS
        # Each pass adds the ends within the limit and the largest need. Each step adds the missing
        # rows, their maximum over the ranks, the wait for it, and the copy to the host. A step that
        # may be repeated gets copies of its two microbatches of three tensors.
        assert limited - unlimited == 2 * num_passes + 4 + 2 * 3


@pytest.mark.slow
def test_all_pipeline_stages_repeat_a_captured_step_eagerly() -> None:
    for rank, results in enumerate(run_world(world_of_four, 4)):
        for mode in ("segments", "full") if all_run() else ():
            assert results[mode].differences_from(results["without"]) == [], f"{mode}, rank {rank}"
            assert results[mode].num_failures == 2, mode
            assert max(results[mode].num_graphs) > 0, mode
        recomputed = results["recomputed segments"]
        assert recomputed.differences_from(results["recomputed without"]) == [], f"rank {rank}"
        assert recomputed.num_failures == 2
        # Layers share their graphs, whatever the number of microbatches in flight.
        assert max(recomputed.num_graphs) > 0


class Launches(TorchDispatchMode):
    """Record the names of operators that would launch kernels or copies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info is not None for value in func._schema.returns) and not any(
            value.alias_info is not None and value.alias_info.is_write
            for value in func._schema.arguments
        )
        if not is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return result


class BufferModule(LightningModule):
    """Module of a user with many buffers of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(20):
            self.register_buffer(f"one{number}", torch.full((3,), float(number)))


class Routers:
    """State of many routers."""

    def __init__(self) -> None:
        sums = [torch.zeros(9, dtype=torch.float64) for _ in range(48)]
        self.step_tensors = [*sums, *(torch.zeros(4) for _ in range(48))]


@contextmanager
def count_launches() -> Iterator[list[str]]:
    with Launches() as mode:
        yield mode.names


def test_the_state_before_a_step_is_saved_by_three_grouped_copies() -> None:
    mesh = ParallelMesh.single()
    module, routers = BufferModule(), Routers()
    limit = RowLimit(1.0, mesh)
    executor = PipelineExecutor(mesh, None)
    limited = LimitedRows(module, mesh, limit, cast("Any", routers), executor, cast("Any", None))

    def first_run() -> None:
        assert executor.after_forwards is not None
        limit.note(0, 128, torch.tensor([129], dtype=torch.int32))
        module.one3 += 1.0
        routers.step_tensors[50] += 1.0
        executor.after_forwards()()

    def second_run() -> str:
        assert module.one3.tolist() == [3.0] * 3
        assert routers.step_tensors[50].tolist() == [0.0] * 4
        limit.note(0, 128, torch.tensor([129], dtype=torch.int32))
        return "again"

    with count_launches() as names:
        limited._before()
    # Buffers of the module, statistics, and buffers of the routers.
    assert names == ["_foreach_copy_.default"] * 3
    with count_launches() as names, limit.limit_rows():
        pass
    # The counter on the device, and the flag on the host, which is no launch.
    assert names == ["zero_.default", "fill_.Scalar"]
    assert limited.run(first_run, second_run) == "again"
    assert limited.num_failures == 1
