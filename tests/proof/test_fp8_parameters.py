"""Tests that every layout with weights stored in 8 bits trains as one process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import FP8, MegatronStrategy
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.stored_weight import FORMAT
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.plan.fp8 import FP8Recipe
from lightning_megatron.training.main_parameters import MainParameters
from tests.oracles import assert_equal
from tests.proof import training
from tests.proof.test_fp8 import CONFIGS
from tests.proof.training import Job, Report, train
from tests.strategy.test_fp8_parameters import check_same_saved, resumed
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

STEPS = 4
#: Every microbatch has one sample: scales of inputs belong to microbatches. "accumulated" is the
#: number of batches per step.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp4": ("fp8", {}),
    "dp4, late gathers": ("fp8", {"overlap_parameters": True}),
    "dp4, small buckets, accumulated": (
        "fp8, gpt2",
        {"bucket_size": 5000, "overlap_parameters": True, "accumulated": 2},
    ),
    "dp4, whole parameters": ("fp8", {"optimizer_slices": "parameters"}),
    "tp2+sp dp2": ("fp8", {"tp": 2}),
    "tp2 dp2, recomputed": (
        "fp8, gpt2",
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
    ),
    "tp4": ("fp8, gpt2", {"tp": 4}),
    "tp2 pp2": ("fp8, gpt2", {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "pp2 dp2, halves": (
        "fp8",
        {"pp": 2, "vpp": 2, "schedule": "zb-v", "overlap_parameters": True},
    ),
    "cp2 tp2+sp, recomputed": ("fp8", {"cp": 2, "tp": 2, "recompute": "full"}),
    "cp2 dp2": ("fp8", {"cp": 2}),
}
RECIPES: tuple[FP8Recipe, ...] = ("tensorwise", "delayed")
#: Cases of the sweep: the recipe and the name of the layout.
CASES: list[tuple[FP8Recipe, str]] = chosen(
    [(recipe, name) for recipe in RECIPES for name in LAYOUTS],
    ("tensorwise", "dp4, small buckets, accumulated"),
    ("tensorwise", "pp2 dp2, halves"),
    ("delayed", "tp2 pp2"),
    ("delayed", "cp2 tp2+sp, recomputed"),
)


def fp8_settings(recipe: FP8Recipe) -> FP8:
    keep = ("layers.0.mlp.*",)
    return FP8(recipe, emulate=True, last_bf16=1, keep=keep, parameters="fp8")


def gather_full_tensors(main: MainParameters, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors of this rank's stage from all ranks' slices.

    Args:
        main: Main parameters.
        slices: This rank's slice of each tensor, by name.
    """
    tensors = {}
    mesh = main.mesh
    for name in main.trained:
        spec = main.spec(name)
        if spec.tied_to is not None:
            continue
        full_tensor = torch.zeros(spec.full_shape, dtype=main.main(name).dtype, device=mesh.device)
        if name in slices:
            main.slices[name].placement.copy_to_full(slices[name], full_tensor, counted_only=True)
        tensors[name] = all_reduce_(all_reduce_(full_tensor, mesh.data), mesh.tp)
    return tensors


@dataclass
class CheckResults:
    """Results of :class:`CheckBytes` on this rank.

    Args:
        gradients: Full gradients of the last step, by name.
        histories: Histories of scales of earlier steps, by layer.
        num_checked: Number of compared parameters.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    histories: dict[str, Tensor] = field(default_factory=dict)
    num_checked: int = 0


class CheckBytes(pl.Callback):
    """Compare the stored bytes and scales with the cast of the main parameters of all ranks."""

    #: Relative error of a scale: divisions of kernels may differ by a rounding.
    rounding = 0.0

    def __init__(self) -> None:
        self.found = CheckResults()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        slices = {name: piece.main.grad for name, piece in main.slices.items()}
        self.found.gradients = gather_full_tensors(main, slices)  # type: ignore[arg-type]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        main.wait()
        values = {name: piece.main.detach() for name, piece in main.slices.items()}
        full_values = gather_full_tensors(main, values)
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
                self.found.num_checked += 1

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for model in layered_modules(module):
            scales = model.delayed_scales
            if scales is not None:
                pairs = zip(scales.names, scales.history.clone(), strict=True)
                self.found.histories |= dict(pairs)

    def cast(self, matrix: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of 8 bits of a matrix, and their scale."""
        return cast_whole(torch_casts, matrix, parts)


