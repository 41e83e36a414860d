"""Trainings whose weights are kept and gathered in 8 bits equal one process with the same option."""

from __future__ import annotations

from collections.abc import Mapping
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
from lightning_megatron.training.main_parameters import MainParameters
from tests.oracles import assert_equal
from tests.proof import training
from tests.proof.test_fp8 import CONFIGS
from tests.proof.training import Job, Report, train
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

STEPS = 4
#: Every microbatch has one sample: scales of inputs belong to microbatches.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = chosen(
    {
        "dp4": ("fp8", {}),
        "dp4, late gathers": ("fp8", {"overlap_parameters": True}),
        "dp4, small buckets": ("fp8, gpt2", {"bucket_size": 5000, "overlap_parameters": True}),
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
        "cp2 tp2+sp": ("fp8", {"cp": 2, "tp": 2}),
        "cp2 dp2": ("fp8", {"cp": 2}),
    },
    "dp4, small buckets",
    "tp2 dp2, recomputed",
    "pp2 dp2, halves",
    "cp2 tp2+sp",
)


def settings(**others: Any) -> FP8:
    keep = ("layers.0.mlp.*",)
    return FP8(emulate=True, last_bf16=1, keep=keep, parameters="fp8", **others)


def full(main: MainParameters, slices: Mapping[str, Tensor], *, sums: bool) -> dict[str, Tensor]:
    """Return full tensors of this rank's stage from all ranks' slices.

    Args:
        main: Main parameters.
        slices: This rank's slice of each tensor, by name.
        sums: Whether the slices are gradients, of which copies over tp may be parts of a sum.
    """
    found = {}
    mesh = main.mesh
    for name in main.trained:
        spec = main.spec(name)
        whole = torch.zeros(spec.full_shape, dtype=torch.float64)
        if name in slices:
            main.slices[name].placement.copy_to_full(slices[name], whole, counted_only=True)
        if name not in slices or main.slices[name].is_exclusive or mesh.data.is_first:
            whole = all_reduce_(whole, mesh.data)
        else:
            whole = all_reduce_(torch.zeros_like(whole), mesh.data)
        found[name] = all_reduce_(whole, mesh.tp)
    return found


class CheckBytes(pl.Callback):
    """Compare the stored bytes and scales with the cast of the main parameters of all ranks."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.num_checked = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        slices = {name: one.main.grad for name, one in main.slices.items()}
        self.gradients = full(main, slices, sums=True)  # type: ignore[arg-type]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        main.wait()
        values = {name: one.main.detach() for name, one in main.slices.items()}
        whole = full(main, values, sums=False)
        for names in strategy_of(trainer).run.state._eight_bits:
            stored = main.eight_bits.stored(names)
            assert stored is not None, names
            matrix = torch.cat([whole[name] for name in names])
            parts = torch_casts.magnitude_parts(matrix)
            for name, own in zip(names, stored.parts, strict=True):
                cast, _ = torch_casts.cast_by_one_scale(
                    whole[name], parts, FORMAT, rows=True, columns=False, multiple=16
                )
                assert cast is not None
                spec = main.spec(name)
                expected = torch.zeros(own.shape)
                spec.copy_from_full(expected, cast[0].float())
                assert torch.equal(own.view(FORMAT).float(), expected), name
                assert torch.equal(stored.scale, cast[1]), name
                self.num_checked += 1


def strategy_of(trainer: pl.Trainer) -> MegatronStrategy:
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def run(
    kind: str, layout: dict[str, Any], size: int, folder: str | None, **others: Any
) -> tuple[Report, dict[str, Tensor], int]:
    """Train; return the report, the gradients of the last step and the number of checked weights."""
    training.KINDS.update(CONFIGS)
    check = CheckBytes()
    options = {**layout, "fp8": settings(**others), "microbatch_size": 1}
    job = Job(kind, layout=options, compares=False, callbacks=(check,))
    report = train(job, size, "cpu", folder, steps=STEPS)
    return report, check.gradients, check.num_checked


def run_all(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Run everything on four processes."""
    return {
        name: run(kind, layout, size, str(folder / str(number)))
        for number, (name, (kind, layout)) in enumerate(LAYOUTS.items())
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run everything once."""
    return run_world(run_all, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train every kind in this process."""
    folder = tmp_path_factory.mktemp("one")
    kinds = {kind for kind, _ in LAYOUTS.values()}
    return {kind: run(kind, {}, 1, str(folder / kind)) for kind in kinds}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_trains_as_one_process(name: str, ranks: Any, twins: Any) -> None:
    kind, _ = LAYOUTS[name]
    twin, gradients, num_checked = twins[kind]
    assert twin.losses[-1] < twin.losses[0]
    assert num_checked == STEPS * (len(gradients) - _others(gradients))
    seen = set()
    for found in ranks:
        report, own, _ = found[name]
        assert report.losses == pytest.approx(twin.losses, abs=1e-10, rel=0)
        assert report.norms == pytest.approx(twin.norms, abs=1e-10, rel=0)
        for key, value in own.items():
            assert_equal(value, gradients[key], f"gradient of {key}")
        seen |= own.keys()
    assert seen == gradients.keys()
    weights = ranks[0][name][0].weights
    assert weights.keys() == twin.weights.keys()
    for key, value in weights.items():
        assert_equal(value, twin.weights[key], key)


def _others(gradients: Mapping[str, Tensor]) -> int:
    """Count the parameters that are not kept in 8 bits: those of one layer and one MLP, and vectors."""
    inside = [
        name
        for name, value in gradients.items()
        if value.dim() == 2
        and ("attention" in name or "mlp" in name)
        and ".layers.3." not in name
        and ".layers.0.mlp" not in name
    ]
    return len(gradients) - len(inside)


def test_without_rounding_of_parameters_both_ways_are_the_same(twins: Any) -> None:
    """In float64 the parameters are the main parameters: casts of them give the same bytes."""
    kind = "fp8"
    options = {"fp8": FP8(emulate=True, last_bf16=1, keep=("layers.0.mlp.*",))}
    layout = {**options, "microbatch_size": 1}
    other = train(Job(kind, layout=layout), 1, "cpu", steps=STEPS)
    assert twins[kind][0].losses == pytest.approx(other.losses, abs=1e-10, rel=0)
