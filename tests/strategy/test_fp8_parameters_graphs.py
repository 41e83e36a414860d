"""Fits by CUDA graphs whose weights are kept in 8 bits equal eager fits bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import FP8, CudaGraphs, HuggingFaceCausalLM
from lightning_megatron.graphs.step_graph import StepGraph
from lightning_megatron.layers.fp8.eight_bit_parameter import EightBitParameter
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.training.main_parameters import MainParameters
from tests.strategy.graph_fits import Fit, fit, strategy_of
from tests.strategy.test_fp8_parameters import Losses, trainer_of
from tests.strategy.tiny import TinyLM
from tests.strategy.update_fits import UpdatedLM, differences
from tests.strategy.update_fits import run as run_updates
from tests.sweeps import chosen
from tests.tiny_llama import rows, save_tiny_llama
from tests.world import run_world

STORED = FP8(emulate=True, parameters="fp8")
DELAYED = FP8("delayed", history=3, margin=1, emulate=True, parameters="fp8")
SEGMENTS = CudaGraphs("segments", warmup_steps=1, evaluation=True, on_failure="error")
FULL = replace(SEGMENTS, mode="full")
MODES = (SEGMENTS, FULL)


class Stored(Callback):
    """Note the addresses and the values of the weights in 8 bits after each step."""

    def __init__(self) -> None:
        self.addresses: list[dict[str, tuple[int, int]]] = []
        self.bytes: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        main = main_of(trainer)
        main.wait()
        found = {}
        copies = []
        for names in main.eight_bits.among(main.trained):
            stored = main.eight_bits.stored(names)
            assert stored is not None, names
            for name, part in zip(names, stored.parts, strict=True):
                found[name] = part.data_ptr(), stored.scale.data_ptr()
            copies += [*(part.clone() for part in stored.parts), stored.scale.clone()]
        self.addresses.append(found)
        self.bytes.append(copies)


def main_of(trainer: Trainer) -> MainParameters:
    return strategy_of(trainer).run.state.main


def run(
    graphs: CudaGraphs | None, size: int, layout: dict[str, Any], **options: Any
) -> tuple[Fit, Stored]:
    """Train six steps with weights in 8 bits."""
    noted = Stored()
    options = {"precision": "bf16-mixed", "max_steps": 6, **options}
    return fit(graphs, size, layout, callbacks=(noted,), **options), noted


def check_same(by_graphs: tuple[Fit, Stored], eager: tuple[Fit, Stored], what: str = "") -> None:
    """Assert that some steps were replayed, with the bits of eager ones and at fixed addresses."""
    found, noted = by_graphs
    expected, others = eager
    assert found.num_graphs[-1] > 0, what
    assert found.differences_from(expected) == [], what
    assert len(set(expected.losses)) == len(expected.losses)
    assert len(noted.bytes) == len(others.bytes) == len(expected.losses)
    for own, other in zip(noted.bytes, others.bytes, strict=True):
        assert all(torch.equal(*both) for both in zip(own, other, strict=True)), what
    assert noted.addresses[0]
    assert noted.addresses == noted.addresses[:1] * len(noted.addresses), what
    pairs = list(zip(noted.bytes[0], noted.bytes[-1], strict=True))
    assert not any(torch.equal(*both) for both in pairs), "each step writes new values"


CASES: dict[str, tuple[FP8, dict[str, Any], dict[str, Any]]] = {
    "tensorwise": (STORED, {"microbatch_size": 1}, {}),
    "one microbatch": (STORED, {"microbatch_size": "batch"}, {}),
    "recomputed": (STORED, {"recompute": "full"}, {"model": {"hidden_dropout": 0.1}}),
    "a copy for each product": (replace(STORED, cast_weights="microbatch"), {}, {}),
    "accumulated": (STORED, {}, {"accumulate_grad_batches": 2, "num_samples": 64}),
    "float64": (STORED, {}, {"precision": "64-true"}),
    "delayed": (DELAYED, {"microbatch_size": 1}, {}),
    "delayed, recomputed": (DELAYED, {"recompute": "full"}, {}),
    "delayed, accumulated": (DELAYED, {}, {"accumulate_grad_batches": 3, "num_samples": 96}),
}


@pytest.mark.parametrize("name", chosen(list(CASES), "recomputed", "delayed, accumulated"))
def test_graphs_have_the_bits_of_eager_steps(name: str) -> None:
    settings, layout, options = CASES[name]
    layout = {**layout, "fp8": settings}
    eager = run(None, 1, layout, **options)
    for graphs in MODES:
        check_same(run(graphs, 1, layout, **options), eager, f"{name}, {graphs.mode}")


@pytest.mark.parametrize("recipe", chosen(["tensorwise", "delayed"], "tensorwise"))
def test_captured_updates_are_followed_by_new_bytes(recipe: Any) -> None:
    settings = STORED if recipe == "tensorwise" else DELAYED
    layout = {"fp8": settings}
    options: dict[str, Any] = {"layout": layout, "precision": "bf16-mixed", "max_steps": 7}
    eager = run_updates(None, module=UpdatedLM(), **options)
    for graphs in MODES:
        noted = Stored()
        # `fused` kernels exist for the CPU in these tests alone.
        settings_of_update = replace(graphs, optimizer=True)
        found = run_updates(settings_of_update, module=UpdatedLM(), callbacks=(noted,), **options)
        assert found[0].num_graphs[-1] > 0
        assert differences(found, eager) == [], graphs.mode
        assert found[1].num_calls[-1] < eager[1].num_calls[-1], "updates are replayed"
        assert noted.addresses == noted.addresses[:1] * 7


@pytest.mark.parametrize("fp8", [STORED, None], ids=["in 8 bits", "in the type of the run"])
def test_fused_weights_of_several_parameters_are_captured(fp8: FP8 | None, tmp_path: Path) -> None:
    """Queries, keys and values of a Hugging Face model are parameters of one product."""
    save_tiny_llama(tmp_path / "model")
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    losses = []
    for graphs in (None, *MODES):
        # The host reads token counts that are on the CPU.
        options: dict[str, Any] = {"schedule": "constant", "token_weighted": False}
        module = HuggingFaceCausalLM(str(tmp_path / "model"), learning_rate=1e-2, **options)
        noted = Losses()
        layout = {"fp8": fp8, "microbatch_size": 1, "cuda_graphs": graphs}
        trainer = trainer_of(layout, 5, (noted,), max_epochs=-1)
        # The capture would raise if it failed.
        trainer.fit(module, DataLoader(samples, batch_size=4))
        losses.append(noted.found)
    assert len(set(losses[0])) == 5
    assert losses[1:] == [losses[0]] * 2


class Thaws(TinyLM):
    """Module that trains the attention of its first layer from the second epoch on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.set_frozen(True)

    def on_train_epoch_start(self) -> None:
        self.set_frozen(self.current_epoch == 0)

    def set_frozen(self, is_frozen: bool) -> None:
        for name, parameter in self.named_parameters():
            if "layers.0.attention" in name:
                parameter.requires_grad_(not is_frozen)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Counts(Callback):
    """Note how many parameters are in 8 bits after each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.found.append(sum(isinstance(one, EightBitParameter) for one in module.parameters()))


def test_weights_that_are_trained_later_are_captured_again() -> None:
    options = {"num_samples": 16, "max_steps": 10, "precision": "bf16-mixed"}
    fits = []
    for graphs in (None, *MODES):
        counts = Counts()
        layout = {"fp8": STORED}
        fits.append(fit(graphs, 1, layout, module=Thaws(), callbacks=(counts,), **options))
        assert counts.found[0] < counts.found[-1]
    for found in fits[1:]:
        assert found.num_graphs[-1] > 0
        assert found.differences_from(fits[0]) == []


def history_of(module: TinyLM) -> Tensor:
    (model,) = layered_modules(module)
    assert model.delayed_scales is not None
    return model.delayed_scales.history.clone()


class Magnitudes(Callback):
    """Note the magnitudes of the weights with which each step runs, by name."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        main = main_of(trainer)
        weights = {name: main.main(name).detach().abs().max() for name in main.slices}
        self.found.append({name: float(one) for name, one in weights.items()})


