"""Models of the paper, their efficiencies, and jobs that run, fail or take too long."""

from __future__ import annotations

import sys
from itertools import product

import pytest

from lightning_megatron.models.gpt import GPT
from lightning_megatron.tasks.scaling.measured_job import reason_in, run_job
from lightning_megatron.tasks.scaling.scaling_cases import SIZES, STUDIES, cases_of, found_in_paper
from lightning_megatron.tasks.scaling.scaling_report import ScalingRow, records_of, table_of


def test_reason_of_a_failure_comes_from_output_or_exit_code():
    for text, code, reason in (
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nb", 1, "out of memory"),
        ("", -9, "ended by SIGKILL, perhaps for lack of host memory"),
        ("  File x\nValueError: tp must\n\nlater", 1, "exit code 1: ValueError: tp must"),
        ("last words\n\n", 3, "exit code 3: last words"),
    ):
        assert reason_in(text, code) == reason


def test_jobs_end_with_their_reason_or_after_the_timeout(tmp_path):
    for program, reason in {
        "print(1)": None,
        "raise ValueError('tp must')": "exit code 1: ValueError: tp must",
        "import time; time.sleep(600)": "took longer than 1 s (--timeout)",
    }.items():
        command = [sys.executable, "-S", "-c", program]
        assert run_job(command, tmp_path / "log.txt", 1 if "sleep" in program else 60) == reason


def test_models_match_table_1_of_the_paper():
    cases = cases_of("model+data", "paper", 64, 8)
    sizes = [(case.hidden_size, case.num_heads, case.num_layers, case.tp) for case in cases[1:]]
    assert sizes == [(1536, 16, 40, 1), (1920, 20, 54, 2), (2304, 24, 64, 4), (3072, 32, 72, 8)]
    assert [round(case.parameters / 1e9, 1) for case in cases[1:]] == [1.2, 2.5, 4.2, 8.3]
    assert [case.devices for case in cases] == [1, 64, 128, 256, 512]
    published = [found_in_paper("strong", case) for case in cases_of("strong", "paper", 2, 8)]
    assert published == ["1.0 x", "1.64 x", "2.34 x", "2.98 x"]


def test_layouts_divide_heads_and_widths_and_parameters_are_counted():
    for size, study in product(SIZES, STUDIES):
        for case in cases_of(study, size, 2, 8):
            assert case.num_heads % case.tp == case.vocab_size % case.tp == 0
            assert case.hidden_size % case.num_heads == case.batch_size % case.dp == 0
    case = cases_of("model", "tiny", 2, 8)[1]
    assert case.parameters == sum(parameter.numel() for parameter in GPT(case.config).parameters())


def test_efficiency_and_speedup_compare_with_the_first_row():
    first, second, third, _ = cases_of("model", "tiny", 2, 8)
    records = records_of(
        [
            ScalingRow("model", first, 0.5, None, 6.0, ""),
            ScalingRow("model", second, 1.0, 2.5, 6.0, ""),
            ScalingRow("model", third, None, None, None, "out of memory"),
        ]
    )
    per_step = [8 * 64 * case.config.flops_per_token(64) / 1e12 for case in (first, second)]
    rates = [pytest.approx(per_step[0] / 0.5), pytest.approx(per_step[1] / 2), None]
    assert [record["tflops_per_device"] for record in records] == rates
    assert records[1]["efficiency"] == pytest.approx(per_step[1] / 2 / (per_step[0] / 0.5))
    assert records[1]["speedup"] == 0.5
    assert "24 heads, tp 4, dp 1: out of memory" in table_of(records)
