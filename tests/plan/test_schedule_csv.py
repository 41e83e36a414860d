"""Schedules are restored from CSV, CSV files of torch are read, and errors name faults."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, seed, settings
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan import (
    Placement,
    Schedule,
    build_schedule,
    format_schedule,
    parse_schedule,
    plan_transfers,
    read_schedule,
    simulate,
)
from tests.plan.test_custom_schedule import Node, Rows, random_rows, schedule_of
from tests.plan.test_split_schedules import run_one_by_one, schedules
from tests.plan.test_transfers import execute

MANY = settings(max_examples=60, deadline=None, database=None)


def check_round_trip(schedule: Schedule) -> None:
    restored = parse_schedule(format_schedule(schedule), "mine.csv")
    assert restored.name == "mine.csv"
    assert restored.rows == schedule.rows
    sizes = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    assert (restored.num_stages, restored.num_microbatches, restored.num_chunks) == sizes
    assert restored.forward_only == schedule.forward_only
    owners = [
        [schedule.placement.owner(virtual), restored.placement.owner(virtual)]
        for virtual in range(schedule.placement.num_virtual_stages)
    ]
    assert all(expected == actual for expected, actual in owners)


@seed(17)
@MANY
@given(schedules())
def test_every_named_schedule_is_restored_from_its_csv(schedule: Schedule) -> None:
    check_round_trip(schedule)


@seed(17)
@MANY
@given(random_rows())
def test_any_custom_schedule_is_restored_from_its_csv(
    drawn: tuple[Placement, int, Rows, dict[Node, set[Node]]],
) -> None:
    placement, microbatches, rows, _ = drawn
    check_round_trip(schedule_of(placement, microbatches, rows))


def test_cells_are_virtual_stage_kind_and_microbatch() -> None:
    text = format_schedule(build_schedule("zb-v", 2, 2, 2))
    assert text == (
        "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n"
        "1F0,2F0,1F1,2F1,2I0,2W0,1I0,2I1,1I1,1W0,2W1,1W1\n"
    )
    spaced = text.replace(",3I0", ", ,, 3I0 ").replace("\n", "\r\n\r\n")
    assert parse_schedule(spaced, "mine").rows == parse_schedule(text, "mine").rows


@pytest.mark.parametrize(
    ("name", "chunks", "shape"),
    [
        ("ScheduleInterleaved1F1B", 2, "loop"),
        ("ScheduleInterleaved1F1B", 4, "loop"),
        ("ScheduleLoopedBFS", 3, "loop"),
        ("ScheduleInterleavedZeroBubble", 2, "loop"),
        ("ScheduleZBVZeroBubble", 2, "v"),
        ("ScheduleDualPipeV", 2, "v"),
    ],
)
@pytest.mark.parametrize("stages", [2, 4])
def test_schedules_of_torch_are_read(
    name: str, chunks: int, shape: str, stages: int, tmp_path: Path
) -> None:
    placement = Placement(shape, stages, chunks)  # type: ignore[arg-type]
    fields = {
        "num_stages": stages * chunks,
        "group_size": stages,
        "group_rank": 0,
        "is_first": False,
        "is_last": False,
        "device": "cpu",
        "submod": None,
    }
    torch_stages = [
        SimpleNamespace(stage_index=placement.virtual_stage(0, chunk), **fields)
        for chunk in range(chunks)
    ]
    torch_schedule: Any = getattr(torch_schedules, name)(
        torch_stages, 4 * stages, loss_fn=lambda *_: None
    )
    torch_schedule._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    schedule = read_schedule(tmp_path / "theirs.csv")
    assert schedule.shape == shape
    assert (schedule.num_stages, schedule.num_chunks) == (stages, chunks)
    assert schedule.num_microbatches == 4 * stages
    assert simulate(schedule).length >= 4 * stages * chunks * 3
    program = plan_transfers(schedule)
    assert all(rank.next == len(rank.instructions) for rank in execute(program))
    assert run_one_by_one(program)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.csv must have a row for each rank: it has none. Use comma-separated"),
        (
            "0F0,0B0\n,,\n",
            "mine.csv must give every rank at least one action: row 1 of 2 has none.",
        ),
        (
            "0F0,0SEND_F0\n",
            "mine.csv, row 0: a cell is a virtual stage, a kind (F, B, I or W) and a microbatch, such as 0F3: it is "
            "'0SEND_F0'. Use one cell for each computation, in order, and leave out transfers and torch's other "
            "actions, which are planned from the computations.",
        ),
        ("0F0,0B\n", "it is '0B'"),
        ("0F0,(0F1;0B0)W\n", "it is '(0F1;0B0)W'"),
        ("0F0,0F1234567\n", "it is '0F1234567'"),
        ("0F0,0F٣\n", "it is '0F٣'"),
        (
            "0F0,2F0,0B0,2B0\n1F0,1B0\n",
            "mine.csv: virtual stages must lie on the 2 ranks in a loop or in a V, the same number on each rank: row 1 has [1]. "
            "Use [1, 3] in a loop, or [1, 2] in a V.",
        ),
        (
            "1F0,1B0\n0F0,0B0\n",
            "row 0 has [1]. Use [0] in a loop, or [0] in a V.",
        ),
        ("7F0,7B0\n", "row 0 has [7]. Use [0] in a loop, or [0] in a V."),
        (
            "0F0,0F999999,0B0,0B999999\n",
            "mine.csv must name every microbatch: it has microbatch 999999, but no microbatch 1. Use the numbers 0 to 1.",
        ),
        (
            "0F0,0F1,0B0\n",
            "schedule 'mine.csv' is not legal: on stage 0, F of microbatch 1 in chunk 0 must come with B, or with "
            "I and W: found F.",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "schedule 'mine.csv' is not legal: its stages wait for each other. Stage 0 waits for the input of B of "
            "microbatch 0 in chunk 0 from stage 1, stage 1 waits for the input of F of microbatch 1 in chunk 0 from "
            "stage 0.",
        ),
    ],
)
def test_errors_say_why_a_text_is_not_a_schedule(text: str, message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        parse_schedule(text, "mine.csv")
    assert message in str(error.value)


def test_errors_say_why_a_file_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert len(read_schedule(path).actions(0)) == 2
    path.write_bytes(b"0F0,\xff\n")
    with pytest.raises(
        CorruptDataError, match=r"mine\.csv is not a text file: invalid start byte\. Use comma"
    ):
        read_schedule(path)
    path.write_text('0F0,"0B0\n')
    with pytest.raises(
        CorruptDataError, match=r"mine\.csv is not valid CSV: unexpected end of data"
    ):
        read_schedule(path)
    path.write_bytes(b"," * ((1 << 23) + 1))
    with pytest.raises(CorruptDataError, match=r"mine\.csv has more than 8388608 bytes"):
        read_schedule(path)
    with pytest.raises(CorruptDataError, match=r"nowhere\.csv cannot be read: No such file"):
        read_schedule(tmp_path / "nowhere.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(CorruptDataError, match=r"pipe\.csv is not a regular file"):
        read_schedule(tmp_path / "pipe.csv")
