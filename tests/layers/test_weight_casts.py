"""Casts of weights that microbatches share: how many there are, and what makes a cast again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.fp8.weight_casts import WeightCasts
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.cuda_graphs import GraphMode
from lightning_megatron.plan.engine_recipe import Backend
from lightning_megatron.plan.fp8 import FP8, check_fp8_products
from tests.layers.test_fp8_products import draw

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
SIZE = 128


@contextmanager
def counting_casts() -> Iterator[list[str]]:
    """Note the operands of every cast of a weight, as "rows" or "columns"."""
    found: list[str] = []
    original = Scaling._cast

    def cast(self: Scaling, matrix: Tensor, use: str, form: str, *args: Any, **known: Any) -> Any:
        if use == "weight":
            found.extend(
                name for name, asked in zip(("rows", "columns"), args, strict=False) if asked
            )
        return original(self, matrix, use, form, *args, **known)  # type: ignore[arg-type]

    Scaling._cast = cast  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Scaling._cast = original  # type: ignore[method-assign]


class Layer:
    """One linear layer in 8 bits.

    Args:
        kind: Class of the layer.
        recipe: Recipe of the casts.
        is_split: Whether the weight consists of three parameters.
    """

    def __init__(
        self, kind: Callable[..., Any], recipe: str = "tensorwise", is_split: bool = False
    ) -> None:
        with torch.device("meta"):
            self.linear = kind(SIZE, SIZE, single_mesh(0)).double()
        initialize_(self.linear, torch.device("cpu"), 1)
        if is_split:
            self.linear.split([64, 32, 32])
        settings = FP8(recipe, emulate=True)  # type: ignore[arg-type]
        self.scales = None
        if recipe == "delayed":
            self.scales = DelayedScales(settings, ["one"], torch.device("cpu"))
        self.casts = WeightCasts()
        own = None if self.scales is None else self.scales.layer(0)
        self.linear.scaling = Scaling(settings, True, own, casts=self.casts.layer(self.linear))

    def step(self, seed: int, is_recomputed: bool = False) -> tuple[Tensor, Tensor]:
        """Run a microbatch; return the output and the gradient of the input."""
        hidden = draw(6, 2, SIZE, seed=seed).requires_grad_()
        output = (
            checkpoint(self.linear, hidden, use_reentrant=False)
            if is_recomputed
            else self.linear(hidden)
        )
        output.backward(draw(6, 2, SIZE, seed=seed + 50))
        assert hidden.grad is not None
        return output.detach(), hidden.grad

    @property
    def parts(self) -> list[nn.Parameter]:
        """Return the parameters of the weight."""
        return list(self.linear.weight_parts)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the weight's parameters."""
        return [part.grad.clone() for part in self.parts if part.grad is not None]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_microbatches_share_casts_and_compute_the_same(recipe, kind, is_recomputed):
    alone, shared = Layer(kind, recipe), Layer(kind, recipe)
    for step in range(3):
        seeds = [10 * step + number for number in range(3)]
        with counting_casts() as found:
            expected = [alone.step(seed, is_recomputed) for seed in seeds]
        assert sorted(found) == ["columns"] * 3 + ["rows"] * (6 if is_recomputed else 3)
        with counting_casts() as found, shared.casts.shared():
            results = [shared.step(seed, is_recomputed) for seed in seeds]
            # One byte for each number of both operands, and scales.
            assert 2 * SIZE**2 < shared.casts.num_bytes < 2.1 * SIZE**2
        assert sorted(found) == ["columns", "rows"]
        assert shared.casts.num_bytes == 0
        for one, two in zip(results, expected, strict=True):
            assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, shared.gradients(), alone.gradients()))
        for layer in (alone, shared):
            if layer.scales is not None:
                layer.scales.end_step(single_mesh(0))
            with torch.no_grad():
                layer.linear.weight.mul_(1.1).add_(layer.linear.weight.grad, alpha=-1e-3)
    if alone.scales is not None and shared.scales is not None:
        assert float(shared.scales.history[0, :3, 1].min()) > 0
        assert torch.equal(shared.scales.history, alone.scales.history)


