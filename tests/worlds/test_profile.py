"""A profile of all ranks: one trace on one clock with every action of the schedule, and a table whose
parts add up to the steps.
"""

from __future__ import annotations

import gzip
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron import Profile
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan import ParallelLayout
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.schedule import build_schedule
from lightning_megatron.strategy.profiling import trace_file
from lightning_megatron.strategy.profiling.ranges import name_of
from lightning_megatron.strategy.profiling.step_parts import EXPOSED, NOTHING, PARTS, STEP
from lightning_megatron.strategy.profiling.trace_file import clock_offset
from tests.fits import GPT2, Job, Language, Tokens, differences, run_job
from tests.world import run_world

LAYOUT = {"tp": 2, "pp": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (1, {**LAYOUT}),
    "zb-h1": (1, {**LAYOUT, "schedule": "zb-h1"}),
    "segments": (3, {**LAYOUT, "cuda_graphs": CudaGraphs("segments", warmup_steps=1)}),
    "whole": (4, {**LAYOUT, "cuda_graphs": CudaGraphs("full", warmup_steps=1)}),
}
#: Tolerance of times on two ranks, whose clocks are the same one (µs).
APART = 5e3


def _fit(folder: str, case: str, is_profiled: bool) -> Any:
    step, options = CASES[case]
    steps = step + 2 + (case == "1f1b")
    profile = Profile(step, 2, folder=f"{folder}/{case}")
    trained = Language(GPT2)
    job = Job(
        lambda: trained,
        options,
        steps=steps,
        data=partial(Tokens, 8 * steps),
        validation=Tokens,
        trainer={"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0},
        callbacks=lambda: [profile] if is_profiled else [],
    )
    report = run_job(job, 4)
    left = [name for name, part in trained.named_modules() if "forward" in vars(part)]
    return report, profile.table, left


def _profiled(rank: int, size: int, folder: str) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for case in CASES:
        report, table, left = _fit(folder, case, is_profiled=True)
        plain, _, _ = _fit(folder, case, is_profiled=False)
        outcomes[case] = table.as_dict(), differences(report, plain), left
    if rank == 1:
        late = SimpleNamespace(time_ns=lambda: time.time_ns() + 3_000_000_000)
        trace_file.time = late  # type: ignore[assignment]
    mesh = ParallelMesh.create(ParallelLayout(size))
    outcomes["offset"] = clock_offset(mesh.world_cpu)
    return outcomes


@pytest.fixture(scope="module")
def profiles(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("profile")
    return folder, run_world(_profiled, 4, str(folder))


def events_of(folder: Path, case: str) -> list[dict[str, Any]]:
    step, _ = CASES[case]
    with gzip.open(folder / case / f"trace_step{step}.json.gz") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], rank: int, category: str) -> list[dict[str, Any]]:
    chosen = (one for one in events if one["pid"] == rank and one.get("cat") == category)
    return sorted(chosen, key=lambda event: event["ts"])


def within(events: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in events if outer["ts"] <= one["ts"] < outer["ts"] + outer["dur"]]


