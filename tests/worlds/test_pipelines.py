"""A pipeline has the losses, outputs and gradients of one process with every schedule and size, in
full backward passes and in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.pipeline import action_times
from lightning_megatron.pipeline.action_times import ActionTimes, gather_measurements
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch, split_batch
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.partition import LayerCosts, partition_of
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.schedule import (
    NAMED_SCHEDULES,
    SCHEDULE_NAMES,
    ScheduleName,
    build_schedule,
)
from tests.optimizer.runs import Run
from tests.oracles import assert_equal
from tests.pipeline.test_action_times import MILLISECONDS, Clock
from tests.pipeline.test_halves import with_halves
from tests.sweeps import chosen
from tests.world import run_world

WIDTH, LAYERS = 4, 8
#: Schedule, stages, chunks and microbatches.
TOWERS: list[tuple[str, int, int, int]] = [
    ("1f1b", 4, 1, 1), ("1f1b", 2, 1, 4), ("gpipe", 4, 1, 5), ("interleaved", 2, 4, 6),
    ("interleaved", 4, 2, 8), ("zb-h1", 4, 1, 6), ("zb-v", 2, 2, 5),
    ("zb-v", 4, 2, 9), ("dualpipe-v", 4, 2, 8), ("halves of interleaved", 4, 2, 8),
]  # fmt: skip


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator)
        self.weight = nn.Parameter(weight / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Tower(PipelinedModule):
    """A stack of layers, complete or divided among stages."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        partition = partition_of(LayerCosts.equal(LAYERS), mesh.layout)
        self.chunks = partition.by_stage(mesh.layout.placement)[mesh.pp.rank]
        self.layers = nn.ModuleDict({str(i): Layer(i) for chunk in self.chunks for i in chunk})
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


def batch_of(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "y": y}


def step_of(model: nn.Module) -> Callable[[Any], Any]:
    def step(data: Any) -> Any:
        prediction = model(data["x"])
        return {"loss": ((prediction - data["y"]) ** 2).mean(), "prediction": prediction.detach()}

    return step


@cache
def tower_twin(samples: int) -> tuple[Any, dict[str, Tensor | None]]:
    model = Tower(ParallelMesh.single())
    result = step_of(model)(batch_of(samples))
    result["loss"].backward()
    return result, {name: p.grad for name, p in model.named_parameters()}


def check_gradients(model: Tower, samples: int) -> None:
    for name, parameter in model.named_parameters():
        expected = tower_twin(samples)[1][name]
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-12)


