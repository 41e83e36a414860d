"""The benchmark of CUDA graphs runs its cases, survives failing cases, and counts launches."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from benchmarks.graph_tables import Measured, tables
from benchmarks.graphs import (
    Case,
    Work,
    cases_of,
    mode_of,
    parser,
    run_cases,
    said_of_graphs,
    work_of,
)
from benchmarks.host_time import LOOP, PARTS, PartTimes, timing
from benchmarks.launches import count_launches, launches_of
from benchmarks.ranks import last_error, run_ranks

PEER = """
import json, os
print("RESULT " + json.dumps(dict(ms=10.0, row_ms=8.0, tok_s_gpu=6400, mem_gib=1.5, loss=6.2)))
"""
GEMM = "nvjet_sm90_tst_256x128"
FILL = "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>"


def test_a_work_has_the_sizes_of_its_name() -> None:
    assert work_of("tiny") == Work("tiny", "single")
    work = work_of("qwen3_12:ep2:6:4")
    assert (work.config.num_layers, work.batch, work.microbatch) == (6, 4, 4)
    assert work_of("llama8b_half:pp2:0:64").microbatch == 1
    assert str(work) == "qwen3_12 ep2 6 layers 4 samples"
    with pytest.raises(ArgumentTypeError, match="known model and layout: 'gpt9:single'"):
        work_of("gpt9:single")
    with pytest.raises(ArgumentTypeError, match="must be numbers: 'tiny:single:two'"):
        work_of("tiny:single:two")


def test_a_mode_is_a_name_or_the_fields_of_the_option() -> None:
    assert mode_of("eager") == ("eager", "eager", None)
    assert mode_of("full") == ("full", "full", "full")
    captured = {"mode": "full", "optimizer": True}
    assert mode_of("full+update") == ("full+update", "full", captured)
    fields = {"mode": "segments", "scopes": ["attention"]}
    text = '{"mode": "segments", "scopes": ["attention"]}'
    assert mode_of(text) == ("segments scopes ['attention']", "segments", fields)
    for wrong in ("half", "eager+update", '{"scopes": ["all"]}', "{"):
        with pytest.raises(ArgumentTypeError, match="a mode must be"):
            mode_of(wrong)


def test_our_cases_and_cases_of_the_peer_run_after_a_failing_case(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    line = ["--works", "tiny_llama:single", "--modes", "segments", "eager", "--accelerator", "cpu"]
    line += ["--steps", "3", "--warmup", "2", "--timeout", "300", "--out", str(tmp_path / "out")]
    line += ["--peer", str(peer), "--peer-graphs", "transformer_engine:attn", "none"]
    args = parser().parse_args(line)
    results = run_cases(cases_of(args), args)
    failed, eager, *peers = results
    assert "cuda_graphs" in failed.failure, failed.failure
    assert failed.failure.split(":")[0].endswith("Error")
    assert [result.failure for result in (eager, *peers)] == ["", "", ""]
    # Two steps precede three steps for which the host waits, then three precede three in a row.
    assert len(eager.figures["losses"]) == 11
    assert eager.figures["row_mean_ms"] > 0
    host = eager.figures["HostTime"]
    assert set(host) == {LOOP, *PARTS, "all"}
    assert all(host[part] > 0 for part in ("batch", "passes", "update", "loop", "all"))
    assert host["replays"] == 0
    assert eager.figures["GraphFigures"]["graphs"] == 0
    text = tables(results, args.steps, args.warmup)
    assert f"| tiny_llama single | ours | segments | failed: {failed.failure} |" in text
    ratio = f"{eager.figures['step_ms'] / 10.0:.3f}"
    assert f"| {ratio} ({ratio}) |" in text


def test_cases_stop_when_the_time_is_over(tmp_path: Path) -> None:
    args = parser().parse_args(["--seconds", "0", "--out", str(tmp_path)])
    results = run_cases(cases_of(args), args)
    assert [result.failure for result in results] == ["not run: 0 s were over"] * 4


def test_ranks_that_wait_for_a_failed_rank_are_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('of rank 1')\n"
        "time.sleep(600)\n"
    )
    outcome = run_ranks([str(program)], 2, tmp_path / "log", 300.0)
    assert outcome.failure == "ValueError: of rank 1"
    assert outcome.seconds < 100
    late = run_ranks(["-c", "import time; time.sleep(600)"], 1, tmp_path / "log", 1.0)
    assert late.failure == "stopped after 1 s; no output"


def test_the_last_error_is_the_last_line_that_names_an_error() -> None:
    output = "[rank0]: torch.AcceleratorError: CUDA error: a | b\nsome warning\n"
    assert last_error(output) == "torch.AcceleratorError: CUDA error: a / b"
    assert last_error("Segmentation fault\n\n") == "Segmentation fault"


def test_launches_belong_to_the_step_in_which_their_kernels_run() -> None:
    def event(cat: str, name: str, ts: float, number: int | None) -> dict[str, Any]:
        args = {} if number is None else {"correlation": number}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1, "args": args}

    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0, 1),
        event("kernel", GEMM, 10, 1),
        event("kernel", GEMM, 12, 1),
        event("cuda_runtime", "cudaLaunchKernel", 1, 2),
        event("kernel", FILL, 14, 2),
        event("cuda_driver", "cuLaunchKernelEx", 2, 3),
        event("kernel", "_put_tokens", 25, 3),
        event("cuda_runtime", "cudaMemcpyAsync", 3, 4),
        event("gpu_memcpy", "Memcpy DtoD", 26, 4),
        # The kernel of this launch runs after the last step.
        event("cuda_runtime", "cudaLaunchKernel", 4, 5),
        event("kernel", FILL, 40, 5),
        event("cuda_runtime", "cudaDeviceSynchronize", 5, 6),
        event("cpu_op", "aten::mm", 5, None),
    ]
    launches = launches_of(events)
    assert [launch.call for launch in launches][:2] == ["cudaGraphLaunch", "cudaLaunchKernel"]
    assert launches[0].kernels == (GEMM, GEMM)
    counts = count_launches(launches, [(10.0, 20.0), (20.0, 30.0)])
    assert (counts["graphs"], counts["in_graphs"], counts["kernels"]) == (0.5, 1.0, 1.0)
    assert counts["names"] == {FILL: 0.5, "_put_tokens": 0.5}
    assert counts["calls"]["cudaMemcpyAsync"] == 0.5


def test_time_of_a_part_inside_another_part_counts_once() -> None:
    times = PartTimes()
    begin = time.perf_counter()
    times.start()
    with times.during("passes"):
        time.sleep(0.02)
        with times.during("replays"):
            time.sleep(0.03)
    seconds = times.take()
    assert seconds["replays"] >= 0.03
    assert seconds["passes"] >= 0.02
    assert sum(seconds.values()) <= time.perf_counter() - begin


def test_timed_functions_are_restored_afterwards() -> None:
    functions = [(owner, name) for part in PARTS.values() for owner, name in part]
    before = [owner.__dict__.get(name) for owner, name in functions]
    with timing(PartTimes()):
        during = [owner.__dict__.get(name) for owner, name in functions]
    assert all(original is not timed for original, timed in zip(before, during, strict=True))
    assert before == [owner.__dict__.get(name) for owner, name in functions]


def test_tables_compare_with_the_same_kind_of_graphs_and_with_the_fastest() -> None:
    work = work_of("tiny:single")
    figures: dict[str, Any] = {
        "step_ms": 8.0,
        "row_ms": 6.0,
        "row_mean_ms": 6.25,
        "tokens_per_second_per_rank": 128_000,
        "peak_gib": 5.0,
        "losses": [11.0, 10.5],
        "HostTime": dict.fromkeys(("all", LOOP, *PARTS), 0.5),
        "GraphFigures": {
            "graphs": 6,
            "slots": 1,
            "captures": 6,
            "capture_seconds": 1.5,
            "capturing_steps": [4, 30],
            "capturing_steps_seconds": 2.0,
            "static_inputs": 2**20,
            "gradient_copies": 0,
            "pools": 1,
            "pool_bytes": 2**30,
        },
        "Profile": {
            "step_ms": 8.0,
            "idle_ms": 2.0,
            "kernels": 400.0,
            "launches": {
                "calls": {"cudaGraphLaunch": 2.0, "cudaLaunchKernel": 1.0},
                "graphs": 2.0,
                "in_graphs": 399.0,
                "kernels": 1.0,
                "names": {FILL: 1.0},
            },
        },
    }
    peer = {"ms": 10.0, "row_ms": 12.5, "tok_s_gpu": 102_400, "mem_gib": 4.0, "loss": 10.6}
    results = [
        Measured(Case(work, "ours", "segments", "segments"), figures, "", 9.0, ("CUDA graphs: x",)),
        Measured(Case(work, "peer", "transformer_engine:attn", "segments"), peer, "", 9.0),
        Measured(
            Case(work, "peer", "full_iteration", "full"), {**peer, "ms": 5.0, "row_ms": 5.0}, "", 9
        ),
    ]
    text = tables(results, 20, 8)
    row = next(line for line in text.splitlines() if line.startswith("| tiny single | ours"))
    assert "| 8.0 | 6.0 | 6.25 | 128,000 / 163,840 |" in row
    assert "| 0.800 (1.600) | 0.500 (1.250) | 10.5000 |" in row
    assert "| tiny single | segments | 6 | 1 | 1.50 (2.00) | 5.0 | 1.00 in 1 | 1.0 | 0.0 |" in text
    # The device is busy for 6 ms of the 6.25 ms of a step in a row.
    assert "cudaGraphLaunch 2, cudaLaunchKernel 1 | 6.00 | 25.0% | 4.0% |" in text
    assert f"- 1 x `{FILL[:70]}`" in text
    assert "tiny single, segments:\n- CUDA graphs: x\n- Steps 30 captured graphs after" in text
    assert "the steps were eager" not in text
    figures["GraphFigures"]["graphs"] = 0
    assert "the steps were eager" in tables(results, 20, 8)


def test_messages_of_a_training_about_graphs_are_kept_once() -> None:
    output = "a.py:3: SpeedWarning: CUDA graphs are off: x\nCUDA graphs are off: x\nother\n"
    assert said_of_graphs(output) == ("CUDA graphs are off: x",)