def test_histories_have_the_magnitudes_of_weights_that_no_cast_reads() -> None:
    histories = []
    for graphs in (None, *MODES):
        module = TinyLM()
        noted = Magnitudes()
        layout = {"fp8": DELAYED}
        fit(graphs, 1, layout, module=module, callbacks=(noted,), max_steps=6)
        history = history_of(module)
        assert float(history.min()) > 0
        (model,) = layered_modules(module)
        assert model.delayed_scales is not None
        for name, steps in zip(model.delayed_scales.names, history[:, :, 1], strict=True):
            # The last step first.
            expected = [one[f"net.{name}.weight"] for one in reversed(noted.found[-3:])]
            assert steps.tolist() == torch.tensor(expected).tolist(), name
        histories.append(history)
    assert all(torch.equal(one, histories[0]) for one in histories)


#: Layouts of two processes, and the recipe.
LAYOUTS: dict[str, tuple[dict[str, Any], FP8]] = chosen(
    {
        "dp2": ({}, STORED),
        "dp2, small buckets": ({"bucket_size": 1000, "overlap_parameters": True}, DELAYED),
        "tp2+sp": ({"tp": 2}, DELAYED),
        "tp2, recomputed": ({"tp": 2, "sequence_parallel": False, "recompute": "full"}, STORED),
        "pp2": ({"pp": 2}, DELAYED),
        "pp2, halves": ({"pp": 2, "schedule": "zb-h1"}, STORED),
        "cp2": ({"cp": 2}, STORED),
    },
    "dp2, small buckets",
    "tp2+sp",
    "pp2, halves",
)


