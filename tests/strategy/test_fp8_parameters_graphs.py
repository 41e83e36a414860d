"""Fits by CUDA graphs whose weights are stored in 8 bits equal eager fits bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs
from lightning_megatron.layers.fp8.eight_bit_parameter import EightBitParameter
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.training.main_parameters import MainParameters
from tests.strategy.graph_fits import Fit, fit, strategy_of
from tests.strategy.tiny import TinyLM
from tests.strategy.update_fits import UpdatedLM, differences
from tests.strategy.update_fits import run as run_updates

STORED = FP8(emulate=True, parameters="fp8")
DELAYED = FP8("delayed", history=3, margin=1, emulate=True, parameters="fp8")
SEGMENTS = CudaGraphs("segments", warmup_steps=1, evaluation=True, on_failure="error")
FULL = replace(SEGMENTS, mode="full")
MODES = (SEGMENTS, FULL)


class Stored(Callback):
    """Record the addresses and the bytes of the weights in 8 bits after each step."""

    def __init__(self) -> None:
        self.addresses: list[dict[str, tuple[int, int]]] = []
        self.bytes: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        main = main_of(trainer)
        main.wait()
        addresses = {}
        copies = []
        for names in main.eight_bits.among(main.trained):
            stored = main.eight_bits.stored(names)
            assert stored is not None, names
            for name, part in zip(names, stored.parts, strict=True):
                addresses[name] = part.data_ptr(), stored.scale.data_ptr()
            copies += [*(part.clone() for part in stored.parts), stored.scale.clone()]
        self.addresses.append(addresses)
        self.bytes.append(copies)


def main_of(trainer: Trainer) -> MainParameters:
    return strategy_of(trainer).run.state.main


def run(
    graphs: CudaGraphs | None, size: int, layout: dict[str, Any], **options: Any
) -> tuple[Fit, Stored]:
    """Train six steps with weights in 8 bits."""
    recorder = Stored()
    options = {"precision": "bf16-mixed", "max_steps": 6, **options}
    return fit(graphs, size, layout, callbacks=(recorder,), **options), recorder


def check_same(actual: tuple[Fit, Stored], expected: tuple[Fit, Stored], case: str = "") -> None:
    """Assert that a fit captured graphs, equals an eager fit, and keeps the addresses of weights."""
    actual_fit, actual_record = actual
    expected_fit, expected_record = expected
    assert actual_fit.num_graphs[-1] > 0, case
    assert actual_fit.differences_from(expected_fit) == [], case
    assert len(set(expected_fit.losses)) == len(expected_fit.losses)
    assert len(actual_record.bytes) == len(expected_record.bytes) == len(expected_fit.losses)
    for actual_tensors, expected_tensors in zip(
        actual_record.bytes, expected_record.bytes, strict=True
    ):
        assert all(
            torch.equal(*pair) for pair in zip(actual_tensors, expected_tensors, strict=True)
        ), case
    assert actual_record.addresses[0]
    assert actual_record.addresses == actual_record.addresses[:1] * len(actual_record.addresses), (
        case
    )
    pairs = list(zip(actual_record.bytes[0], actual_record.bytes[-1], strict=True))
    assert not any(torch.equal(*pair) for pair in pairs), "each step writes new values"


CASES: dict[str, tuple[FP8, dict[str, Any], dict[str, Any]]] = {
    "recomputed": (STORED, {"recompute": "full"}, {"model": {"hidden_dropout": 0.1}}),
    "delayed, accumulated": (DELAYED, {}, {"accumulate_grad_batches": 3, "num_samples": 96}),
}


@pytest.mark.parametrize("name", CASES)
def test_fits_by_graphs_equal_eager_fits_with_weights_in_8_bits(name: str) -> None:
    settings, layout, options = CASES[name]
    layout = {**layout, "fp8": settings}
    eager = run(None, 1, layout, **options)
    for graphs in MODES:
        check_same(run(graphs, 1, layout, **options), eager, f"{name}, {graphs.mode}")


def test_captured_updates_equal_eager_updates_and_keep_the_addresses_of_weights() -> None:
    layout = {"fp8": STORED}
    options: dict[str, Any] = {"layout": layout, "precision": "bf16-mixed", "max_steps": 7}
    expected = run_updates(None, module=UpdatedLM(), **options)
    for graphs in MODES:
        recorder = Stored()
        # `fused` kernels exist for the CPU in these tests alone.
        graphs_with_update = replace(graphs, optimizer=True)
        actual = run_updates(
            graphs_with_update, module=UpdatedLM(), callbacks=(recorder,), **options
        )
        assert actual[0].num_graphs[-1] > 0
        assert differences(actual, expected) == [], graphs.mode
        assert actual[1].num_calls[-1] < expected[1].num_calls[-1], "updates are replayed"
        assert recorder.addresses == recorder.addresses[:1] * 7


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


class CountEightBits(Callback):
    """Record the number of parameters in 8 bits after each step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.numbers.append(
            sum(isinstance(parameter, EightBitParameter) for parameter in module.parameters())
        )


def test_fits_by_graphs_equal_eager_fits_when_frozen_weights_are_thawed() -> None:
    options = {"num_samples": 16, "max_steps": 10, "precision": "bf16-mixed"}
    fits = []
    for graphs in (None, *MODES):
        counts = CountEightBits()
        layout = {"fp8": STORED}
        fits.append(fit(graphs, 1, layout, module=Thaws(), callbacks=(counts,), **options))
        assert counts.numbers[0] < counts.numbers[-1]
    for actual in fits[1:]:
        assert actual.num_graphs[-1] > 0
        assert actual.differences_from(fits[0]) == []


def history_of(module: TinyLM) -> Tensor:
    (model,) = layered_modules(module)
    assert model.delayed_scales is not None
    return model.delayed_scales.history.clone()


class Magnitudes(Callback):
    """Record the magnitudes of the weights at the start of each step, by name."""

    def __init__(self) -> None:
        self.magnitudes: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        main = main_of(trainer)
        weights = {name: main.main(name).detach().abs().max() for name in main.slices}
        self.magnitudes.append({name: float(magnitude) for name, magnitude in weights.items()})


def test_histories_of_scales_record_the_magnitudes_of_stored_weights() -> None:
    histories = []
    for graphs in (None, *MODES):
        module = TinyLM()
        recorder = Magnitudes()
        layout = {"fp8": DELAYED}
        fit(graphs, 1, layout, module=module, callbacks=(recorder,), max_steps=6)
        history = history_of(module)
        assert float(history.min()) > 0
        (model,) = layered_modules(module)
        assert model.delayed_scales is not None
        for name, steps in zip(model.delayed_scales.names, history[:, :, 1], strict=True):
            # Histories begin with the last step.
            expected = [step[f"net.{name}.weight"] for step in reversed(recorder.magnitudes[-3:])]
            assert steps.tolist() == torch.tensor(expected).tolist(), name
        histories.append(history)
    assert all(torch.equal(history, histories[0]) for history in histories)
