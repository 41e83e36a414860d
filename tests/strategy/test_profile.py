"""The parts of a step's time from events of a trace, and what ``Profile`` refuses."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron import Profile
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.strategy.profiling.step_parts import (
    EXPOSED,
    HIDDEN,
    NOTHING,
    STEP,
    StageTable,
    longest,
    part_of,
    step_parts,
    work_of,
)
from lightning_megatron.strategy.profiling.trace_file import read_trace, rows_of_rank
from tests.fits import Job, run_job

NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NTN"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"
SDPA = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"
COPY = "Memcpy DtoD (Device -> Device)"
#: Events as torch's profiler writes them, with times in ms.
KERNELS = [(GEMM, 1, 5), (SDPA, 5, 6), (NCCL, 4, 8), (ADAM, 9, 9.5), (GEMM, 11, 12), (COPY, 13, 14)]


def event(name: str, start: float, stop: float, category: str = "cpu_op", **more: Any) -> Any:
    times = {"ts": 1e3 * start, "dur": 1e3 * (stop - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, **times, **more}


def on_device(name: str, start: float, stop: float) -> Any:
    category = "gpu_memcpy" if name == COPY else "kernel"
    place = {"pid": 0, "tid": 13 if name == NCCL else 7}
    args = {"device": 0, "stream": place["tid"], "correlation": 5}
    return event(name, start, stop, category, **place, args=args)


def test_time_is_divided_among_computation_communication_and_idle_time():
    # Operators of the host do not count where a device runs.
    events = [*(on_device(*span) for span in KERNELS), event("aten::mm", 14, 20)]
    work = work_of(events)
    parts = step_parts(work, [(0, 10_000), (10_000, 20_000)], 2)
    assert {part: time for part, time in parts.items() if time} == pytest.approx(
        {
            **{"products": 2.5, "attention": 0.5, "optimizer": 0.25, "copies and fills": 0.5},
            # Of 4 ms of communication, 2 ms run beside the product and attention.
            **{EXPOSED: 1.0, HIDDEN: 1.0, NOTHING: (1.0 + 1.0 + 0.5 + 1.0 + 1.0 + 6.0) / 2},
            STEP: 10.0,
        }
    )
    assert sum(parts.values()) == pytest.approx(2 * 10.0 + parts[HIDDEN])
    first, second = longest(work, [(0, 10_000)], 1, most=2)
    assert (first["count"], first["ms"], second["ms"]) == (1.0, 4.0, 4.0)
    # A window cuts what reaches beyond it.
    assert step_parts(work, [(2_000, 4_500)], 1)["products"] == pytest.approx(2.5)


def test_operators_of_the_host_are_divided_without_a_device():
    update = event("optimizer update", 20, 30, "user_annotation")
    events = [
        event("autograd::engine::evaluate_function: AttentionBackward", 0, 20),
        event("aten::linear", 1, 6),
        event("aten::addmm", 2, 5),
        event("aten::resolve_conj", 3, 4),
        event("aten::scaled_dot_product_attention", 6, 8),
        event("aten::empty", 7, 8),
        event("aten::layer_norm", 8, 10),
        event("aten::native_layer_norm", 8.5, 9.5),
        event("wait for tp all_reduce of layers.0.mlp", 11, 15, "user_annotation"),
        event("gloo:all_reduce", 9, 14, "user_annotation", tid=8),
        update,
        event("aten::addcdiv_", 21, 23),
    ]
    parts = step_parts(work_of(events), [(0, 30_000)], 1)
    assert {part: time for part, time in parts.items() if time} == pytest.approx(
        {
            **{"products": 3.0, "attention": 2.0, "elementwise and reductions": 1.0},
            **{"optimizer": 2.0, EXPOSED: 5.5, HIDDEN: 0.5, NOTHING: 16.5, STEP: 30.0},
        }
    )


def test_kernels_have_parts_by_their_names():
    names = {
        "void cutlass::Kernel2<sm80_xmma_gemm_bf16>": "products",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
        "_put_tokens_kernel": "communication",
        "_route_forward": "router",
        "_spread_rows": "permutes",
        "triton_poi_fused_add_gelu_0": "elementwise and reductions",
        "c10d::_allgather_base_": "communication",
    }
    assert {name: part_of(name) for name in names} == names


def test_stages_are_means_of_their_ranks():
    empty = step_parts([], [(0, 4_000)], 2)
    busy = step_parts(work_of([on_device(GEMM, 0, 1)]), [(0, 4_000)], 2)
    table = StageTable.of([(0, empty), (1, empty), (0, busy), (1, empty)], [])
    assert table.stages[0]["products"] == pytest.approx(0.25)
    assert "| products | 0.250 (12.5) | 0.000 (0.0) |" in table.markdown()
    assert "nothing runs" in table.text()
    assert "router" not in table.text()


def test_events_of_a_rank_move_to_its_row_and_to_the_common_clock(tmp_path):
    arrow = {"ph": "f", "id": 5, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 13, "ts": 4e3}
    thread = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "main"}}
    unfinished = event("B", 0, 9, "user_annotation", args={"finished": False})
    backward = event("layers.0, backward", 1.5, 3, "user_annotation")
    given = [thread, event("aten::mm", 1, 2), backward, on_device(NCCL, 4, 8), arrow, unfinished]
    path = tmp_path / "trace.json"
    base = 1_790_857_026_000_000_000
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": given}))
    events = read_trace(path, base + 1_000_000)
    assert [(one["name"], one["ts"]) for one in events] == [
        ("aten::mm", pytest.approx(0.0)),
        ("layers.0, backward", pytest.approx(500.0)),
        (NCCL, pytest.approx(3e3)),
        ("ac2g", pytest.approx(3e3)),
    ]
    rows = rows_of_rank(3, "rank 3: tp1", events, {"step 10": (0.0, 9e3)})
    assert {row["pid"] for row in rows} == {3}
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    kernel, end = (next(row for row in rows if row["name"] == name) for name in (NCCL, "ac2g"))
    # In a lane of Perfetto, events are nested.
    second = "main, backward passes of layers"
    assert names == {0: "steps", 1: "main", 2: second, kernel["tid"]: "stream 13"}
    assert end["tid"] == kernel["tid"]
    assert end["id"] == 3 * 2**32 + 5


def fit(tmp_path: Any, *profiles: Profile, has_strategy: bool = True) -> None:
    options = {"default_root_dir": str(tmp_path)}
    strategy: dict[str, Any] | None = {} if has_strategy else None
    run_job(Job(strategy=strategy, trainer=options, callbacks=lambda: profiles))


def test_what_cannot_be_recorded_is_refused_before_the_launch(tmp_path):
    (tmp_path / "file").touch()
    for profile, message in (
        (Profile(memory=True), "memory=True. needs GPUs"),
        (Profile(host=False), "host=False. needs GPUs"),
        (Profile(folder=str(tmp_path / "file" / "inner")), "cannot write its files: .*file"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            fit(tmp_path, profile)
    with pytest.raises(UnsupportedError, match="both record step 2"):
        fit(tmp_path, Profile(1, 2), Profile(2, 2))
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    trainer: Any = SimpleNamespace(profiler=PyTorchProfiler(), state=state)
    with pytest.raises(UnsupportedError, match="torch records only one profile"):
        Profile(1).check_before_launch(trainer)
    with pytest.raises(UnsupportedError, match="the strategy is SingleDeviceStrategy"):
        fit(tmp_path, Profile(1), has_strategy=False)
    with pytest.raises(ParallelPlanError, match="count"):
        Profile(count=0)


def test_steps_that_no_training_reaches_are_named(tmp_path):
    for late in (3, 40):
        with pytest.warns(
            UserWarning, match="nothing was recorded: the training ended after step 2"
        ):
            fit(tmp_path, Profile(late))
    profile = Profile(1, 5)
    with pytest.warns(UserWarning, match="ended in the steps 1 to 5"):
        fit(tmp_path, profile)
    assert profile.table is not None
    with gzip.open(tmp_path / "profile" / "trace_step1.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert [one["name"] for one in events if one.get("cat") == "step"] == ["step 1", "step 2"]
    assert not torch.autograd._profiler_enabled()


def test_a_training_goes_on_if_the_trace_cannot_be_written(tmp_path):
    (tmp_path / "profile" / "trace_step0.json.gz").mkdir(parents=True)
    profile = Profile(0, 1)
    with pytest.warns(UserWarning, match="goes on without files of the profile: .*trace_step0"):
        fit(tmp_path, profile)
    assert profile.table is not None


def test_a_running_profiler_is_not_disturbed(tmp_path):
    with (
        torch.profiler.profile() as other,
        pytest.raises(UnsupportedError, match="another profiler runs"),
    ):
        fit(tmp_path, Profile(0, 1))
    assert other.key_averages()