@contextmanager
def noting_gathers() -> Iterator[list[bool]]:
    """Note of each replay whether it gathers updated parameters."""
    found: list[bool] = []
    replay = StepGraph.replay

    def noting(self: StepGraph[Any], *args: Any) -> Any:
        found.append(self.effects.gathers)
        return replay(self, *args)

    with patch.object(StepGraph, "replay", noting):
        yield found


def run_layouts(rank: int, size: int) -> list[str]:
    """Train every layout eagerly and by graphs; return those with the same bits."""
    same = []
    options: dict[str, Any] = {
        "model": {"hidden_size": 64, "num_heads": 4},
        "num_samples": 64,
        "num_evaluated": 16,
    }
    for name, (layout, settings) in LAYOUTS.items():
        layout = {**layout, "fp8": settings, "microbatch_size": 1}
        eager = run(None, size, layout, **options)
        for graphs in MODES:
            check_same(run(graphs, size, layout, **options), eager, f"{name}, {graphs.mode}")
            same.append(f"{name}, {graphs.mode}")
    # Without a callback that reads weights the graphs of whole steps gather them.
    layout = {"fp8": DELAYED, "microbatch_size": 1, "overlap_parameters": True, "bucket_size": 1000}
    options |= {"precision": "bf16-mixed", "max_steps": 8}
    eager_fit = fit(None, size, layout, **options)
    with noting_gathers() as gathered:
        found = fit(FULL, size, layout, **options)
    assert found.num_graphs[-1] > 0
    assert found.differences_from(eager_fit) == []
    assert any(gathered), "graphs have gathered"
    assert not all(gathered), "after a validation nothing is left to gather"
    return same


@pytest.mark.slow
def test_layouts_by_graphs_have_the_bits_of_eager_steps() -> None:
    for same in run_world(run_layouts, 2):
        assert len(same) == len(MODES) * len(LAYOUTS)
