"""Tests of the subcommand `scaling-study`: models of the paper, real jobs, and rows of failures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from lightning_megatron.cli.scaling_cases import SIZES, STUDIES, cases_of, found_in_paper
from lightning_megatron.cli.scaling_report import ScalingRow, records_of, table_of
from lightning_megatron.cli.separate_job import reason_in
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.model_flops import flops_per_token
from tests.sweeps import chosen

TINY = ("scaling-study", "--size", "tiny", "--steps", "2", "--warmup", "1")


def test_models_match_table_1_of_the_paper() -> None:
    cases = cases_of("model+data", "paper", 64, 8)
    actual = [
        (
            case.hidden_size,
            case.num_heads,
            case.num_layers,
            round(case.parameters / 1e9, 1),
            case.tp,
        )
        for case in cases[1:]
    ]
    assert actual == [
        (1536, 16, 40, 1.2, 1),
        (1920, 20, 54, 2.5, 2),
        (2304, 24, 64, 4.2, 4),
        (3072, 32, 72, 8.3, 8),
    ]
    assert [case.devices for case in cases] == [1, 64, 128, 256, 512]
    assert {case.batch_size for case in cases[1:]} == {512}
    assert {case.hidden_size // case.num_heads for case in cases} == {96}
    heads = [
        (case.num_heads, case.hidden_size // case.num_heads)
        for case in cases_of("heads", "paper", 2, 8)
    ]
    assert heads == [(16, 96), (16, 192), (24, 128), (32, 96)]
    strong = cases_of("strong", "paper", 2, 8)
    assert [found_in_paper("strong", case) for case in strong] == [
        "1.0 x",
        "1.64 x",
        "2.34 x",
        "2.98 x",
    ]


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_divides_heads_and_widths(size: str) -> None:
    for study in STUDIES:
        for case in cases_of(study, size, 2, 8):  # type: ignore[arg-type]
            assert case.num_heads % case.tp == case.vocab_size % case.tp == 0
            assert case.hidden_size % case.num_heads == case.batch_size % case.dp == 0


def test_parameter_counts_match_the_model() -> None:
    for case in cases_of("model", "tiny", 2, 8)[:2]:
        assert case.parameters == sum(
            parameter.numel() for parameter in GPT(case.config).parameters()
        )


def test_efficiency_and_speedup_compare_with_the_first_row() -> None:
    first, second, third, _ = cases_of("model", "tiny", 2, 8)
    rows = [
        ScalingRow("model", first, 0.5, None, 6.0, ""),
        ScalingRow("model", second, 1.0, 2.5, 6.0, ""),
        ScalingRow("model", third, None, None, None, "out of memory"),
    ]
    records = records_of(rows)
    tokens = 8 * 64
    assert [record["tokens_per_second"] for record in records] == [tokens / 0.5, tokens, None]
    rates = [
        tokens / 0.5 * flops_per_token(first.config, 64) / 1e12,
        tokens * flops_per_token(second.config, 64) / 2 / 1e12,
    ]
    assert [record["tflops_per_device"] for record in records] == [*map(pytest.approx, rates), None]
    assert records[1]["efficiency"] == pytest.approx(rates[1] / rates[0])
    assert records[1]["speedup"] == 0.5
    assert records[2]["efficiency"] is None
    table = table_of(records)
    assert "100.0%" in table
    assert "24 heads, tp 4, dp 1: out of memory" in table


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nb", 1, "out of memory"),
        ("", -9, "ended by SIGKILL, perhaps for lack of host memory"),
        ("  File x\nValueError: tp must\n\nlater", 1, "exit code 1: ValueError: tp must"),
        ("last words\n\n", 3, "exit code 3: last words"),
        ("", 1, "exit code 1: no output"),
    ],
)
def test_reason_of_a_failure_comes_from_output_or_exit_code(
    text: str, code: int, reason: str
) -> None:
    assert reason_in(text, code) == reason


def test_a_study_runs_its_jobs_and_writes_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TINY, "--devices", "2", "--studies", "strong", "--output", str(tmp_path)])
    study = json.loads((tmp_path / "study.json").read_text())
    rows = study["rows"]
    assert [row["devices"] for row in rows] == [1, 2, 4, 8]
    assert [row["failure"] for row in rows[2:]] == [
        "needs 4 devices: there are 2",
        "needs 8 devices: there are 2",
    ]
    one_device, two_devices = rows[:2]
    assert one_device["efficiency"] == one_device["speedup"] == 1.0
    assert two_devices["tokens_per_second"] == pytest.approx(512 / two_devices["seconds_per_step"])
    assert two_devices["speedup"] == pytest.approx(
        one_device["seconds_per_step"] / two_devices["seconds_per_step"]
    )
    # Both jobs run the same training in float32.
    assert two_devices["loss"] == pytest.approx(one_device["loss"], rel=1e-4)
    assert study["flop_rule"].startswith("model FLOPs of forward and backward")
    with (tmp_path / "study.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["seconds_per_step"]) for row in read[:2]] == [
        row["seconds_per_step"] for row in rows[:2]
    ]
    printed = capsys.readouterr().out
    assert "strong scaling of the first model (table 8)" in printed
    assert (tmp_path / "study.png").is_file() or "No picture" in printed


FAILURES = [
    (("--precision", "7"), "exit code 1: ValueError: Precision '7' is invalid"),
    (("--timeout", "1"), "took longer than 1 s (--timeout)"),
]


@pytest.mark.parametrize(("options", "reason"), chosen(FAILURES, FAILURES[1]))
def test_a_failed_job_becomes_a_row_with_its_reason(
    tmp_path: Path, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TINY, "--devices", "1", "--studies", "strong", *options, "--output", str(tmp_path)])
    row = json.loads((tmp_path / "study.json").read_text())["rows"][0]
    assert row["failure"].startswith(reason)
    assert row["efficiency"] is None
    assert reason in capsys.readouterr().out


def test_fewer_than_two_replicas_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "--replicas", "1", "--output", str(tmp_path)])
    assert "--replicas must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"sequence": true}', "got ['sequence']"),
        ('{"tp": 2}', "got ['tp']"),
        ("[1]", "--strategy must hold a JSON object"),
    ],
)
def test_invalid_options_of_the_strategy_are_refused(
    tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "--strategy", text, "--output", str(tmp_path)])
    assert reason in capsys.readouterr().err


def test_options_reach_the_strategy_of_the_jobs(tmp_path: Path) -> None:
    settings = '{"zero": 0, "sequence_parallel": true}'
    options = ["--devices", "2", "--studies", "strong", "--strategy", settings]
    main([*TINY, *options, "--output", str(tmp_path)])
    study = json.loads((tmp_path / "study.json").read_text())
    assert study["strategy"] == json.loads(settings)
    # One device has no tokens to divide: the strategy refuses sequence parallelism there.
    failure = study["rows"][0]["failure"]
    assert "sequence_parallel" in failure
    assert study["rows"][1]["failure"] == ""