def cast_whole(casts: Any, matrix: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    result, _ = casts.cast_by_one_scale(
        matrix, parts, FORMAT, rows=True, columns=False, multiple=16
    )
    return result


def strategy_of(trainer: pl.Trainer) -> MegatronStrategy:
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def run(
    kind: str, recipe: FP8Recipe, layout: dict[str, Any], size: int, folder: str | None
) -> tuple[Report, CheckResults]:
    """Train; return the report, and the results of the callback."""
    training.KINDS.update(CONFIGS)
    check = CheckBytes()
    options = {**layout, "fp8": fp8_settings(recipe), "microbatch_size": 1}
    trainer = {"accumulate_grad_batches": options.pop("accumulated", 1)}
    job = Job(kind, layout=options, trainer=trainer, compares=False, callbacks=(check,))
    report = train(job, size, "cpu", folder, steps=STEPS)
    return report, check.found


def run_all(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    """Train all cases and resumed runs on four processes."""
    results: dict[Any, Any] = {}
    for number, (recipe, name) in enumerate(CASES):
        kind, layout = LAYOUTS[name]
        results[recipe, name] = run(kind, recipe, layout, size, str(folder / str(number)))
    for recipe in RECIPES:
        results[recipe] = resumed(size, folder / recipe, settings_of_resume(recipe))
    return results


def settings_of_resume(recipe: FP8Recipe) -> FP8:
    return FP8(recipe, emulate=True, parameters="fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints of four processes."""
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4, folder)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train every kind in this process, with equally many batches per step."""
    folder = tmp_path_factory.mktemp("one")
    reports = {}
    for kind, recipe, accumulated in {twin_of(*case) for case in CASES}:
        path = str(folder / f"{kind} {recipe} {accumulated}")
        options = {"accumulated": accumulated}
        reports[kind, recipe, accumulated] = run(kind, recipe, options, 1, path)
    return reports


def twin_of(recipe: FP8Recipe, name: str) -> tuple[str, FP8Recipe, int]:
    kind, layout = LAYOUTS[name]
    return kind, recipe, layout.get("accumulated", 1)


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_every_layout_trains_as_one_process(
    recipe: FP8Recipe, name: str, ranks: Any, twins: Any
) -> None:
    twin, expected = twins[twin_of(recipe, name)]
    gradients = expected.gradients
    assert twin.losses[-1] < twin.losses[0]
    steps = STEPS * LAYOUTS[name][1].get("accumulated", 1)
    assert expected.num_checked == steps * _num_in_eight_bits(gradients)
    assert bool(expected.histories) == (recipe == "delayed")
    names = set()
    histories: dict[str, Tensor] = {}
    for results in ranks:
        report, checked = results[recipe, name]
        rank_gradients = checked.gradients
        for key, history in checked.histories.items():
            assert float(history[:STEPS].min()) > 0, key
            assert torch.equal(histories.setdefault(key, history), history), "ranks agree"
            # Gradients of a rank's microbatches are divided by their number after the casts.
            pair = history[:, :2], expected.histories[key][:, :2]
            torch.testing.assert_close(*pair, rtol=1e-6, atol=0.0)
        assert report.losses == pytest.approx(twin.losses, abs=1e-10, rel=0)
        assert report.norms == pytest.approx(twin.norms, abs=1e-10, rel=0)
        for key, value in rank_gradients.items():
            assert_equal(value, gradients[key], f"gradient of {key}")
        names |= rank_gradients.keys()
    assert names == gradients.keys()
    assert histories.keys() == expected.histories.keys()
    weights = ranks[0][recipe, name][0].weights
    assert weights.keys() == twin.weights.keys()
    for key, value in weights.items():
        assert_equal(value, twin.weights[key], key)


def _num_in_eight_bits(names: Iterable[str]) -> int:
    """Count the weights of linear layers, except those of the last layer and of the first MLP."""
    return sum(
        name.endswith("weight")
        and re.search(r"\.layers\.[012]\.(attention|mlp)\.", name) is not None
        and ".layers.0.mlp." not in name
        for name in names
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_interrupted_fit_continues_with_the_same_bits(
    recipe: FP8Recipe, ranks: Any, folder: Path
) -> None:
    for results in ranks:
        uninterrupted, interrupted = results[recipe]
        assert interrupted == uninterrupted
    saved = check_same_saved(folder / recipe)
    assert any(name.startswith("fp8.") for name in saved) == (recipe == "delayed")


def test_storage_in_8_bits_does_not_change_losses_without_rounding(twins: Any) -> None:
    """In float64 the parameters are the main parameters: casts of them give the same bytes."""
    kind = "fp8"
    recipe = "tensorwise"
    options = {"fp8": FP8(emulate=True, last_bf16=1, keep=("layers.0.mlp.*",))}
    layout = {**options, "microbatch_size": 1}
    report = train(Job(kind, layout=layout), 1, "cpu", steps=STEPS)
    assert twins[kind, recipe, 1][0].losses == pytest.approx(report.losses, abs=1e-10, rel=0)