@pytest.mark.parametrize("case", ["1f1b", "zb-h1"])
def test_each_action_of_the_schedule_has_one_range_in_each_step_of_its_stage(case, profiles):
    events = events_of(profiles[0], case)
    schedule = build_schedule(case, 2, 4)
    for rank in range(4):
        ranges = spans(events, rank, "user_annotation")
        steps = [one for one in spans(events, rank, "step") if one["dur"] > APART]
        rows = [
            [r["name"] for r in within(ranges, one) if " microbatch " in r["name"]] for one in steps
        ]
        names = [[n for n in row if n[1:].startswith(" chunk")] for row in rows]
        # Validation between the steps, and its piece of a step, is left out.
        expected = [name_of(action) for action in schedule.actions(rank // 2)]
        assert [row for row in names if row] == [expected, expected]


def test_layers_collectives_and_the_update_have_ranges_with_their_purpose(profiles):
    events = events_of(profiles[0], "1f1b")
    for rank in range(4):
        names = {one["name"] for one in spans(events, rank, "user_annotation")}
        layer = f"model.layers.{2 * (rank // 2)}"
        assert {f"{layer}.mlp", f"{layer}.mlp, backward", "optimizer update"} <= names
        assert {"clip gradients", "sum gradients over ranks"} <= names
        assert any(name.startswith(f"tp reduce_scatter of {layer}.mlp, 0.") for name in names)
        assert any(name.startswith("wait for pp exchange") for name in names)
        # The backward pass of a layer contains those of its parts.
        ranges = spans(events, rank, "user_annotation")
        outer = [one for one in ranges if one["name"] == f"{layer}, backward"]
        assert len(outer) == 2 * 4
        assert all(
            f"{layer}.mlp, backward" in {r["name"] for r in within(ranges, o)} for o in outer
        )


def test_events_of_a_lane_are_nested_as_perfetto_needs_it(profiles):
    lanes: dict[Any, list[Any]] = {}
    for one in events_of(profiles[0], "1f1b"):
        if one["ph"] == "X":
            lanes.setdefault((one["pid"], one["tid"]), []).append(one)
    assert len(lanes) >= 4 * 4
    for lane in lanes.values():
        open_ones: list[tuple[float, str]] = []
        for one in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            end = one["ts"] + one["dur"]
            while open_ones and open_ones[-1][0] <= one["ts"] + 0.01:
                open_ones.pop()
            assert not open_ones or end <= open_ones[-1][0] + 0.01, (one["name"], open_ones)
            open_ones.append((end, one["name"]))


def test_replays_of_graphs_are_named_by_what_they_replay(profiles):
    for case, replayed in (("segments", "layers 2..3"), ("whole", "the whole training_step")):
        ranges = spans(events_of(profiles[0], case), 3, "user_annotation")
        replays = [one["name"] for one in ranges if one["name"].startswith("replay of ")]
        assert replays, case
        assert all(replayed in name for name in replays)


def test_ranks_are_rows_with_coordinates_on_one_clock(profiles):
    events = events_of(profiles[0], "1f1b")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}: tp{rank % 2} cp0 dp0 pp{rank // 2}" for rank in range(4)}
    for before, after in ((0, 2), (1, 3)):
        for number in range(4):
            pairs = {"F": (before, after), "B": (after, before)}
            for kind, (first, second) in pairs.items():
                name = f"{kind} chunk 0 microbatch {number}"
                sent = [e for e in spans(events, first, "user_annotation") if e["name"] == name]
                read = [e for e in spans(events, second, "user_annotation") if e["name"] == name]
                # A stage reads what another one has sent before, by the same clock.
                for one, other in zip(sent, read, strict=True):
                    assert other["ts"] > one["ts"] + one["dur"] - APART


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_steps_and_training_is_unchanged(case, profiles):
    folder, ranks = profiles
    events = events_of(folder, case)
    table = ranks[0][case][0]
    assert table == json.loads(next((folder / case).glob("*.json")).read_text())
    for stage, parts in enumerate(table["stages"]):
        whole = sum(parts[part] for part in (*PARTS, EXPOSED, NOTHING))
        assert whole == pytest.approx(parts[STEP], rel=1e-9)
        steps = [spans(events, rank, "step") for rank in (2 * stage, 2 * stage + 1)]
        seconds = sum(one["dur"] for row in steps for one in row) / 2 / 2 / 1e3
        assert parts[STEP] == pytest.approx(seconds, rel=1e-6)
        assert min(parts[EXPOSED], parts["products"], parts["optimizer"]) > 0
    for rank in ranks:
        _, changed, left = rank[case]
        assert (changed, left) == ([], [])


def test_the_offset_of_a_clock_is_measured(profiles):
    offsets = [rank["offset"] for rank in profiles[1]]
    assert offsets[0] == 0
    assert offsets[1] == pytest.approx(3e9, abs=5e6)
    assert max(map(abs, offsets[2:])) < 5e6
