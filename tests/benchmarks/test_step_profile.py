"""The analysis of a profile gives the known times of made-up kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.step_callbacks import Profile
from benchmarks.step_profile import (
    Kernel,
    analyse,
    find_steps,
    outside,
    read_trace,
    report,
    union,
    whole_window,
)

NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NTN"
KERNELS = [
    Kernel(GEMM, 1_000, 5_000, 7),
    Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 5_000, 6_000, 7),
    Kernel(NCCL, 4_000, 8_000, 20),
    Kernel("void at::native::vectorized_elementwise_kernel<4, float>", 7_000, 7_500, 7),
    Kernel("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 9_000, 9_500, 7),
    Kernel(GEMM, 11_000, 12_000, 7),
]


def test_time_is_divided_among_work_communication_and_idle_time() -> None:
    analysis = analyse(KERNELS, [(0, 10_000), (10_000, 20_000)])
    assert analysis["step_ms"] == pytest.approx(10.0)
    assert analysis["kinds_ms"] == pytest.approx(
        {
            "matmul": 2.5,
            "communication": 2.0,
            "attention": 0.5,
            "elementwise and reductions": 0.25,
            "optimizer": 0.25,
        }
    )
    # Of 4 ms of communication, 2 ms run beside the product and attention, and 0.5 ms beside the
    # elementwise kernel.
    assert analysis["communication_ms"] == pytest.approx(2.0)
    assert analysis["exposed_ms"] == pytest.approx(0.75)
    assert analysis["hidden_percent"] == pytest.approx(62.5)
    assert analysis["idle_ms"] == pytest.approx((1.0 + 1.0 + 0.5 + 1.0 + 8.0) / 2)
    assert analysis["collectives"][
        "ncclDevKernel_ReduceScatter_Sum_f32_RING"[:40]
    ] == pytest.approx({"count": 0.5, "ms": 2.0, "exposed_ms": 0.75})
    assert "62.5% hidden" in report(analysis)


def test_writes_into_the_memory_of_other_gpus_are_communication() -> None:
    names = (
        "c10d::symmetric_memory::barrier_kernel(unsigned int**)",
        "_put_tokens",
        "_put_sums",
        "_add_slots",
        "_put_counts",
        "_put_weights",
        "_add_clone_gradients",
    )
    assert {Kernel(name, 0, 1, 7).kind for name in names} == {"communication"}
    assert Kernel("at::native::index_put_kernel_impl", 0, 1, 7).kind != "communication"


def test_barriers_and_weights_of_clones_are_parts_of_communication() -> None:
    barrier = "c10d::symmetric_memory::barrier_kernel(unsigned int**)"
    names = (barrier, "_assign_places", "_write_physical", "_put_weights", "_put_weights", barrier)
    kernels = [Kernel(name, 100.0 * i, 100.0 * i + 10, 7) for i, name in enumerate(names)]
    analysis = analyse([*kernels, Kernel("_put_tokens", 700, 790, 7)], [(0, 1_000)])
    assert analysis["clone_parts_ms"] == pytest.approx(
        {"barriers": 0.02, "plan": 0.02, "weights": 0.02, "gradients": 0.0}
    )
    # The plan is not communication, because it runs on this rank alone.
    assert analysis["communication_ms"] == pytest.approx(0.13)


def test_intervals_join_and_subtract() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert outside([(0, 10), (2, 4)], [(1, 2), (9, 12)]) == 8
    assert outside([], [(1, 2)]) == 0


def test_a_step_reaches_from_one_optimizer_step_to_the_next() -> None:
    adam = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"
    names = [GEMM, adam, adam, GEMM, NCCL, GEMM, "_update", "_advance", GEMM, adam]
    kernels = [Kernel(name, 10.0 * index, 10.0 * index + 5, 7) for index, name in enumerate(names)]
    assert find_steps(kernels) == [(10.0, 60.0), (60.0, 90.0)]
    assert find_steps(kernels[:4]) == []


def test_a_single_step_reaches_from_its_first_kernel_to_its_last() -> None:
    analysis = analyse(KERNELS, whole_window(KERNELS))
    assert analysis["step_ms"] == pytest.approx(11.0, abs=1e-5)
    assert analysis["kernels"] == len(KERNELS)
    assert analysis["exposed_ms"] == pytest.approx(1.5)
    assert whole_window([]) == []


@pytest.mark.parametrize(("num_steps", "last"), [(1, 6), (2, 8), (3, 9)])
def test_the_profiler_records_the_requested_steps(
    num_steps: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Recorder:
        def __init__(self, schedule: Any, **options: Any) -> None:
            calls.append("waits for warm-up" if schedule is not None else "records at once")

        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name)

    monkeypatch.setattr(torch.profiler, "profile", Recorder)
    profile = Profile(tmp_path / "trace.json.gz", 5, num_steps=num_steps)
    assert profile.last == last
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    for step in range(1, 12):
        trainer = SimpleNamespace(is_global_zero=True, global_step=step, strategy=strategy)
        profile.on_train_batch_end(trainer)  # type: ignore[arg-type]
    if num_steps == 1:
        assert calls == ["records at once", "start", "stop"]
    else:
        assert calls == ["waits for warm-up", "start", *["step"] * (num_steps + 1), "stop"]
    with pytest.raises(ValueError, match="at least one step, not 0"):
        Profile(tmp_path / "trace.json.gz", 5, num_steps=0)


def test_a_trace_gives_kernels_in_order(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 3, "dur": 2, "args": {"stream": 7}},
        {
            "ph": "X",
            "cat": "gpu_memset",
            "name": "Memset (Device)",
            "ts": 2,
            "dur": 1,
            "args": {"stream": 7},
        },
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 3, "dur": 2},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 1, "dur": 9},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#5", "ts": 1, "dur": 9},
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert read_trace(path) == [Kernel("Memset (Device)", 2.0, 3.0, 7), Kernel(GEMM, 3.0, 5.0, 7)]