def test_nothing_is_kept_outside_of_the_block() -> None:
    layer = Layer(ColumnParallelLinear)
    with counting_casts() as found:
        layer.step(0)
        layer.step(1)
        with suppress(RuntimeError), layer.casts.shared():
            layer.step(2)
            assert layer.casts.is_open
            raise RuntimeError
        assert not layer.casts.is_open
        assert layer.casts.num_bytes == 0
        # Neither the version counter nor the address of the memory shows this write.
        layer.linear.weight.data.mul_(2)
        expected = Layer(ColumnParallelLinear)
        expected.linear.weight.data.mul_(2)
        with layer.casts.shared():
            assert torch.equal(layer.step(3)[0], expected.step(3)[0])
    assert len(found) == 10


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


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "write",
    [_write_in_place, _write_a_view, _replace_memory, _write_data, _replace_parameter],
)
def test_writes_between_microbatches_are_cast_again(write, is_split):
    alone, shared = (Layer(ColumnParallelLinear, is_split=is_split) for _ in range(2))
    results = []
    for layer in (alone, shared):
        with shared.casts.shared():
            found = [layer.step(0)]
            write(layer)
            found += [layer.step(1), layer.step(2)]
        results.append(found)
    assert not torch.equal(results[0][0][0], results[0][1][0])
    for one, two in zip(*results, strict=True):
        assert all(map(torch.equal, one, two))


class Doubled(nn.Module):
    """Parametrization that depends on state which torch does not count."""

    factor = 2.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def test_weights_that_are_no_parameters_are_cast_for_each_product() -> None:
    layer = Layer(RowParallelLinear)
    doubled = Doubled()
    parametrize.register_parametrization(layer.linear, "weight", doubled)
    with counting_casts() as found, layer.casts.shared():
        first = layer.step(0)[0]
        doubled.factor = 4.0
        second = layer.step(0)[0]
    assert found == ["rows", "columns"] * 2
    bias = layer.linear.bias.detach()
    torch.testing.assert_close(second - bias, 2 * (first - bias))


@pytest.mark.parametrize("recipe", RECIPES)
def test_passes_without_gradients_share_casts_but_count_for_no_step(recipe):
    alone, shared = Layer(ColumnParallelLinear, recipe), Layer(ColumnParallelLinear, recipe)
    with counting_casts() as found, shared.casts.shared():
        for layer in (alone, shared):
            with torch.no_grad():
                # A teacher with the weights of the student.
                taught = layer.linear(draw(6, 2, SIZE, seed=9))
            assert torch.equal(layer.step(0)[0], alone.step(0)[0])
            assert taught.shape == (6, 2, SIZE)
    assert found
    if alone.scales is not None and shared.scales is not None:
        for scales in (alone.scales, shared.scales):
            scales.end_step(single_mesh(0))
        assert float(shared.scales.history[0, 0, 1]) > 0
        assert torch.equal(shared.scales.history[0, 0, 1:2], alone.scales.history[0, 0, 1:2])


def test_a_copy_of_a_layer_has_casts_of_its_own() -> None:
    layer = Layer(ColumnParallelLinear)
    with layer.casts.shared():
        before = layer.step(0)[0]
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.linear.weight.mul_(3)
        bias = layer.linear.bias.detach()
        assert not torch.equal(other.step(0)[0] - bias, before - bias)
        assert torch.equal(layer.step(0)[0], before)


@pytest.mark.parametrize(
    ("backend", "graphs", "message"),
    [("te", None, "backend 'te'"), ("native", "segments", "mode 'segments'")],
)
def test_sharing_that_cannot_be_is_refused(
    backend: Backend, graphs: GraphMode | None, message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=f"fp8.cast_weights.*{message}"):
        check_fp8_products(FP8(cast_weights="batch"), False, backend, graphs)
    for settings in (FP8(), FP8(cast_weights="microbatch")):
        check_fp8_products(settings, False, "native", graphs)
        assert not settings.shares_casts(1, graphs)
    assert FP8().shares_casts(2)
    assert FP8().shares_casts(2, "full")
    assert FP8(cast_weights="batch").shares_casts(1)
    assert not FP8(cast_weights="microbatch").shares_casts(2)
    with pytest.raises(ParallelPlanError, match="fp8.cast_weights must be"):
        FP8(cast_weights="step")  # type: ignore[arg-type]
