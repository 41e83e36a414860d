"""Microbatches share casts of weights, and a write to a weight causes a new cast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.fp8.weight_casts import WeightCasts
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.fp8 import FP8, check_fp8_products
from tests.layers.noted_casts import spread
from tests.refusals import check_refusals

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
SIZE = 128


@contextmanager
def counting_casts() -> Iterator[list[str]]:
    """Record the operands of every cast of a weight, as "rows" or "columns"."""
    operands: list[str] = []
    original = Scaling.cast

    def cast(self: Scaling, matrix: Tensor, use: Any, **options: Any) -> Any:
        if use == "weight":
            operands.extend(name for name in ("rows", "columns") if options[name])
        return original(self, matrix, use, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaling, "cast", cast)
        yield operands


def bytes_of(casts: WeightCasts) -> int:
    """Return the memory of the casts that are kept now (bytes)."""
    pairs = [(layer._rows, layer._columns) for layer in casts._layers]
    kept = [cast for pair in pairs for cast in pair if cast is not None]
    return sum(cast.values.nbytes + cast.scale.nbytes for cast in kept)


class Layer:
    """One linear layer in 8 bits, whose weight may consist of three parameters."""

    def __init__(self, kind: Any, recipe: Any = "tensorwise", is_split: bool = False) -> None:
        self.linear = kind(SIZE, SIZE, single_mesh(0)).double()
        initialize_(self.linear, torch.device("cpu"), 1)
        if is_split:
            self.linear.split([64, 32, 32])
        settings, self.scales = FP8(recipe, emulate=True), None
        if recipe == "delayed":
            self.scales = DelayedScales(settings, ["one"], torch.device("cpu"))
        self.casts = WeightCasts()
        layer_scales = None if self.scales is None else self.scales.layer(0)
        casts = self.casts.layer(self.linear)
        self.linear.scaling = Scaling(settings, True, layer_scales, casts=casts)

    def step(self, seed: int, is_recomputed: bool = False) -> tuple[Tensor, Tensor]:
        """Run a microbatch; return the output and the gradient of the input."""
        hidden = spread(6, 2, SIZE, seed=seed).requires_grad_()
        run = (
            partial(checkpoint, self.linear, use_reentrant=False) if is_recomputed else self.linear
        )
        output = run(hidden)
        output.backward(spread(6, 2, SIZE, seed=seed + 50))
        assert hidden.grad is not None
        return output.detach(), hidden.grad

    @property
    def parts(self) -> list[nn.Parameter]:
        """Return the parameters of the weight."""
        return list(self.linear.weight_parts)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters of the weight."""
        return [part.grad.clone() for part in self.parts if part.grad is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_with_shared_casts_equal_those_with_separate_casts(recipe):
    is_recomputed = recipe == "delayed"
    kind = RowParallelLinear if is_recomputed else ColumnParallelLinear
    separate, shared = Layer(kind, recipe), Layer(kind, recipe)
    for step in range(3):
        seeds = [10 * step + number for number in range(3)]
        with counting_casts() as casts:
            expected_results = [separate.step(seed, is_recomputed) for seed in seeds]
        assert sorted(casts) == ["columns"] * 3 + ["rows"] * (6 if is_recomputed else 3)
        with counting_casts() as casts, shared.casts.shared():
            actual_results = [shared.step(seed, is_recomputed) for seed in seeds]
            # Each number of both operands takes one byte; scales take little more.
            assert 2 * SIZE**2 < bytes_of(shared.casts) < 2.1 * SIZE**2
        assert sorted(casts) == ["columns", "rows"]
        assert bytes_of(shared.casts) == 0
        for pairs in zip(actual_results, expected_results, strict=True):
            assert all(map(torch.equal, *pairs))
        assert all(map(torch.equal, shared.gradients(), separate.gradients()))
        for layer in (separate, shared):
            if layer.scales is not None:
                layer.scales.end_step(single_mesh(0))
            with torch.no_grad():
                layer.linear.weight.mul_(1.1).add_(layer.linear.weight.grad, alpha=-1e-3)
    if separate.scales is not None and shared.scales is not None:
        assert float(shared.scales.history[0, :3, 1].min()) > 0
        assert torch.equal(shared.scales.history, separate.scales.history)


def test_no_casts_are_kept_outside_of_the_block():
    layer = Layer(ColumnParallelLinear)
    with counting_casts() as casts:
        layer.step(0)
        layer.step(1)
        with suppress(RuntimeError), layer.casts.shared():
            layer.step(2)
            assert layer.casts.is_open
            raise RuntimeError
        assert not layer.casts.is_open
        assert bytes_of(layer.casts) == 0
        # This write changes neither the version counter nor the address of the memory.
        layer.linear.weight.data.mul_(2)
        reference = Layer(ColumnParallelLinear)
        reference.linear.weight.data.mul_(2)
        with layer.casts.shared():
            assert torch.equal(layer.step(3)[0], reference.step(3)[0])
    assert len(casts) == 10


def _write_in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.parts[-1].mul_(3)


def _write_a_view(layer: Layer) -> None:
    layer.parts[-1].detach()[:5] *= 3


def _replace_memory(layer: Layer) -> None:
    layer.parts[-1].data = layer.parts[-1].detach() * 3


def _write_data(layer: Layer) -> None:
    layer.casts.stop(layer.parts[-1])
    layer.parts[-1].data.mul_(3)


def _replace_parameter(layer: Layer) -> None:
    owner = layer.linear if layer.linear.weights is None else layer.linear.weights
    name = "weight" if layer.linear.weights is None else "2"
    setattr(owner, name, nn.Parameter(layer.parts[-1].detach() * 3))


WRITES = (_write_in_place, _write_a_view, _replace_memory, _write_data, _replace_parameter)


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_between_microbatches_are_cast_again(write):
    for is_split in (False, True):
        separate, shared = (Layer(ColumnParallelLinear, is_split=is_split) for _ in range(2))
        results = []
        for layer in (separate, shared):
            with shared.casts.shared():
                first = layer.step(0)
                write(layer)
                results.append([first, layer.step(1), layer.step(2)])
        assert not torch.equal(results[0][0][0], results[0][1][0])
        for pairs in zip(*results, strict=True):
            assert all(map(torch.equal, *pairs))


class Doubled(nn.Module):
    """Parametrization that depends on state without a version counter."""

    factor = 2.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def test_parametrized_weights_are_cast_for_each_product():
    layer = Layer(RowParallelLinear)
    doubled = Doubled()
    parametrize.register_parametrization(layer.linear, "weight", doubled)
    with counting_casts() as casts, layer.casts.shared():
        first = layer.step(0)[0]
        doubled.factor = 4.0
        second = layer.step(0)[0]
    assert casts == ["rows", "columns"] * 2
    bias = layer.linear.bias.detach()
    torch.testing.assert_close(second - bias, 2 * (first - bias))


def test_casts_are_shared_by_several_microbatches_unless_graphs_forbid_it():
    assert FP8().shares_casts(2)
    assert FP8().shares_casts(2, "full")
    assert FP8(cast_weights="batch").shares_casts(1)
    assert not FP8(cast_weights="microbatch").shares_casts(2)
    for graphs in (None, "segments"):
        for settings in (FP8(), FP8(cast_weights="microbatch")):
            check_fp8_products(settings, False, "native", graphs)
            assert not settings.shares_casts(1, graphs)
    check_refusals(
        lambda *given: check_fp8_products(FP8(cast_weights="batch"), False, *given),
        [(("te", None), "backend 'te'"), (("native", "segments"), "mode 'segments'")],
    )
    check_refusals(FP8, [({"cast_weights": "step"}, "fp8.cast_weights must be")])
