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

from lightning_megatron import FP8, CudaGraphs, GPTConfig, MegatronStrategy
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.shard_spec import copy_from_full
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.scaling import FORMAT
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.strategy.checks import engine_checks
from tests.fits import (
    GPT2,
    STEPS,
    Job,
    Report,
    check_equal,
    differences,
    run_job,
    run_jobs,
)
from tests.oracles import copy_to_full
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
ZBV = {"pp": 2, "vpp": 2, "schedule": "zb-v"}
LATE = {"optimizer.overlap_parameters": True}
#: Kind, recipe and layout of fits with casts of parameters.
CAST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensorwise, tp2+sp zb-v": ("llama", "tensorwise", {"tp": 2, **ZBV}),
    "delayed, tp2 pp2": ("gpt2", "delayed", {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "delayed, dp4, recomputed": ("llama", "delayed", {"recompute": "full"}),
    "rowwise, cp2, recomputed": ("llama", "rowwise", {"cp": 2, "recompute": "full"}),
    "blockwise, zb-h1": ("blocks", "blockwise", {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
}
#: The same with weights stored in 8 bits; two batches are a step of the first.
STORED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accumulated": ("gpt2", "tensorwise", {"optimizer.bucket_size": 5000, **LATE}),
    "tensorwise, zb-v dp2": ("llama", "tensorwise", {**ZBV, **LATE}),
    "delayed, tp2 pp2": ("gpt2", "delayed", {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "delayed, cp2 tp2+sp": ("llama", "delayed", {"cp": 2, "tp": 2, "recompute": "full"}),
}


class CheckBytes(pl.Callback):
    """Compare the stored bytes and scales with the cast of the main parameters of all ranks."""

    #: Relative error of a scale: divisions of kernels may differ by a rounding.
    rounding = 0.0

    def __init__(self) -> None:
        #: Number of compared weights.
        self.num_checked = 0
        #: Histories of scales of earlier steps, by layer.
        self.histories: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        main = main_of(trainer)
        main.wait()
        full_values = full_main_parameters(main)
        for names in main.eight_bit_weights:
            stored = main.stored_weight(names)
            assert stored is not None, names
            parts = torch_casts.magnitude_parts(torch.cat([full_values[name] for name in names]))
            for name, stored_part in zip(names, stored.parts, strict=True):
                expected = torch.zeros(stored_part.shape, device=stored_part.device)
                values, scale = self.cast(full_values[name], parts)
                copy_from_full(main.spec(name), expected, values.float())
                assert torch.equal(stored_part.view(FORMAT).float(), expected), name
                torch.testing.assert_close(stored.scale, scale, rtol=self.rounding, atol=0.0)
                self.num_checked += 1

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for model in layered_modules(module):
            scales = model.delayed_scales
            if scales is not None:
                self.histories |= dict(zip(scales.names, scales.history.clone(), strict=True))
        self.outcomes = {
            "checked": self.num_checked,
            "histories": self.histories,
            "main": full_main_parameters(main_of(trainer)),
        }

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
            copy_to_full(piece.placement, piece.main.detach(), full, counted_only=True)
        tensors[name] = all_reduce_(all_reduce_(full, mesh.data), mesh.tp)
    return tensors


def cast_job(kind: str, recipe: Any, layout: Mapping[str, Any], **options: Any) -> Job:
    """Every microbatch has one sample: scales belong to microbatches, and data ranks have different
    samples.
    """
    fp8 = FP8(recipe, emulate=True, last_bf16=1, keep=KEEP, **options)
    return Job(CONFIGS[kind], {**layout, "fp8": fp8, "microbatch_size": 1})


def checking() -> Sequence[pl.Callback]:
    return [CheckBytes()]


def stored_job(kind: str, recipe: Any, layout: Mapping[str, Any], batches: int) -> Job:
    job = cast_job(kind, recipe, layout, parameters="fp8")
    trainer = {"accumulate_grad_batches": batches}
    return replace(job, trainer=trainer, batch=8 // batches, callbacks=checking)


def run_all(rank: int, size: int, folder: Path) -> dict[str, Report]:
    jobs = {name: cast_job(*case) for name, case in CAST.items()}
    for name, case in STORED.items():
        jobs[f"stored {name}"] = stored_job(*case, batches=1 + (name == "accumulated"))
    captured = {"cuda_graphs": CudaGraphs("segments", warmup_steps=2)}
    for name, graphs in {"eager": {}, "graphs": captured}.items():
        jobs[name] = replace(cast_job("gpt2", "delayed", {"pp": 2, **graphs}), steps=4)
    jobs["whole"] = whole = stored_job("llama", "delayed", LATE, 1)
    jobs["begun"] = replace(whole, steps=1, save=str(folder / "saved"))
    jobs["continued"] = replace(whole, resume=str(folder / "saved"))
    return run_jobs(rank, size, jobs)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    return run_world(run_all, 4, tmp_path_factory.mktemp("fp8"))


@cache
def cast_twin(kind: str, recipe: str) -> Report:
    return run_job(cast_job(kind, recipe, {}))


@pytest.mark.parametrize("name", CAST)
def test_every_layout_trains_as_one_process(name: str, ranks: Any) -> None:
    kind, recipe, _ = CAST[name]
    check_equal([rank[name] for rank in ranks], cast_twin(kind, recipe))


@pytest.mark.parametrize("name", STORED)
def test_every_layout_with_weights_in_8_bits_trains_as_one_process(name: str, ranks: Any) -> None:
    kind, recipe, _ = STORED[name]
    batches = 1 + (name == "accumulated")
    twin = run_job(stored_job(kind, recipe, {}, batches))
    reports = [rank[f"stored {name}"] for rank in ranks]
    check_equal(reports, twin)
    if name == "tensorwise, zb-v dp2":
        # In float64 the parameters are the main parameters: casts of them give the same bytes.
        assert twin.losses == pytest.approx(cast_twin(kind, recipe).losses, abs=1e-10, rel=0)
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
    for rank in ranks:
        assert rank["graphs"].graphs[-1]
        assert differences(rank["graphs"], rank["eager"]) == []


def test_rounding_changes_losses_by_less_than_half_a_percent() -> None:
    exact = run_job(Job(CONFIGS["llama"])).losses
    for recipe in ("tensorwise", "delayed", "rowwise"):
        losses = cast_twin("llama", recipe).losses
        assert losses != exact
        assert losses == pytest.approx(exact, rel=0.005)


def test_wrong_settings_and_precisions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, message in (
        ("tensorwise", "needs a GPU with matrix products in 8 bits: cpu"),
        (FP8(emulate=True, keep=("*.mlp.middle",)), "'\\*.mlp.middle' matches none of layers.N"),
        (FP8("blockwise", emulate=True), "multiples of 128"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            run_job(Job(GPT2, {"fp8": settings}, steps=1))
    monkeypatch.setattr(engine_checks, "has_products", lambda device, is_blockwise: True)
    cuda = torch.device("cuda")
    for precision, message in {"16-mixed": "loss scale", "32-true": "precision bf16"}.items():
        with pytest.raises(ParallelPlanError, match=message):
            engine_checks.check_fp8(FP8(), cuda, precision)
    engine_checks.check_fp8(FP8(), cuda, "bf16-mixed")
