"""The benchmark of pipeline schedules trains the schedules that its rows name."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from benchmarks.pipeline import ScheduleCase, parser, run_ours, schedule_of
from lightning_megatron.plan.schedule import build_schedule


def test_a_case_has_the_schedule_and_the_chunks_of_its_name() -> None:
    assert schedule_of("1f1b") == ScheduleCase("1f1b", 1)
    assert schedule_of("interleaved:4") == ScheduleCase("interleaved", 4)
    assert str(schedule_of("interleaved:4")) == "interleaved vpp4"


@pytest.mark.parametrize("name", ["zb-v:0", "zb-v:two", "zb-v:-1"])
def test_chunks_that_are_not_positive_integers_are_refused(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="chunks of a schedule must be a positive integer"):
        schedule_of(name)


def test_rows_train_the_same_model_under_each_schedule(tmp_path: Path) -> None:
    line = ["--model", "tiny_llama", "--layout", "pp2", "--layers", "4", "--microbatches", "4"]
    line += ["--accelerator", "cpu", "--steps", "5", "--warmup", "1", "--out", str(tmp_path)]
    args = parser().parse_args([*line, "--schedules", "auto:2", "zb-v:2"])
    rows = [run_ours(args, case) for case in args.schedules]
    files = ["tiny_llama_pp2_auto_2.json", "tiny_llama_pp2_zb-v_2.json"]
    chosen, named = (json.loads((tmp_path / file).read_text()) for file in files)
    assert len(named["losses"]) == 7
    assert chosen["losses"] == pytest.approx(named["losses"], rel=1e-3), rows
    assert rows[1].startswith("| ours | pp2 | zb-v vpp2 | 4 |")
    simulated, bubble = rows[1].split("|")[-3:-1]
    assert float(simulated) > 0
    assert 0 < float(bubble.strip(" %")) < 100
    actions = build_schedule("zb-v", 2, 4, 2).rows
    for times, row in zip(named["StageTimes"]["rows"], actions, strict=True):
        assert [tuple(entry[:3]) for entry in times] == [
            (action.kind, action.chunk, action.microbatch) for action in row
        ]
        assert all(start <= stop for *_, start, stop in times)
