"""The backward pass of an FP8 column layer overlaps the all-gather of its inputs with a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8 import fp8_regions, scaling, weight_products
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.test_fp8_products import draw
from tests.world import run_world


def record_calls(calls: list[str], module: Any, name: str) -> Any:
    """Return a patch of a function of a module that records calls of the function."""
    function: Callable[..., Any] = getattr(module, name)

    def record(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*args, **options)

    return mock.patch.object(module, name, record)


def backward_calls(rank: int, size: int) -> list[str]:
    """Return the calls in the backward pass of a column layer under sequence parallelism."""
    layout = ParallelLayout(world_size=size, tp=size)
    mesh = ParallelMesh.create(layout, sequence_parallel=True)
    hidden = draw(8, 32, seed=rank).requires_grad_()
    weight = draw(48, 32, seed=9).requires_grad_()
    fp8_scaling = Scaling(FP8(emulate=True), emulate=True)
    output = fp8_regions.fp8_column_linear(hidden, weight, None, mesh, fp8_scaling)
    calls: list[str] = []
    with (
        record_calls(calls, scaling, "one_shot_all_reduce_"),
        record_calls(calls, weight_products, "start_gathering"),
        record_calls(calls, fp8_regions, "product"),
        record_calls(calls, fp8_regions, "start_summing"),
        record_calls(calls, weight_products, "transposed"),
    ):
        output.backward(torch.ones_like(output))
    mesh.destroy()
    return calls


def test_the_gather_of_inputs_starts_before_the_product_of_the_input_gradient() -> None:
    expected = [
        "one_shot_all_reduce_",
        "start_gathering",
        "product",
        "start_summing",
        "transposed",
    ]
    for calls in run_world(backward_calls, 2):
        assert calls == expected
