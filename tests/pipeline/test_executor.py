"""A pipeline has the losses, outputs and gradients of one process with every schedule and size."""

from __future__ import annotations

from functools import partial
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import LayerCosts, partition_of
from lightning_megatron.plan.schedule import build_schedule, shape_of
from tests.pipeline.halves import with_halves
from tests.world import run_world

WIDTH, LAYERS = 4, 8
CASES = [
    ("1f1b", 4, 1, 1), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 6), ("gpipe", 4, 1, 5), ("1f1b", 2, 1, 4),
    ("interleaved", 2, 2, 4), ("interleaved", 2, 4, 6), ("interleaved", 4, 2, 4), ("interleaved", 4, 2, 8),
    ("zb-h1", 4, 1, 1), ("zb-h1", 4, 1, 6), ("zb-h2", 4, 1, 3), ("zb-h2", 2, 1, 5),
    ("zb-v", 2, 2, 1), ("zb-v", 2, 2, 5), ("zb-v", 4, 2, 3), ("zb-v", 4, 2, 9),
    ("dualpipe-v", 2, 2, 5), ("dualpipe-v", 4, 2, 8),
    ("halves of 1f1b", 4, 1, 6), ("halves of gpipe", 2, 1, 3), ("halves of interleaved", 4, 2, 8),
]  # fmt: skip


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / 2
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Tower(PipelinedModule):
    """A stack of layers, complete or divided among stages."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        partition = partition_of(LayerCosts.equal(LAYERS), mesh.layout)
        plan = partition.by_stage(mesh.layout.placement)[mesh.pp.rank]
        self.chunks = plan
        self.layers = nn.ModuleDict({str(i): Layer(i) for chunk in plan for i in chunk})
        self.passed_on: list[ReferenceType[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        absent = partial(RemoteTensor.of, x.to("meta"), self, "the result of an earlier call")
        return self.run_stage(
            lambda chunk, hidden: self.run_layers(chunk, x if hidden is None else hidden),
            lambda: (x.shape, x.dtype),
            absent,
        )

    def run_layers(self, chunk: int, hidden: Tensor) -> Tensor:
        for index in self.chunks[chunk]:
            hidden = self.layers[str(index)](hidden)
        if not self.is_last_stage(chunk) and torch.is_grad_enabled():
            self.passed_on.append(ref(hidden))
        return hidden


def _batch(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "y": y}


def _step(model: nn.Module):
    def step(data):
        prediction = model(data["x"])
        return {"loss": ((prediction - data["y"]) ** 2).mean(), "prediction": prediction.detach()}

    return step


def _twin(samples: int):
    model = Tower(ParallelMesh.single())
    result = _step(model)(_batch(samples))
    result["loss"].backward()
    return result, {name: p.grad for name, p in model.named_parameters()}


def _schedule_of(name: str, pp: int, vpp: int):
    base = name.removeprefix("halves of ")
    if base == name:
        return name
    return lambda number, forward_only: with_halves(
        build_schedule(base, pp, number, vpp, forward_only=forward_only)
    )


def _check_case(schedule: str, pp: int, vpp: int, microbatches: int, size: int) -> None:
    layout = ParallelLayout(size, pp=pp, vpp=vpp, shape=shape_of(schedule))
    mesh = ParallelMesh.create(layout)
    model = Tower(mesh)
    samples = 2 * microbatches - (1 if microbatches > 1 else 0)
    parts = split_batch(_batch(samples), 2)
    executor = PipelineExecutor(mesh, model, _schedule_of(schedule, pp, vpp))
    twin, grads = _twin(samples)

    def loss_of(result, number):
        return result["loss"] * parts[number].num_samples / samples

    for _ in range(2):
        model.zero_grad()
        results = executor.run(_step(model), parts, backward=True, loss_of=loss_of)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-12)
        assert len(results) == (len(parts) if mesh.has_loss else 0)
        if results:
            loss = sum(
                r["loss"] * p.num_samples / samples for r, p in zip(results, parts, strict=True)
            )
            torch.testing.assert_close(loss, twin["loss"], rtol=0, atol=1e-12)
    assert all(output() is None for output in model.passed_on), (
        "an output must be freed once it is sent"
    )
    assert (mesh.has_loss and vpp == 1) or model.passed_on
    for number in (microbatches, 1, 3):
        parts = split_batch(_batch(samples), -(-samples // number))
        with torch.no_grad():
            results = executor.run(_step(model), parts, backward=False)
        if results:
            torch.testing.assert_close(
                torch.cat([r["prediction"] for r in results]),
                twin["prediction"],
                rtol=0,
                atol=1e-12,
            )
    mesh.destroy()


def _check_wrong_steps(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=4))
    model = Tower(mesh)
    executor = PipelineExecutor(mesh, model)
    with pytest.raises(
        UnsupportedError,
        match="every step must call the pipelined model.*0 calls were made, 1 expected",
    ):
        executor.run(lambda data: data["x"].sum(), split_batch(_batch(4), 2), backward=False)
    mesh.destroy()


def _check_frozen_stages(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=4))
    model, parts = Tower(mesh), split_batch(_batch(4), 2)
    if mesh.pp.rank < 2:
        model.requires_grad_(False)
    executor = PipelineExecutor(mesh, model)
    executor.run(_step(model), parts, backward=True, loss_of=lambda result, _: result["loss"] / 2)
    _, grads = _twin(4)
    for name, parameter in model.named_parameters():
        if mesh.pp.rank < 2:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-12)
    mesh.destroy()


def _check_steps_of_other_shapes(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=4))
    model, parts = Tower(mesh), split_batch(_batch(4), 2)
    executor = PipelineExecutor(mesh, model)
    for rows in (2, 1):
        with torch.no_grad():
            results = executor.run(
                lambda data, rows=rows: model(data["x"][:rows]), parts, backward=False
            )
        assert all(len(result) == rows for result in results)
    mesh.destroy()


def _check_draws(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2, vpp=2))
    model, parts = Tower(mesh), split_batch(_batch(4), 2)
    executor, draws, ends = PipelineExecutor(mesh, model, "interleaved"), [], []

    def step(data):
        draws.append(torch.rand(()).item())
        ends.append(executor.runs_to_end)
        torch.rand(mesh.pp.rank)
        return model(data["x"])

    before = torch.get_rng_state()
    with torch.no_grad():
        executor.run(step, parts, backward=False, step=3)
    assert torch.equal(torch.get_rng_state(), before)
    draws_of_ranks = all_gather_objects(set(draws), mesh.world)
    assert len(draws_of_ranks[0]) == len(parts)
    assert all_gather_objects(set(draws), mesh.pp) == [set(draws)] * 2
    assert len(set().union(*draws_of_ranks)) == len(parts) * mesh.dp.size, (
        "data ranks draw other numbers"
    )
    assert sum(ends) == (len(parts) if mesh.pp.is_last else 0)
    mesh.destroy()


def _world(rank: int, size: int) -> int:
    for schedule, pp, vpp, microbatches in CASES:
        _check_case(schedule, pp, vpp, microbatches, size)
    _check_wrong_steps(size)
    _check_frozen_stages(size)
    _check_steps_of_other_shapes(size)
    _check_draws(size)
    return len(CASES)


def test_pipelines_equal_one_process():
    assert run_world(_world, 4) == [len(CASES)] * 4


def test_one_stage_runs_any_step_without_a_pipelined_module():
    model, batch = nn.Linear(WIDTH, 1).double(), _batch(6)
    executor = PipelineExecutor(ParallelMesh.single(), None)
    results = executor.run(
        lambda data: model(data["x"]).mean(),
        split_batch(batch, 2),
        backward=True,
        loss_of=lambda result, _: result / 3,
    )
    gradient = model.weight.grad.clone()
    model.zero_grad()
    model(batch["x"]).mean().backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert len(results) == 3