def check_tower(schedule: str, pp: int, vpp: int, microbatches: int, size: int) -> None:
    base = schedule.removeprefix("halves of ")
    mesh = ParallelMesh.create(
        ParallelLayout(size, pp=pp, vpp=vpp, shape=NAMED_SCHEDULES[base].shape)
    )
    model = Tower(mesh)
    samples = 2 * microbatches - (1 if microbatches > 1 else 0)
    parts = split_batch(batch_of(samples), 2)

    def halves(number: int, forward_only: bool) -> Any:
        build: Any = build_schedule
        return with_halves(build(base, pp, number, vpp, forward_only=forward_only))

    rows: Any = schedule if base == schedule else halves
    executor = PipelineExecutor(mesh, model, rows)
    twin, _ = tower_twin(samples)

    def loss_of(result: Any, number: int) -> Tensor:
        return result["loss"] * parts[number].num_samples / samples

    for _ in range(2):
        model.zero_grad()
        results = executor.run(step_of(model), parts, BackwardPasses(loss_of))
        check_gradients(model, samples)
        assert len(results) == (len(parts) if mesh.has_loss else 0)
        if results:
            losses = [loss_of(result, number) for number, result in enumerate(results)]
            torch.testing.assert_close(torch.stack(losses).sum(), twin["loss"], rtol=0, atol=1e-12)
    assert all(output() is None for output in model.passed_on), (
        "outputs are freed when they are sent"
    )
    assert (mesh.has_loss and vpp == 1) or model.passed_on
    for number in (microbatches, 1, 3):
        parts = split_batch(batch_of(samples), -(-samples // number))
        with torch.no_grad():
            results = executor.run(step_of(model), parts)
        if results:
            predictions = torch.cat([result["prediction"] for result in results])
            torch.testing.assert_close(predictions, twin["prediction"], rtol=0, atol=1e-12)
    mesh.destroy()


def check_numbers_of_calls(size: int) -> None:
    """A step without a call is refused, and one that calls less often than its probes, whose other
    values would be left out.
    """
    mesh = ParallelMesh.create(ParallelLayout(size, pp=4))
    model, parts = Tower(mesh), split_batch(batch_of(4), None)
    executor = PipelineExecutor(mesh, model)
    with pytest.raises(UnsupportedError, match="0 calls were made, 1 expected"):
        executor.run(lambda data: data["x"].sum(), parts)
    calls = []

    def step(data: Any) -> Tensor:
        calls.append(data)
        first = model(data["x"])
        # Only the last stage, which sends nothing, forgets its second call after two probes.
        is_forgotten = mesh.pp.is_last and len(calls) > 2
        return first if is_forgotten else first + model(data["y"])

    with torch.no_grad():
        if mesh.pp.is_last:
            with pytest.raises(UnsupportedError, match="1 calls were made, 2 expected"):
                executor.run(step, parts)
        else:
            executor.run(step, parts)
    mesh.destroy()


def check_draws(size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2, vpp=2))
    model, parts = Tower(mesh), split_batch(batch_of(4), 2)
    executor = PipelineExecutor(mesh, model, "interleaved")
    draws: list[float] = []
    ends: list[bool] = []

    def step(data: Any) -> Tensor:
        draws.append(torch.rand(()).item())
        ends.append(executor.runs_to_end)
        torch.rand(mesh.pp.rank)
        return model(data["x"])

    before = torch.get_rng_state()
    with torch.no_grad():
        executor.run(step, parts, step=3)
    assert torch.equal(torch.get_rng_state(), before)
    of_ranks = all_gather_objects(set(draws), mesh.world)
    assert len(of_ranks[0]) == len(parts)
    assert all_gather_objects(set(draws), mesh.pp) == [set(draws)] * 2
    assert len(set().union(*of_ranks)) == len(parts) * mesh.dp.size, "data ranks draw other numbers"
    assert sum(ends) == (len(parts) if mesh.pp.is_last else 0)
    mesh.destroy()


# ---- a GPT with microbatches of different lengths and some frozen parameters


#: Length of the sequences of each microbatch.
LENGTHS = (8, 5, 6, 8, 7, 4, 3, 6)
#: Frozen layers: all layers of a stage, and one of another stage.
FROZEN = ("layers.2.", "layers.3.", "layers.4.", "layers.5.", "layers.7.mlp.")
EIGHT: dict[str, Any] = {
    "vocab_size": 50, "max_seq_length": 8, "num_layers": 8, "hidden_size": 16, "num_heads": 2,
    "num_kv_heads": 2, "ffn_hidden_size": 24,
}  # fmt: skip
MODELS = {
    "tied": GPTConfig.llama(**EIGHT, tie_embeddings=True),
    "experts": GPTConfig.llama(
        **EIGHT, experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    ),
}
#: Schedule, stages, model, and whether layers are frozen: by default one case of every second schedule.
ALL_NAMED = [
    (*case, number % 3 == 0) for number, case in enumerate(product(SCHEDULE_NAMES, (2, 4), MODELS))
]
NAMED = chosen(
    ALL_NAMED, *(ALL_NAMED[4 * number + number % 4] for number in range(0, len(SCHEDULE_NAMES), 2))
)


def build_model(kind: str, mesh: ParallelMesh, freezes: bool) -> GPT:
    model = GPT(MODELS[kind], mesh, seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (freezes and name.startswith(FROZEN)))
    return model


def gpt_step(model: GPT, data: dict[str, Tensor]) -> Tensor:
    return model(data["tokens"][:, :-1], data["tokens"][:, 1:]).mean()


def check_named(name: ScheduleName, pp: int, kind: str, freezes: bool, size: int) -> None:
    label = f"{name}, pp {pp}, {kind}, {'some' if freezes else 'none'} frozen"
    generator = torch.Generator().manual_seed(5)
    parts = [
        Microbatch({"tokens": torch.randint(0, 50, (2, length + 1), generator=generator)}, 2)
        for length in LENGTHS
    ]
    plain = build_model(kind, ParallelMesh.single(), freezes)
    expected = [gpt_step(plain, part.data) for part in parts]
    torch.stack(expected).mean().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    vpp = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
    mesh = ParallelMesh.create(
        ParallelLayout(size, pp=pp, vpp=vpp, shape=NAMED_SCHEDULES[name].shape)
    )
    model = build_model(kind, mesh, freezes)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    # The parameters of a stage may all be frozen.
    make: Any = lambda parameters: torch.optim.SGD([{"params": list(parameters)}], lr=0.1)  # noqa: E731
    run = Run(trained, mesh, make=make)
    executor = PipelineExecutor(mesh, model, name)
    queue = run.reducer.weight_gradients
    backward = BackwardPasses(lambda loss, _: loss / len(LENGTHS), weight_gradients=queue)
    losses = executor.run(partial(gpt_step, model), parts, backward)
    for loss, twin in zip(losses, expected if mesh.has_loss else (), strict=True):
        assert_equal(loss, twin, f"{label}: loss", 1e-12)
    actual = run.reducer.unreduced_gradients(set(run.main.trained))
    assert actual.keys() == set(run.main.trained), label
    for key, gradient in actual.items():
        twin_key = key
        if kind == "tied" and key in (WORD_EMBEDDING, "head.weight"):
            # Copies of a tied weight have parts of its gradient. In a V, there is a single weight.
            assert (mesh.embedding.size == 2) == (NAMED_SCHEDULES[name].shape == "loop"), label
            all_reduce_(gradient, mesh.embedding)
            twin_key = WORD_EMBEDDING
        assert_equal(gradient, gradients[twin_key], f"{label}: {key}", 1e-12)
    with torch.no_grad():
        validated = executor.run(partial(gpt_step, model), parts[:3])
    for loss, twin in zip(validated, expected[:3] if mesh.has_loss else (), strict=True):
        assert_equal(loss, twin, f"{label}: validation", 1e-12)
    mesh.destroy()


# ---- times of actions


def check_times(size: int) -> None:
    """All ranks get the times of all virtual stages."""
    clock: Any = Clock()
    action_times.time = clock
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2, vpp=2), device="cpu")
    times, place, rank = ActionTimes(mesh.device), Placement("loop", 2, 2), mesh.rank
    for chunk in range(2):
        clock.work(times, chunk, slower=10 * (2 * chunk + mesh.pp.rank))
    found = gather_measurements(times.medians(2), mesh, place, 10 + rank, 0.002 * rank)
    assert found.free == 10, "the fullest rank counts"
    assert found.costs.transfer == 6000, "the slowest rank counts"
    kinds = (found.costs.forward, found.costs.input_half, found.costs.weight_half)
    for costs, duration in zip(kinds, MILLISECONDS.values(), strict=True):
        assert costs == tuple(1000 * (duration + 10 * virtual) for virtual in range(4))
    mesh.destroy()


def run_four(rank: int, size: int) -> None:
    for case in TOWERS:
        check_tower(*case, size)
    check_numbers_of_calls(size)
    check_draws(size)
    check_times(size)
    torch.set_default_dtype(torch.float64)
    for named in NAMED:
        check_named(*named, size)


def test_pipelines_of_four_processes_equal_one_process() -> None:
    run_world(run_four, 4)
