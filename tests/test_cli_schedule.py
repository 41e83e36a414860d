"""Tests of the command `schedule`: its tables, comparisons, pictures, files and errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli import draw_schedule
from lightning_megatron.cli.draw_schedule import draw_schedules
from lightning_megatron.cli.main import main as run_command
from lightning_megatron.cli.schedule import main
from lightning_megatron.cli.schedule_costs import equal_costs, read_costs
from lightning_megatron.cli.schedule_outcome import NAMES, PipelineSizes, compare, simulated
from lightning_megatron.errors import CorruptDataError, MissingExtraError, ParallelPlanError
from lightning_megatron.plan import StageCosts, build_schedule, read_schedule, simulate
from tests.test_cli_layout import png_size

SIZES = ["--pp", "4", "--microbatches", "8"]
UNEVEN = {
    "forward": [13, 10, 10, 10, 10, 10, 10, 14],
    "input_half": [12, 12, 12, 12, 12, 12, 12, 18],
    "weight_half": [8, 8, 8, 8, 8, 8, 8, 11],
    "transfer": 1,
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the rows of the table in a text by their first cell; two blanks divide cells."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 5}


def test_a_schedule_is_printed_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--name", "1f1b", *SIZES)
    assert text.startswith(
        "schedule 1f1b: pp 4, 8 microbatches, 1 chunk\n"
        "step 33 ticks, bubble 27.3%; forward, input half and weight half of a stage take a tick "
        "each\n"
    )
    assert rows_of(text) == {
        "rank": ["busy", "idle", "waits", "in flight", "activations"],
        "0": ["24", "9", "9", "4", "4"],
        "1": ["24", "9", "6", "3", "3"],
        "2": ["24", "9", "3", "2", "2"],
        "3": ["24", "9", "0", "1", "1"],
    }
    text = printed(capsys, "--name", "interleaved", "--chunks", "4", *SIZES)
    assert "interleaved: pp 4, 8 microbatches, 4 chunks in a loop\nstep 105 ticks" in text
    assert "weight half of 1/4 of a stage take a tick each" in text
    assert rows_of(text)["0"] == ["96", "9", "9", "19", "4.75"]


def test_the_program_runs_the_schedule_command(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["schedule", "--name", "zb-h1", *SIZES])
    assert "schedule zb-h1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command(["schedule", "--name", "zb", *SIZES])
    assert (
        "lightning-megatron schedule: error: schedule must be 1f1b, interleaved"
        in capsys.readouterr().err
    )


def test_a_comparison_gives_every_schedule_the_same_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of(printed(capsys, "--compare", *SIZES))
    assert list(rows) == ["schedule", *NAMES[:-1], "auto (zb-v)"]
    ticks = {name: int(cells[1]) for name, cells in rows.items() if name != "schedule"}
    # A stage takes two ticks, because each of its two chunks takes one.
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert ticks[name] == 2 * simulate(build_schedule(name, 4, 8)).length
    for name in ("interleaved", "zb-v", "dualpipe-v"):
        assert ticks[name] == simulate(build_schedule(name, 4, 8, 2)).length
    assert ticks["auto (zb-v)"] == min(ticks.values())


def test_schedules_that_cannot_run_are_listed_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--compare", "--pp", "4", "--microbatches", "6")
    table, reasons = text.split("cannot run at these sizes:")
    assert list(rows_of(table)) == [
        "schedule",
        *["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v"],
        "auto (zb-v)",
    ]
    words = " ".join(reasons.split())
    assert "dualpipe-v: schedule 'dualpipe-v' needs at least two microbatches per stage" in words
    assert "interleaved: microbatch groups must have at least pp" in words
    text = printed(
        capsys, "--compare", "--pp", "4", "--microbatches", "6", "--microbatch-group-size", "6"
    )
    assert "interleaved" in rows_of(text)


def test_costs_of_small_chunks_are_summed_for_larger_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(UNEVEN))
    per_stage = StageCosts((23, 20, 20, 24), (24, 24, 24, 30), (16, 16, 16, 19), 1)
    per_chunk = StageCosts(*(tuple(UNEVEN[name]) for name in list(UNEVEN)[:3]), 1)  # type: ignore[arg-type]
    rows = rows_of(printed(capsys, "--compare", "--costs", str(path), *SIZES))
    assert rows["1f1b"][1] == str(simulate(build_schedule("1f1b", 4, 8), per_stage).length)
    assert rows["zb-v"][1] == str(simulate(build_schedule("zb-v", 4, 8, 2), per_chunk).length)
    text = printed(capsys, "--name", "zb-h1", "--costs", str(path), *SIZES)
    assert f"step {simulate(build_schedule('zb-h1', 4, 8), per_stage).length} ticks" in text
    assert f"times of {path}" in text


def test_activations_are_printed_in_the_unit_of_the_costs_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.yaml"
    lines = [f"{name}: [1, 1]" for name in list(UNEVEN)[:3]]
    path.write_text("\n".join([*lines, "kept: [250, 1.5e2]", "weight_half_share: 0.5"]))
    sizes = ["--pp", "2", "--microbatches", "4", "--costs", str(path)]
    rows = rows_of(printed(capsys, "--name", "1f1b", *sizes))
    assert [rows["0"][-1], rows["1"][-1]] == ["500", "150"]
    # The last stage of zb-h1 keeps a microbatch, and a second one whose weight half waits.
    rows = rows_of(printed(capsys, "--name", "zb-h1", *sizes))
    assert [rows["0"][-1], rows["1"][-1]] == ["500", "225"]
    with pytest.raises(
        ParallelPlanError,
        match=r"schedule '1f1b' keeps 500 on stage 0, the limit is 499\. Use a limit of 500 or",
    ):
        main(["--name", "1f1b", *sizes, "--memory", "499"])
    text = printed(capsys, "--compare", *sizes[:4], "--memory", "1.9")
    assert rows_of(text)["1f1b"][-1] == "2*"
    assert rows_of(text)["auto"][-1].endswith("*") is False
    assert "* more than the limit of 1.9" in text


def test_auto_prints_the_schedules_that_it_was_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(UNEVEN))
    arguments = ["--name", "auto", "--pp", "4", "--microbatches", "16", "--costs", str(path)]
    text = printed(capsys, *arguments)
    ticks = [
        simulate(build_schedule(name, 4, 16, 2), read_costs(path, 4).times).length
        for name in ("interleaved", "zb-v", "dualpipe-v")
    ]
    assert (
        f"beside it: interleaved {ticks[0]} ticks (keeps too much: 5.5), zb-v {ticks[1]} ticks, "
        f"dualpipe-v {ticks[2]} ticks (keeps too much: 4.5)\n"
    ) in text
    step = re.search(r"step (\d+) ticks", text)
    assert step is not None
    assert int(step[1]) < ticks[1]
    # The default limit is the memory of 1f1b.
    assert max(float(cells[-1]) for rank, cells in rows_of(text).items() if rank != "rank") <= 4


def test_a_custom_schedule_is_written_and_read_and_checked_after_an_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    text = printed(capsys, "--name", "zb-v", *SIZES, "--csv", str(path))
    assert text.endswith(f"\nactions: {path}\n")
    assert read_schedule(path).rows == build_schedule("zb-v", 4, 8, 2).rows
    assert f"schedule {path}: pp 4, 8 microbatches, 2 chunks in a V\n" in printed(
        capsys, "--name", str(path), "--pp", "4"
    )
    rows = rows_of(printed(capsys, "--compare", "--name", str(path), "--chunks", "4"))
    assert rows[str(path)][1:] == rows["zb-v"][1:]
    assert rows["interleaved"][0] == "4 chunks in a loop"
    with pytest.raises(
        ParallelPlanError,
        match=r"--pp must be that of the file: it is 2, .*mine\.csv has 4\. Leave",
    ):
        main(["--name", str(path), "--pp", "2"])
    path.write_text(path.read_text().replace("0F0,0F1", "0F1"))
    with pytest.raises(
        ParallelPlanError, match=r"I of microbatch 0 in chunk 0 happens before its F"
    ):
        main(["--name", str(path)])


def test_timelines_are_drawn_as_svg_png_and_pdf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.svg"
    text = printed(capsys, "--compare", "--pp", "2", "--microbatches", "4", "--png", str(path))
    assert text.endswith(f"\ntimelines: {path}\n")
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    # The table is in the file.
    assert text.splitlines()[0] in drawn
    path = tmp_path / "one.png"
    printed(capsys, "--name", "zb-v", *SIZES, "--png", str(path))
    width, height = png_size(path)
    assert width > 800
    assert 200 < height < 600
    assert b"schedule zb-v: pp 4, 8 microbatches, 2 chunks in a V" in path.read_bytes()
    printed(capsys, "--name", "gpipe", *SIZES, "--png", str(tmp_path / "one.pdf"))
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_has_a_box_with_a_number_for_every_action(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes_module = pytest.importorskip("matplotlib.axes")
    boxes: list[tuple[float, float, float]] = []
    numbers: list[tuple[float, float, str]] = []
    draw_boxes, draw_text = axes_module.Axes.broken_barh, axes_module.Axes.text

    def broken_barh(self: object, spans: list, band: tuple, **options: object) -> object:
        boxes.extend((start, start + length, band[0] + band[1] / 2) for start, length in spans)
        return draw_boxes(self, spans, band, **options)

    def text(self: object, x: float, y: float, words: str, **options: object) -> object:
        numbers.append((x, y, words))
        return draw_text(self, x, y, words, **options)

    monkeypatch.setattr(axes_module.Axes, "broken_barh", broken_barh)
    monkeypatch.setattr(axes_module.Axes, "text", text)
    schedule = build_schedule("zb-v", 3, 5, 2)
    outcome = simulated(schedule, equal_costs(3, 2))
    draw_schedules([outcome], tmp_path / "x.png", "title", "text")
    spans = [span for row in outcome.timeline.rows for span in row]
    assert boxes == [(span.start, span.stop, span.stage) for span in spans]
    expected = [
        ((span.start + span.stop) / 2, span.stage, str(span.action.microbatch)) for span in spans
    ]
    assert [entry for entry in numbers if entry in expected] == expected
    assert len(numbers) == len(expected) + schedule.num_stages


def test_the_longer_side_of_a_picture_has_at_most_max_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(draw_schedule, "MAX_PIXELS", 400)
    outcome = simulated(build_schedule("gpipe", 2, 3), equal_costs(2, 1))
    draw_schedules([outcome], tmp_path / "x.png", "title", "text")
    assert 390 < max(png_size(tmp_path / "x.png")) <= 400


def test_error_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[plot\]"'):
        main(["--name", "1f1b", *SIZES, "--png", str(tmp_path / "x.png")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--name NAME, or --compare, is required"),
        (["--name", "1f1b", "--pp", "4"], "--pp and --microbatches are required"),
        (["--compare", *SIZES, "--csv", "x.csv"], "--csv writes one schedule, and --compare"),
        (["--compare", *SIZES, "--png", "x.doc"], "'x.doc' must end in .png, .svg, .pdf"),
        (["--compare", *SIZES, "--png", "nowhere/x.png"], "folder 'nowhere' does not exist"),
        (["--name", "1f1b", *SIZES, "--csv", "x.txt"], "'x.txt' must end in .csv"),
        (["--compare", *SIZES, "--memory", "0"], "must be a number above 0: it is '0'"),
        (["--compare", *SIZES, "--memory", "nan"], "must be a number above 0: it is 'nan'"),
    ],
)
def test_invalid_arguments_end_the_command_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--name", "zb", *SIZES],
            "schedule must be 1f1b, interleaved, gpipe, zb-h1, zb-h2, zb-v, dualpipe-v or auto, or a file that ends "
            "in .csv: it is 'zb'.",
        ),
        (["--name", "zb-v", "--pp", "0", "--microbatches", "8"], "pp must be a whole number of at"),
        (["--compare", "--pp", "4", "--microbatches", "0"], "num_microbatches must be a whole"),
        (["--compare", *SIZES, "--chunks", "-1"], "vpp must be a whole number of at least 1"),
        (["--name", "zb-h1", *SIZES, "--chunks", "2"], "schedule 'zb-h1' runs one chunk per stage"),
        (
            ["--name", "auto", *SIZES, "--memory", "0.5"],
            "activations must fit into memory: the limit is 0.5, one microbatch in all chunks of the fullest stage keeps "
            "1.",
        ),
    ],
)
def test_impossible_sizes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        main(arguments)
    assert message in str(error.value)


LISTS = "forward: [1, 1]\ninput_half: [1, 1]\nweight_half: [1, 1]\n"
REMEDY = "Use lists of whole numbers, forward, input_half and weight_half, with one for each virtual stage."


def write_and_read_costs(tmp_path: Path, name: str, text: str | bytes) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    read_costs(path, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "costs must be a mapping of names to lists: they are None. Use lists of whole"),
        ("[1, 1]", "costs must be a mapping of names to lists: they are [1, 1]."),
        ("forward: [1, 1]\n", "costs must have input_half, weight_half: it has forward."),
        (
            LISTS + "backward: [1, 1]\n",
            "costs has no setting 'backward'. Its settings are forward,",
        ),
        (LISTS.replace("1]", "1.5]"), "forward[1] must be a whole number of at least 1: it is 1.5"),
        (LISTS.replace("1]", "0]"), "forward[1] must be a whole number of at least 1: it is 0."),
        (
            LISTS.replace("1]", "12:30]"),
            "forward[1] must be a whole number of at least 1: it is '12:30'",
        ),
        (
            LISTS.replace("1]", "true]"),
            "forward[1] must be a whole number of at least 1: it is 'true'",
        ),
        (LISTS.replace("1]", "'1']"), "forward[1] must be a whole number of at least 1: it is '1'"),
        (LISTS.replace("1]", f"{'9' * 5000}]"), "forward[1] must be a whole number of at least 1"),
        (
            LISTS.replace("1]", "99999999999]"),
            "forward[1] must be a whole number of at least 1 and at most 2147483647",
        ),
        (LISTS + "transfer: -1\n", "transfer must be a whole number of at least 0: it is -1."),
        (LISTS + "kept: [1, 0]\n", "kept[1] must be a finite number above 0: it is 0."),
        (LISTS + "kept: [1, 1e999]\n", "kept[1] must be a finite number above 0: it is inf"),
        (
            LISTS + "kept: [1]\n",
            "kept must have a size for every virtual stage: it has 1, forward has 2. Use 2 sizes.",
        ),
        (
            LISTS + "weight_half_share: 1.5\n",
            "weight_half_share must be a finite number of at least 0 and at most 1",
        ),
        (
            LISTS.replace("[1, 1]", "[1]", 1),
            "the lengths of the lists are {'forward': 1, 'input_half': 2,",
        ),
        (
            LISTS.replace("1]", "1, 1]"),
            "costs must name the virtual stages of every stage, equally many: they name 3, pp is 2. Use 2 times in each "
            "list, or a multiple of 2.",
        ),
    ],
)
def test_invalid_costs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        write_and_read_costs(tmp_path, "costs.yaml", text)
    assert str(error.value).startswith(f"{tmp_path / 'costs.yaml'}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("costs.json", "{'forward': 1}", "costs.json is not valid JSON: Expecting property name"),
        ("costs.json", '{"forward": [NaN]}', "NaN is no number of JSON"),
        ("costs.yaml", b"\xff", "costs.yaml is not valid YAML: 'utf-8' codec can't decode"),
        (
            "costs.yaml",
            "forward: [1",
            "costs.yaml is not valid YAML: while parsing a flow sequence",
        ),
        (
            "costs.yaml",
            "[" * 100000,
            "costs.yaml must hold lists in a mapping: it is nested more deeply.",
        ),
        (
            "costs.yaml",
            LISTS + "forward: [2, 2]\n",
            "must name every list once: 'forward' occurs twice.",
        ),
        (
            "costs.yaml",
            "forward: &a [1, 1]\ninput_half: *a\n",
            "must not refer to its own parts (*name).",
        ),
        ("costs.yaml", "a: 1\n---\nb: 1\n", "expected a single document"),
        ("costs.yaml", "# long\n" * 20000, "has more than 131072 bytes"),
    ],
)
def test_damaged_costs_files_are_refused(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    with pytest.raises(CorruptDataError) as error:
        write_and_read_costs(tmp_path, name, text)
    assert message in str(error.value)


def test_costs_in_yaml_and_json_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({**UNEVEN, "kept": [0.5] * 8}))
    lines = [f"{name}: {value}" for name, value in UNEVEN.items()]
    (tmp_path / "costs.yml").write_text("\n".join(["# measured", *lines, f"kept: {[5e-1] * 8}"]))
    assert read_costs(tmp_path / "costs.yml", 4) == read_costs(tmp_path / "costs.json", 4)
    (tmp_path / "costs.yml").write_text("\n".join([*lines, "kept:"]))
    assert read_costs(tmp_path / "costs.yml", 2).kept == (0.25,) * 8


def test_costs_for_another_number_of_virtual_stages_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError,
        match=r"they have 8, and the schedule has 12 virtual stages\. Use 12 times in each list",
    ):
        equal_costs(4, 2).of(12)
    comparison = compare(PipelineSizes(4, 8, 3), equal_costs(4, 2), None)
    assert list(comparison.refusals) == ["interleaved", "auto"]
