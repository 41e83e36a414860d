"""The backward pass of an FP8 column layer hides the all-gather of its inputs."""

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


def recorded(calls: list[str], module: Any, name: str) -> Any:
    """Return a patch of a module's function that records its calls."""
    function: Callable[..., Any] = getattr(module, name)

    def record(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*args, **options)

    return mock.patch.object(module, name, record)


def backward_calls(rank: int, size: int) -> list[str]:
    """Return the calls of a column layer's backward pass under sequence parallelism."""
    layout = ParallelLayout(world_size=size, tp=size)
    mesh = ParallelMesh.create(layout, sequence_parallel=True)
    hidden = draw(8, 32, seed=rank).requires_grad_()
    weight = draw(48, 32, seed=9).requires_grad_()
    casts = Scaling(FP8(emulate=True), emulate=True)
    output = fp8_regions.fp8_column_linear(hidden, weight, None, mesh, casts)
    calls: list[str] = []
    with (
        recorded(calls, scaling, "one_shot_all_reduce_"),
        recorded(calls, weight_products, "start_gathering"),
        recorded(calls, fp8_regions, "product"),
        recorded(calls, fp8_regions, "start_summing"),
        recorded(calls, weight_products, "transposed"),
    ):
        output.backward(torch.ones_like(output))
    mesh.destroy()
    return calls


def test_inputs_are_gathered_beside_the_product_of_the_input_gradient() -> None:
    expected = [
        "one_shot_all_reduce_",
        "start_gathering",
        "product",
        "start_summing",
        "transposed",
    ]
    for calls in run_world(backward_calls, 2):
        assert calls == expected
