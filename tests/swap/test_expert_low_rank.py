"""Adapters of peft on models with experts match peft on attention layers, and are refused on experts
and routers.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal, float32_as_float64
from tests.swap.expert_models import exact_twin_of
from tests.swap.test_language_models import expected_of, inputs
from tests.swap.test_low_rank import adapted, check_gradients, swapped
from tests.world import run_world

pytest.importorskip("peft")

LINEAR = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def compare(case: str, mesh: ParallelMesh) -> None:
    call = inputs()["odd"]
    with float32_as_float64():
        twin = adapted(exact_twin_of(case), **LINEAR)
        logits, loss, _ = expected_of(twin, call)
    wrapped = swapped(adapted(exact_twin_of(case), **LINEAR), mesh)
    output = wrapped(**{name: x.roll(mesh.dp.rank, 0) for name, x in call.items()})
    assert_equal(output.logits, logits.roll(mesh.dp.rank, 0), f"{case}: logits", 1e-9)
    assert_equal(output.loss, loss, f"{case}: loss", 1e-9)
    output.loss.backward()
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    for parameter in trained:
        all_reduce_(parameter.grad, mesh.data).div_(mesh.data.size)
    check_gradients(wrapped, twin, mesh, f"{case}, {mesh.layout}")
    assert not any(
        ".experts." in name
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    )


def check_grids(rank: int, size: int) -> None:
    for sizes, shares_sequence in (({"ep": 2}, False), ({"tp": 2, "ep": 2, "etp": 1}, True)):
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares_sequence)
        compare("mixtral", mesh)
        mesh.destroy()


def test_adapters_of_linear_layers_beside_experts_match_peft() -> None:
    for case in ("mixtral", "qwen3_moe"):
        compare(case, ParallelMesh.single())
    run_world(check_grids, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            "its target_parameters has 'mlp.experts.gate_up_proj'",
        ),
        (
            {"target_modules": "all-linear"},
            "'gate_up_proj'.* because 'all-linear' includes experts",
        ),
        ({"modules_to_save": ["experts"]}, "its modules_to_save has 'model.layers.0.mlp.experts'"),
        ({"modules_to_save": ["gate"]}, "its modules_to_save has 'model.layers.0.mlp.gate'"),
    ],
)
def test_adapters_of_experts_and_routers_are_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    wrapped = adapted(exact_twin_of("mixtral"), **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(UnsupportedError, match=message):
        swapped(wrapped, ParallelMesh.single())
