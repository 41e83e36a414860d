"""Every layout trains in 8 bits as one process with the same recipe, also with weights that are
stored in 8 bits, which are casts of the main parameters of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs, GPTConfig, MegatronStrategy, ParallelPlanError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.stored_weight import FORMAT
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.strategy.checks import fp8_checks
from lightning_megatron.training.main_parameters import MainParameters
from tests.fits import (
    GPT2,
    STEPS,
    Job,
    Report,
    check_equal,
    differences,
    run_job,
)
from tests.sweeps import chosen
from tests.world import run_world

_SIZES = {"vocab_size": 300, "max_seq_length": 16, "num_layers": 4, "num_heads": 4}
#: Sizes of all ranks are multiples of 16 with tp 2, or of 128 for blocks.
CONFIGS = {
    "llama": GPTConfig.llama(**_SIZES, hidden_size=64, num_kv_heads=2, ffn_hidden_size=64),
    "gpt2": GPTConfig.gpt2(**_SIZES, hidden_size=64),
    "blocks": GPTConfig.llama(
        **{**_SIZES, "num_layers": 3}, hidden_size=256, num_kv_heads=4, ffn_hidden_size=256
    ),
}
KEEP = ("layers.0.mlp.*",)
PLAIN = {"sequence_parallel": False}
AGAIN = {"recompute": "full"}
ZBV = {"pp": 2, "vpp": 2, "schedule": "zb-v"}
LATE = {"overlap_parameters": True}
#: Kind, recipe and layout of fits with casts of parameters.
CAST: dict[str, tuple[str, str, dict[str, Any]]] = chosen(
    {
        "tensorwise, tp2+sp dp2": ("llama", "tensorwise", {"tp": 2}),
        "tensorwise, tp2 pp2": ("gpt2", "tensorwise", {"tp": 2, "pp": 2, **PLAIN}),
        "tensorwise, tp2+sp zb-v": ("llama", "tensorwise", {"tp": 2, **ZBV}),
        "tensorwise, cp2 tp2": ("llama", "tensorwise", {"cp": 2, "tp": 2}),
        "tensorwise, dp4": ("llama", "tensorwise", {}),
        "tensorwise, overlapped": (
            "llama",
            "tensorwise",
            {"tp": 2, "overlap_tensor_parallel": True},
        ),
        "delayed, tp2+sp dp2": ("llama", "delayed", {"tp": 2}),
        "delayed, tp2 pp2": ("gpt2", "delayed", {"tp": 2, "pp": 2, **PLAIN}),
        "delayed, zb-h1 cp2": ("llama", "delayed", {"cp": 2, "pp": 2, "schedule": "zb-h1"}),
        "delayed, dp4, recomputed": ("llama", "delayed", AGAIN),
        "rowwise, tp2+sp pp2": ("llama", "rowwise", {"tp": 2, "pp": 2}),
        "rowwise, cp2, recomputed": ("llama", "rowwise", {"cp": 2, **AGAIN}),
        "rowwise, tp2 dp2": ("gpt2", "rowwise", {"tp": 2, **PLAIN}),
        "blockwise, tp2+sp dp2": ("blocks", "blockwise", {"tp": 2}),
        "blockwise, zb-h1": ("blocks", "blockwise", {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    },
    "tensorwise, tp2+sp zb-v",
    "delayed, tp2 pp2",
    "delayed, dp4, recomputed",
    "rowwise, cp2, recomputed",
    "blockwise, zb-h1",
)
#: The same with weights stored in 8 bits, and the number of batches of a step.
STORED: dict[str, tuple[str, str, dict[str, Any], int]] = chosen(
    {
        f"{recipe}, {name}": (kind, recipe, layout, batches)
        for recipe in ("tensorwise", "delayed")
        for name, (kind, layout, batches) in {
            "dp4": ("llama", {}, 1),
            "dp4, late gathers": ("llama", LATE, 1),
            "dp4, small buckets, accumulated": ("gpt2", {"bucket_size": 5000, **LATE}, 2),
            "dp4, whole parameters": ("llama", {"optimizer_slices": "parameters"}, 1),
            "tp2+sp dp2": ("llama", {"tp": 2}, 1),
            "tp2 dp2, recomputed": ("gpt2", {"tp": 2, **PLAIN, **AGAIN}, 1),
            "tp4": ("gpt2", {"tp": 4}, 1),
            "tp2 pp2": ("gpt2", {"tp": 2, "pp": 2, **PLAIN}, 1),
            "zb-v dp2": ("llama", {**ZBV, **LATE}, 1),
            "cp2 tp2+sp, recomputed": ("llama", {"cp": 2, "tp": 2, **AGAIN}, 1),
            "cp2 dp2": ("llama", {"cp": 2}, 1),
        }.items()
    },
    "tensorwise, dp4, small buckets, accumulated",
    "tensorwise, zb-v dp2",
    "delayed, tp2 pp2",
    "delayed, cp2 tp2+sp, recomputed",
)


class CheckBytes(pl.Callback):
    """Compare the stored bytes and scales with the cast of the main parameters of all ranks, and
    count the compared weights.
    """

    #: Relative error of a scale: divisions of kernels may differ by a rounding.
    rounding = 0.0

    def __init__(self) -> None:
        self.num_checked = 0
        #: Histories of scales of earlier steps, by layer.
        self.histories: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        main = main_of(trainer)
        main.wait()
        full_values = full_main_parameters(main)
        for names in main.eight_bits.among(main.trained):
            stored = main.eight_bits.stored(names)
            assert stored is not None, names
            parts = torch_casts.magnitude_parts(torch.cat([full_values[name] for name in names]))
            for name, stored_part in zip(names, stored.parts, strict=True):
                expected = torch.zeros(stored_part.shape, device=stored_part.device)
                values, scale = self.cast(full_values[name], parts)
                main.spec(name).copy_from_full(expected, values.float())
                torch.testing.assert_close(
                    stored_part.view(FORMAT).float(), expected, rtol=0.0, atol=0.0
                )
                torch.testing.assert_close(stored.scale, scale, rtol=self.rounding, atol=0.0)
                self.num_checked += 1

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for model in layered_modules(module):
            scales = model.delayed_scales
            if scales is not None:
                self.histories |= dict(zip(scales.names, scales.history.clone(), strict=True))

    def cast(self, matrix: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of 8 bits of a matrix, and their scale."""
        return cast_whole(torch_casts, matrix, parts)


