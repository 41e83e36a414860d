"""The command ``schedule``: its tables, comparisons, pictures, files and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli import draw_schedule
from lightning_megatron.cli.schedule_costs import read_costs
from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan import StageCosts, build_schedule, simulate
from lightning_megatron.plan.schedule import SCHEDULE_NAMES
from tests.cli.test_layout import png_size

SIZES = "--pp 4 --microbatches 8"
UNEVEN: dict[str, Any] = {"forward": [13, *[10] * 6, 14], "input_half": [*[12] * 7, 18]}
UNEVEN |= {"weight_half": [*[8] * 7, 11], "transfer": 1}


@pytest.fixture
def shown(printed: Callable[..., str]) -> Callable[..., str]:
    return lambda text, *more: printed(f"schedule {text}", *more)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Write uneven costs."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(UNEVEN))
    return path


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the rows of the table in a text by their first cell; two blanks divide cells."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 5}


def test_a_schedule_is_printed_rank_by_rank(shown):
    text = shown(f"--name 1f1b {SIZES}")
    assert text.startswith("schedule 1f1b: pp 4, 8 microbatches, 1 chunk\nstep 33 ticks, bubble 27")
    assert rows_of(text) == {
        "rank": ["busy", "idle", "waits", "in flight", "activations"],
        "0": ["24", "9", "9", "4", "4"],
        "1": ["24", "9", "6", "3", "3"],
        "2": ["24", "9", "3", "2", "2"],
        "3": ["24", "9", "0", "1", "1"],
    }
    text = shown(f"--name interleaved --vpp 4 {SIZES}")
    assert rows_of(text)["0"] == ["96", "9", "9", "19", "4.75"]


def test_a_comparison_gives_every_schedule_the_same_work(shown):
    rows = rows_of(shown(SIZES))
    assert list(rows) == ["schedule", *SCHEDULE_NAMES]
    ticks = {name: int(cells[1]) for name, cells in rows.items() if name != "schedule"}
    # A stage takes two ticks, because each of its two chunks takes one.
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert ticks[name] == 2 * simulate(build_schedule(name, 4, 8)).length
    for name in ("interleaved", "zb-v", "dualpipe-v"):
        assert ticks[name] == simulate(build_schedule(name, 4, 8, 2)).length


def test_schedules_that_cannot_run_are_listed_with_the_reason(shown):
    sizes = "--pp 4 --microbatches 6"
    table, reasons = shown(sizes).split("cannot run at these sizes:")
    names = [name for name in SCHEDULE_NAMES if name not in ("interleaved", "dualpipe-v")]
    assert list(rows_of(table)) == ["schedule", *names]
    assert "dualpipe-v: schedule 'dualpipe-v' needs at least two" in " ".join(reasons.split())
    assert "interleaved" in rows_of(shown(f"{sizes} --microbatch-group-size 6"))


def test_costs_of_small_chunks_are_summed_for_larger_chunks(uneven, shown):
    per_stage = StageCosts((23, 20, 20, 24), (24, 24, 24, 30), (16, 16, 16, 19), 1)
    per_chunk = StageCosts(*(tuple(UNEVEN[name]) for name in list(UNEVEN)[:3]), 1)
    rows = rows_of(shown(f"--costs {uneven} {SIZES}"))
    assert rows["1f1b"][1] == str(simulate(build_schedule("1f1b", 4, 8), per_stage).length)
    assert rows["zb-v"][1] == str(simulate(build_schedule("zb-v", 4, 8, 2), per_chunk).length)


def test_activations_are_printed_in_the_unit_of_the_costs_file(tmp_path, shown, refused):
    path = tmp_path / "costs.yaml"
    lines = [f"{name}: [1, 1]" for name in list(UNEVEN)[:3]]
    path.write_text("\n".join([*lines, "kept: [250, 1.5e+2]", "weight_half_share: 0.5"]))
    sizes = "--pp 2 --microbatches 4"
    rows = rows_of(shown(f"--name 1f1b {sizes} --costs {path}"))
    assert [rows["0"][-1], rows["1"][-1]] == ["500", "150"]
    # The last stage of zb-h1 keeps a microbatch, and a second one whose weight half waits.
    rows = rows_of(shown(f"--name zb-h1 {sizes} --costs {path}"))
    assert [rows["0"][-1], rows["1"][-1]] == ["500", "225"]
    message = refused(f"schedule --name 1f1b {sizes} --costs {path} --memory 499")
    assert "keeps 500 on stage 0, the limit is 499. Use a limit of 500 or" in message
    text = shown(f"{sizes} --memory 1.9")
    assert rows_of(text)["1f1b"][-1] == "2*"
    assert "* more than the limit of 1.9" in text


def test_timelines_are_drawn_as_svg_png_and_pdf(tmp_path, shown, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.svg"
    text = shown(f"--pp 2 --microbatches 4 --png {path}")
    assert text.splitlines()[0] in path.read_text(encoding="utf-8"), "the table is in the file"
    shown(f"--name gpipe {SIZES} --png {tmp_path / 'one.pdf'}")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    path = tmp_path / "one.png"
    shown(f"--name zb-v {SIZES} --png {path}")
    assert b"schedule zb-v: pp 4, 8 microbatches, 2 chunks in a V" in path.read_bytes()
    monkeypatch.setattr(draw_schedule, "MAX_PIXELS", 400)
    shown(f"--name zb-v {SIZES} --png {path}")
    assert 390 < max(png_size(path)) <= 400


def test_invalid_arguments_and_impossible_sizes_end_the_command_with_a_message(refused):
    for arguments, message in {
        f"--name zb {SIZES}": "zb-v, dualpipe-v",
        "--pp 0": "pp: expected a number >0: 0 is given.",
        f"{SIZES} --png x.doc": "'x.doc' must end in .png, .svg, .pdf",
        f"{SIZES} --memory 0": "memory: expected a number >0: 0 is given.",
        f"--name zb-v {SIZES} --vpp 3": "runs two chunks per stage: vpp is 3",
    }.items():
        assert message in refused(f"schedule {arguments}"), arguments


LISTS = "forward: [1, 1]\ninput_half: [1, 1]\nweight_half: [1, 1]\n"
INVALID_COSTS = {
    LISTS + "backward: [1, 1]\n": "costs has no setting 'backward'. Its settings are forward,",
    LISTS.replace("1]", "1.5]"): "forward[1] must be a whole number of at least 1",
    LISTS.replace("1]", "'1']"): "forward[1] must be a whole number of at least 1: it is '1'",
    LISTS + "kept: [1]\n": "kept must have a size for every virtual stage: it has 1",
    LISTS + "weight_half_share: 1.5\n": "weight_half_share must be a finite number of at least 0",
    LISTS.replace("[1, 1]", "[1]", 1): "the lengths of the lists are {'forward': 1,",
    LISTS.replace("1]", "1, 1]"): "they name 3, pp is 2. Use 2 times in each list",
}
DAMAGED_COSTS: list[tuple[str, str | bytes, str]] = [
    ("json", "{'forward': [1}", "costs.json is not valid YAML: while parsing a flow sequence"),
    ("yaml", b"\xff", "costs.yaml is not valid YAML: unacceptable character"),
    ("yaml", "# long\n" * 20000, "has more than 131072 bytes"),
]


def test_invalid_and_damaged_costs_are_refused(tmp_path):
    invalid = [("yaml", text, message) for text, message in INVALID_COSTS.items()]
    for error, cases in ((ParallelPlanError, invalid), (CorruptDataError, DAMAGED_COSTS)):
        for suffix, text, message in cases:
            path = tmp_path / f"costs.{suffix}"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            with pytest.raises(error) as raised:
                read_costs(path, 2)
            assert message in str(raised.value)
            assert str(path) in str(raised.value)
