"""Each microbatch has its own weight of attached losses, in a new or in a fixed tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.routing.attached_loss import LossWeight, attach_loss
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.loss_weights import MicrobatchWeights, new_weight
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import LayerCosts, partition_of
from lightning_megatron.plan.schedule import shape_of
from tests.world import run_world

WIDTH, LAYERS, SAMPLES = 4, 8, 6
WEIGHTS = [0.5, 0.125, 2.0, 1.0, 0.25, 3.0]
CPU = torch.device("cpu")
CASES = [("1f1b", 2, 1), ("interleaved", 2, 2), ("zb-v", 2, 2)]


class Tower(PipelinedModule):
    """A stack of layers, each of which attaches a loss."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        partition = partition_of(LayerCosts.equal(LAYERS), mesh.layout)
        self.chunks = partition.by_stage(mesh.layout.placement)[mesh.pp.rank]
        self.layers = nn.ModuleDict()
        for index in (index for chunk in self.chunks for index in chunk):
            layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            generator = torch.Generator().manual_seed(index)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.normal_(generator=generator)
            self.layers[str(index)] = layer
        self.loss_weight = LossWeight()
        self.addresses: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        absent = partial(RemoteTensor.of, x.to("meta"), self, "the result of an earlier call")
        return self.run_stage(
            lambda chunk, hidden: self.run_layers(chunk, x if hidden is None else hidden),
            lambda: (x.shape, x.dtype),
            absent,
        )

    def run_layers(self, chunk: int, hidden: Tensor) -> Tensor:
        for index in self.chunks[chunk]:
            hidden = self.layers[str(index)](hidden).tanh()
            weight = self.loss_weight.value
            if isinstance(weight, Tensor):
                self.addresses.append(weight.data_ptr())
            hidden = attach_loss(hidden, hidden.pow(4).sum(), weight)
        return hidden


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)}


def gradients_of_one_process() -> dict[str, Tensor]:
    model = Tower(ParallelMesh.single())
    for microbatch, weight in zip(split_batch(batch(), 1), WEIGHTS, strict=True):
        model.loss_weight.value = weight
        (model(microbatch.data["x"]).square().mean() * weight).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_case(size: int, case: tuple[str, int, int], fixed: Tensor | None) -> dict[str, Any]:
    name, pp, vpp = case
    mesh = ParallelMesh.create(ParallelLayout(size, pp=pp, vpp=vpp, shape=shape_of(name)))
    model = Tower(mesh)
    executor = PipelineExecutor(mesh, model, name)
    executor.fixed_weight = fixed
    expected = gradients_of_one_process()
    worst = 0.0
    addresses = set[int]()
    for _ in range(2):
        model.zero_grad()
        executor.run(
            lambda data: {"loss": model(data["x"]).square().mean()},
            split_batch(batch(), 1),
            backward=True,
            loss_of=lambda result, number: result["loss"] * WEIGHTS[number],
            weight_of=lambda number: WEIGHTS[number],
            loss_weight=model.loss_weight,
        )
        addresses.update(model.addresses)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            worst = max(worst, (parameter.grad - expected[key]).abs().max().item())
    mesh.destroy()
    return {"error": worst, "addresses": addresses - {0 if fixed is None else fixed.data_ptr()}}


def world(rank: int, size: int) -> dict[str, Any]:
    return {
        case[0]: {"new": run_case(size, case, None), "fixed": run_case(size, case, new_weight(CPU))}
        for case in CASES
    }


@pytest.fixture(scope="module")
def results() -> Sequence[dict[str, Any]]:
    return run_world(world, 2)


@pytest.mark.parametrize("name", [case[0] for case in CASES])
@pytest.mark.parametrize("tensor", ["new", "fixed"])
def test_attached_losses_have_the_weight_of_their_microbatch(
    results: Sequence[dict[str, Any]], name: str, tensor: str
) -> None:
    for result in results:
        assert result[name][tensor]["error"] < 1e-10


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_layers_read_only_the_fixed_weight(results: Sequence[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result[name]["new"]["addresses"]
        assert not result[name]["fixed"]["addresses"]


def test_a_fixed_weight_changes_only_at_the_backward_pass() -> None:
    fixed = new_weight(CPU)
    loss_weight = LossWeight()
    weights = MicrobatchWeights(loss_weight, CPU, fixed)
    for number in (0, 1):
        weights.begin_forward(number)
        weights.fill(number, 10.0 + number)
        assert loss_weight.value is fixed
        assert fixed.item() == 0.0
    for number in (0, 1):
        weights.begin_backward(number)
        assert loss_weight.value is fixed
        assert fixed.item() == 10.0 + number


def test_a_weight_made_in_validation_can_be_written_in_training() -> None:
    with torch.inference_mode():
        fixed = new_weight(CPU)
    weights = MicrobatchWeights(LossWeight(), CPU, fixed)
    weights.fill(0, 3.0)
    weights.begin_backward(0)
    assert fixed.item() == 3.0