def cast_whole(casts: Any, matrix: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    result, _ = casts.cast_by_one_scale(
        matrix, parts, FORMAT, rows=True, columns=False, multiple=16
    )
    return result


def main_of(trainer: pl.Trainer) -> MainParameters:
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy.run.state.main


def full_main_parameters(main: MainParameters) -> dict[str, Tensor]:
    """Return the full main parameters of this rank's stage from the slices of all ranks."""
    tensors, mesh = {}, main.mesh
    for name in main.trained:
        spec = main.spec(name)
        if spec.tied_to is not None:
            continue
        full = torch.zeros(spec.full_shape, dtype=main.main(name).dtype, device=mesh.device)
        if name in main.slices:
            piece = main.slices[name]
            piece.placement.copy_to_full(piece.main.detach(), full, counted_only=True)
        tensors[name] = all_reduce_(all_reduce_(full, mesh.data), mesh.tp)
    return tensors


class RecordChecks(CheckBytes):
    """Record the number of compared weights, the histories of scales, and the main parameters."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().on_train_end(trainer, module)
        self.outcomes = {
            "checked": self.num_checked,
            "histories": self.histories,
            "main": full_main_parameters(main_of(trainer)),
        }


def checking() -> Sequence[pl.Callback]:
    return [RecordChecks()]


def cast_job(kind: str, recipe: Any, layout: Mapping[str, Any]) -> Job:
    """Every microbatch has one sample: scales belong to microbatches, and data ranks have different
    samples.
    """
    settings = FP8(recipe, emulate=True, last_bf16=1, keep=KEEP)
    return Job(CONFIGS[kind], {**layout, "fp8": settings, "microbatch_size": 1})


def stored_job(kind: str, recipe: Any, layout: Mapping[str, Any], batches: int) -> Job:
    settings = FP8(recipe, emulate=True, last_bf16=1, keep=KEEP, parameters="fp8")
    return Job(
        CONFIGS[kind],
        {**layout, "fp8": settings, "microbatch_size": 1},
        trainer={"accumulate_grad_batches": batches},
        batch=8 // batches,
        callbacks=checking,
    )


def graph_job(captures: bool) -> Job:
    graphs = {"cuda_graphs": CudaGraphs("segments", warmup_steps=2)} if captures else {}
    job = cast_job("gpt2", "delayed", {"pp": 2, **graphs})
    return replace(job, steps=4)


def run_all(rank: int, size: int, folder: Path) -> dict[str, Report]:
    jobs = {name: cast_job(*case) for name, case in CAST.items()}
    jobs |= {f"stored {name}": stored_job(*case) for name, case in STORED.items()}
    jobs |= {f"graphs {on}": graph_job(on) for on in (True, False)}
    whole = stored_job("llama", "delayed", LATE, 1)
    jobs["whole"] = whole
    jobs["begun"] = replace(whole, steps=1, save=str(folder / "saved"))
    jobs["continued"] = replace(whole, resume=str(folder / "saved"))
    return {name: run_job(job, size) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    return run_world(run_all, 4, tmp_path_factory.mktemp("fp8"))


@cache
def cast_twin(kind: str, recipe: str) -> Report:
    return run_job(cast_job(kind, recipe, {}))


@cache
def stored_twin(kind: str, recipe: str, batches: int) -> Report:
    return run_job(stored_job(kind, recipe, {}, batches))


@pytest.mark.parametrize("name", CAST)
def test_every_layout_trains_as_one_process(name: str, ranks: Any) -> None:
    kind, recipe, _ = CAST[name]
    check_equal([rank[name] for rank in ranks], cast_twin(kind, recipe))


@pytest.mark.parametrize("name", STORED)
def test_every_layout_with_weights_in_8_bits_trains_as_one_process(name: str, ranks: Any) -> None:
    kind, recipe, _, batches = STORED[name]
    twin = stored_twin(kind, recipe, batches)
    reports = [rank[f"stored {name}"] for rank in ranks]
    check_equal(reports, twin)
    main = twin.outcomes["main"]
    in_8_bits = [key for key in main if is_in_8_bits(key)]
    assert twin.outcomes["checked"] == STEPS * batches * len(in_8_bits) > 0
    histories = twin.outcomes["histories"]
    assert bool(histories) == (recipe == "delayed")
    found = dict[str, Tensor]()
    for report in reports:
        for key, value in report.outcomes["main"].items():
            torch.testing.assert_close(value, main[key], rtol=0.0, atol=1e-10)
        for key, history in report.outcomes["histories"].items():
            assert float(history[:STEPS].min()) > 0, key
            assert torch.equal(found.setdefault(key, history), history), "ranks agree"
            # Gradients of a rank's microbatches are divided by their number after the casts.
            torch.testing.assert_close(history[:, :2], histories[key][:, :2], rtol=1e-6, atol=0.0)
    assert found.keys() == histories.keys()


def is_in_8_bits(name: str) -> bool:
    """Return whether a weight is one of a linear layer, but not of the last layer or first MLP."""
    is_inside = re.search(r"\.layers\.[012]\.(attention|mlp)\.", name) is not None
    return name.endswith("weight") and is_inside and ".layers.0.mlp." not in name


def test_an_interrupted_fit_continues_with_the_same_bits(ranks: Any) -> None:
    for rank in ranks:
        whole, begun, continued = (rank[name] for name in ("whole", "begun", "continued"))
        for results in ("losses", "norms"):
            halves = getattr(begun, results) + getattr(continued, results)
            assert halves == getattr(whole, results)
        for part in ("main", "histories"):
            assert continued.outcomes[part].keys() == whole.outcomes[part].keys()
            for name, value in continued.outcomes[part].items():
                assert torch.equal(value, whole.outcomes[part][name]), name


def test_graphs_have_the_bits_of_eager_steps(ranks: Any) -> None:
    by_graphs, eager = ([rank[f"graphs {on}"] for rank in ranks] for on in (True, False))
    assert all(report.graphs[-1] for report in by_graphs)
    assert [differences(*pair) for pair in zip(by_graphs, eager, strict=True)] == [[]] * 4


def test_rounding_changes_losses_by_less_than_half_a_percent() -> None:
    exact = run_job(Job(CONFIGS["llama"])).losses
    for recipe in ("tensorwise", "delayed", "rowwise"):
        losses = cast_twin("llama", recipe).losses
        assert losses != exact
        assert losses == pytest.approx(exact, rel=0.005)


def test_storage_in_8_bits_does_not_change_losses_without_rounding() -> None:
    """In float64 the parameters are the main parameters: casts of them give the same bytes."""
    stored = stored_twin("llama", "tensorwise", 1)
    assert stored.losses == pytest.approx(cast_twin("llama", "tensorwise").losses, abs=1e-10, rel=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tensorwise", "needs a GPU with matrix products in 8 bits: cpu"),
        (FP8(emulate=True, keep=("*.mlp.middle",)), "'\\*.mlp.middle' matches none of layers.N"),
        (FP8("blockwise", emulate=True), "multiples of 128"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        run_job(Job(GPT2, {"fp8": settings}, steps=1))


def test_precisions_other_than_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_checks, "has_products", lambda device, is_blockwise: True)
    cuda = torch.device("cuda")
    for precision, message in (
        ("16-mixed", "because its loss scale"),
        ("32-true", "needs precision bf16"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            fp8_checks.check_fp8(FP8(), cuda, precision)
    fp8_checks.check_fp8(FP8(), cuda, "bf16-mixed")
