"""Tests on GPUs that weights stored in 8 bits are casts of the main parameters in all layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs
from lightning_megatron.layers.choose_kernels import choose_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.stored_weight import FORMAT
from lightning_megatron.plan.fp8 import FP8
from tests.fits import BATCH, Job, Report, Tokens, joined, run_job
from tests.gpu.shared_gpu import require_gpus
from tests.graphs.jobs import VALIDATED, VARIED, differences, run_graphs, run_updates
from tests.layers.noted_casts import spread as draw
from tests.strategy.test_fp8_graphs import Stored
from tests.training.fused_fits import SMALL, FusedLanguage
from tests.world import run_world
from tests.worlds.test_fp8 import CONFIGS, CheckBytes, cast_whole

#: Start in the numbers, start in the bytes, size (elements), and weight of each slice.
SLICES = [(64, 0, 20000, 1), (20064, 30000, 9000, 0), (30000, 20480, 5, 1), (31000, 50000, 800, 3)]
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "recomputed": {"recompute": "full"}},
    2: {
        "dp2": {},
        "dp2, late gathers": {"overlap_parameters": True, "bucket_size": 5000},
        "tp2+sp": {"tp": 2},
        "tp2+sp overlapped": {"tp": 2, "overlap_tensor_parallel": True},
        "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
        "cp2": {"cp": 2},
    },
    4: {
        "dp4": {"overlap_parameters": True},
        "tp2+sp dp2": {"tp": 2, "overlap_parameters": True},
        "tp2 pp2": {"tp": 2, "pp": 2},
        "cp2 dp2": {"cp": 2},
    },
}
#: Layouts of two ranks whose steps are captured.
CAPTURED: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, late gathers": {"overlap_parameters": True, "bucket_size": 5000},
    "tp2+sp": {"tp": 2},
    "tp2+sp overlapped": {"tp": 2, "overlap_tensor_parallel": True},
    "pp2 zb-h1": {"pp": 2, "schedule": "zb-h1"},
}
STEPS = 4
WIDE = replace(SMALL, hidden_size=64)


class CheckBytesOfKernels(CheckBytes):
    """Compare weights with casts of the kernels, whose divisions round differently from torch."""

    rounding = 1e-6

    def cast(self, matrix: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        return cast_whole(choose_kernels(matrix.device).kernels, matrix.contiguous(), parts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strange", [None, float("inf"), float("nan")])
def test_slices_are_cast_like_full_weights(dtype: torch.dtype, strange: float | None) -> None:
    kernels = choose_kernels(torch.device("cuda", 0)).kernels
    assert kernels is not None
    main = draw(1, 40000, seed=3, dtype=dtype)[0].cuda()
    if strange is not None:
        main[100] = strange
    results = []
    for make in (kernels.SliceCastKernel, torch_casts.SliceCasts):
        target = torch.full((60000,), 7, dtype=torch.uint8, device="cuda")
        magnitudes = torch.full((4,), 7, dtype=torch.int32, device="cuda")
        slices = make(main, target, SLICES)
        slices.find(magnitudes)
        slices.cast(magnitudes, FORMAT)
        results.append((magnitudes, target))
    # NaN has several bit patterns.
    actual, expected = (result[0].view(torch.float32) for result in results)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    # This rank has no slice of the third weight.
    assert int(results[0][0][2]) == 0
    inside = torch.zeros(60000, dtype=torch.bool, device="cuda")
    for start, place, size, weight in SLICES:
        inside[place : place + size] = True
        matrix = main[start : start + size].view(1, size)
        full_cast, _ = cast_whole(kernels, matrix, results[0][0][weight : weight + 1])
        assert torch.equal(full_cast.view(torch.uint8)[0], results[0][1][place : place + size])
    assert bool((results[0][1][~inside] == 7).all()), "bytes outside of the slices were written"
    by_kernel, by_torch = (result[1].view(FORMAT).float()[inside] for result in results)
    assert torch.equal(by_kernel.isnan(), by_torch.isnan())
    wrong = by_kernel.nan_to_num(0.0) != by_torch.nan_to_num(0.0)
    # Scales may differ by one rounding, and then a number by one step.
    assert float(wrong.float().mean()) < 1e-3


@pytest.mark.gpu
def test_a_rank_without_slices_casts_nothing() -> None:
    kernels = choose_kernels(torch.device("cuda", 0)).kernels
    assert kernels is not None
    target = torch.full((128,), 7, dtype=torch.uint8, device="cuda")
    magnitudes = torch.full((2,), 7, dtype=torch.int32, device="cuda")
    slices = kernels.SliceCastKernel(torch.zeros(128, device="cuda"), target, [])
    slices.find(magnitudes)
    slices.cast(magnitudes, FORMAT)
    assert not bool(magnitudes.any())
    assert bool((target == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 512), (100, 250), (129, 128), (4096, 4096), (1, 16)])
@pytest.mark.parametrize("multiple", [16, 128])
def test_transposes_of_bytes_equal_those_of_torch(sizes: tuple[int, int], multiple: int) -> None:
    kernels = choose_kernels(torch.device("cuda", 0)).kernels
    assert kernels is not None
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8).cuda()
    actual = kernels.padded_transpose(matrix, multiple)
    assert torch.equal(actual, torch_casts.padded_transpose(matrix, multiple))


class RecordChecks(CheckBytesOfKernels):
    def on_train_end(self, *_: Any) -> None:
        self.outcomes = {"checked": self.num_checked}


def checking() -> list[CheckBytes]:
    return [RecordChecks()]


def _job(layout: dict[str, Any], fp8: FP8, steps: int = STEPS, **options: Any) -> Job:
    return Job(
        CONFIGS["llama"], {**layout, "fp8": fp8, "microbatch_size": 1}, "bf16-mixed", steps,
        {"accelerator": "gpu"}, partial(Tokens, STEPS * BATCH), **options,
    )  # fmt: skip


def _train(layout: dict[str, Any], size: int, **settings: Any) -> tuple[Report, int]:
    """Train with weights in 8 bits; return the report and the number of compared weights."""
    fp8 = FP8(**{"last_bf16": 1, "keep": ("layers.0.mlp.*",), "parameters": "fp8", **settings})
    callbacks = tuple if fp8.parameters is None else checking
    report = run_job(_job(layout, fp8, callbacks=callbacks), size)
    return report, report.outcomes.get("checked", 0)


def _world(rank: int, size: int) -> dict[str, tuple[Report, int]]:
    return {name: _train(layout, size) for name, layout in LAYOUTS[size].items()}


def _assert_near(actual: list[float], expected: list[float], tolerance: float) -> None:
    assert len(actual) == len(expected) == STEPS
    gaps = [abs(a - b) for a, b in zip(actual, expected, strict=True)]
    assert max(gaps) < tolerance, gaps


@pytest.mark.gpu
def test_training_with_8_bit_weights_is_near_emulation_and_near_casts() -> None:
    stored, num_checked = _train({}, 1)
    assert num_checked > 0
    assert stored.losses[-1] < stored.losses[0]
    recomputed, _ = _train({"recompute": "full"}, 1)
    _assert_near(recomputed.losses, stored.losses, 3e-2)
    # Casts of bfloat16 weights round twice; a bfloat16 number near 5.7 has steps of 0.03.
    cast, num_checked_casts = _train({}, 1, parameters=None)
    assert num_checked_casts == 0
    _assert_near(cast.losses, stored.losses, 3e-2)
    emulated, _ = _train({}, 1, emulate=True)
    _assert_near(emulated.losses, stored.losses, 3e-2)


@pytest.mark.gpu
def test_a_resumed_fit_has_the_bits_of_an_uninterrupted_fit(tmp_path: Path) -> None:
    half = str(tmp_path / "half")
    fp8 = FP8(parameters="fp8")
    uninterrupted = run_job(_job({}, fp8))
    run_job(_job({}, fp8, 2, save=half))
    resumed = run_job(_job({}, fp8, resume=half))
    assert resumed.losses == uninterrupted.losses[2:]
    weights = joined([uninterrupted])
    for name, weight in joined([resumed]).items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_layouts_match_one_gpu(size: int) -> None:
    require_gpus(size)
    twin, _ = _train({}, 1)
    for reports in run_world(_world, size, backend="nccl"):
        for name, (report, num_checked) in reports.items():
            assert num_checked > 0, name
            # After four steps tp2+sp differs from one GPU by 0.038, and by 0.028 with casts instead
            # of weights in 8 bits.
            _assert_near(report.losses, twin.losses, 8e-2 if "tp" in name else 3e-2)


def _fit_on_gpu(
    graphs: CudaGraphs | None, recipe: Any, size: int, layout: dict[str, Any]
) -> Report:
    """Train twelve steps with weights in 8 bits, eagerly or by graphs."""
    layout = {**layout, "fp8": FP8(recipe, parameters="fp8"), "microbatch_size": 1}
    job = Job(
        WIDE,
        layout,
        "bf16-mixed",
        12,
        {"accelerator": "gpu", **VALIDATED},
        VARIED,
        VARIED,
        callbacks=lambda: [Stored()],
    )
    return run_graphs(job, graphs, size)


def _compare_graphs(rank: int, size: int, recipe: Any, layouts: dict[str, dict[str, Any]]) -> int:
    """Assert eager bits where two eager trainings agree; return the number of comparisons."""
    num_comparisons = 0
    for name, layout in layouts.items():
        eager = _fit_on_gpu(None, recipe, size, layout)
        repeated = set(differences(_fit_on_gpu(None, recipe, size, layout), eager))
        for mode in ("segments", "full"):
            settings = CudaGraphs(mode, evaluation=True, on_failure="error")
            captured = _fit_on_gpu(settings, recipe, size, layout)
            what = f"{name}, {mode}"
            assert captured.graphs[-1] > 0, what
            assert set(differences(captured, eager)) <= repeated, what
            addresses = captured.outcomes["addresses"]
            assert addresses == addresses[:1] * len(addresses), what
            assert addresses[0].keys() == eager.outcomes["addresses"][0].keys(), what
            num_comparisons += 1
    return num_comparisons


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_graphs_have_the_bits_of_eager_steps(recipe: str) -> None:
    assert _compare_graphs(0, 1, recipe, LAYOUTS[1]) == 2 * len(LAYOUTS[1])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_captured_updates_of_8_bit_weights_have_the_bits_of_eager_updates(recipe: Any) -> None:
    options: dict[str, Any] = {
        "model": partial(FusedLanguage, WIDE),
        "strategy": {"fp8": FP8(recipe, parameters="fp8")},
        "precision": "bf16-mixed",
        "steps": 12,
        "trainer": {"accelerator": "gpu"},
        "data": VARIED,
    }
    eager = run_updates(None, **options)
    repeated = differences(run_updates(None, **options), eager)
    for mode in ("segments", "full"):
        settings = CudaGraphs(mode, optimizer=True, on_failure="error")
        captured = run_updates(settings, **options)
        assert captured.graphs[-1] > 0, mode
        assert set(differences(captured, eager)) <= set(repeated), mode


@pytest.mark.gpu2
def test_graphs_of_two_ranks_have_the_bits_of_eager_steps() -> None:
    require_gpus(2, needs_nccl="a capture on several ranks has collectives in it")
    numbers = run_world(_compare_graphs, 2, "delayed", CAPTURED, backend="nccl")
    assert numbers == [2 * len(CAPTURED)] * 2
