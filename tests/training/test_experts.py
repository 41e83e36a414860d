"""Gradients of experts are summed over the ranks that hold the same ones, in every expert grid, as
on one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import CheckpointWriter, Entry, read_full
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import derive_seed
from lightning_megatron.groups.shard_spec import ShardSpec, replicated_spec, set_shard_spec
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import even_range
from lightning_megatron.training import DistributedOptimizerConfig, clip_by_norm_, grad_norm
from lightning_megatron.training.gradient_bucket import GradientBucket
from tests.training.runs import Run
from tests.world import run_world

LAYOUTS = {
    "ep4": {"ep": 4},
    "ep2 edp2": {"ep": 2},
    "ep2 edp2 inside tp2 dp2": {"tp": 2, "ep": 2, "etp": 1},
    "edp4 inside tp2 dp2": {"tp": 2, "etp": 1},
    "ep4 inside tp4": {"tp": 4, "ep": 4, "etp": 1},
}
DIVISIONS = {
    "elements": DistributedOptimizerConfig(),
    "small buckets": DistributedOptimizerConfig(bucket_size=20),
    "zero 0": DistributedOptimizerConfig(zero=0),
    "parameters": DistributedOptimizerConfig(slices="parameters"),
    "mixed": DistributedOptimizerConfig(main_dtype=torch.float64),
}
SHAPES = {"dense": (7, 5), "experts.up": (4, 6, 3), "norm": (5,), "experts.down": (4, 3, 6)}
STEPS, MAX_NORM = 3, 0.5


def draw(*what: object, shape: tuple[int, ...]) -> Tensor:
    """Draw the same values on every rank, such that float32 holds them."""
    generator = torch.Generator().manual_seed(derive_seed(*map(str, what)))
    return torch.randn(shape, generator=generator).double()


def gradient_of(name: str, rank: int, step: int, mesh: ParallelMesh) -> Tensor:
    """Return what a rank's own tokens add to the full gradient of its loss."""
    if name.startswith("experts"):
        return draw(name, rank, step, shape=SHAPES[name])
    # Ranks of one tensor-parallel group have one loss together, and the same gradients of what they
    # hold whole.
    data_rank = mesh.layout.coordinates(rank)["dp"]
    return draw(name, "data", data_rank, step, shape=SHAPES[name])


def true_gradient(name: str, step: int, mesh: ParallelMesh) -> Tensor:
    """Return the gradient of the mean of the losses."""
    ranks = range(mesh.layout.world_size)
    if not name.startswith("experts"):
        ranks = [rank for rank in ranks if mesh.layout.coordinates(rank)["tp"] == 0]
    return sum(gradient_of(name, rank, step, mesh) for rank in ranks) / mesh.data.size


def parameters(mesh: ParallelMesh, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    found = {}
    for name, shape in SHAPES.items():
        full = draw(name, shape=shape)
        spec = replicated_spec(full, mesh.tp.rank)
        if name.startswith("experts"):
            spec = ShardSpec(
                shape, (even_range(shape[0], mesh.ep.size, mesh.ep.rank),), is_expert=True
            )
        found[name] = set_shard_spec(nn.Parameter(spec.shard(full).to(dtype)), spec)
    return found


def local_gradients(mesh: ParallelMesh, step: int) -> dict[str, Tensor]:
    """Return what a rank's backward pass leaves: of its experts, for the tokens of all ranks that
    send theirs.
    """
    found = {}
    for name, parameter in parameters(mesh, torch.float64).items():
        if name.startswith("experts"):
            full = sum(gradient_of(name, rank, step, mesh) for rank in mesh.ep.ranks)
            found[name] = parameter.shard_spec.shard(full)  # type: ignore[attr-defined]
        else:
            found[name] = gradient_of(name, mesh.rank, step, mesh)
    return found


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1, weight_decay=0.1)


def errors_of_layout(
    mesh: ParallelMesh, division: DistributedOptimizerConfig, folder: str
) -> dict[str, float]:
    """Train, and return how far everything is from one process that holds all experts."""
    half = torch.float32 if division.main_dtype == torch.float64 else torch.float64
    run = Run(parameters(mesh, half), mesh, division, adamw)
    twins = {name: nn.Parameter(draw(name, shape=shape)) for name, shape in SHAPES.items()}
    twin_optimizer, found = (
        adamw(twins.values()),
        {"norm": 0.0, "parameters": 0.0, "checkpoint": 0.0},
    )
    for step in range(STEPS):
        run.zero_grad()
        run.backward(
            {name: gradient.to(half) for name, gradient in local_gradients(mesh, step).items()}
        )
        run.finish()
        for name, twin in twins.items():
            twin.grad = true_gradient(name, step, mesh)
        expected = float(nn.utils.clip_grad_norm_(twins.values(), MAX_NORM))
        found["norm"] = max(found["norm"], abs(float(clip_by_norm_(run.main, MAX_NORM)) - expected))
        found["norm after"] = abs(float(grad_norm(run.main)) - MAX_NORM)
        run.step()
        twin_optimizer.step()
    for name, twin in twins.items():
        want = run.main.spec(name).shard(twin.detach()).to(half)
        found["parameters"] = max(
            found["parameters"], float((run.main.parameter(name) - want).abs().max())
        )
    entries = {
        name: Entry(one.main, one.placement, one.is_exclusive)
        for name, one in run.main.slices.items()
    }
    writer = CheckpointWriter(mesh)
    writer.save(folder, entries, {}, {})
    writer.close()
    for name, saved in read_full(folder).items():
        found["checkpoint"] = max(found["checkpoint"], float((saved - twins[name]).abs().max()))
    return found


def unused_experts(mesh: ParallelMesh) -> dict[str, Any]:
    """Leave out gradients of experts that no token was sent to: on one rank, or on all that hold
    them.
    """
    run = Run(parameters(mesh, torch.float64), mesh)
    gradients = local_gradients(mesh, 0)
    if mesh.ep.rank == 1:
        del gradients["experts.up"]
    if mesh.rank == 0:
        del gradients["experts.down"]
    run.backward(gradients)
    run.finish()
    return {name: one.main.grad is not None for name, one in run.main.slices.items()}


def world(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for layout_name, sizes in LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        for name, division in DIVISIONS.items():
            place = f"{folder}/{layout_name} {name}".replace(" ", "_")
            found[f"{layout_name}, {name}"] = errors_of_layout(mesh, division, place)
        if layout_name == "ep2 edp2":
            found["unused"] = unused_experts(mesh)
        mesh.destroy()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(world, 4, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_those_of_one_process(
    results: list[dict[str, Any]], layout: str, division: str
) -> None:
    for rank, found in enumerate(results):
        for what, error in found[f"{layout}, {division}"].items():
            # Mixed: gradients and the model's parameters are rounded to float32.
            limit = 1e-5 if division == "mixed" else 1e-10
            # The norm after clipping is as far below the limit as torch's own.
            assert error < (1e-5 if what == "norm after" else limit), (
                f"rank {rank}: {what} differs by {error}"
            )


def test_experts_without_tokens_do_not_hang_and_are_left_alone(
    results: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(results):
        has = found["unused"]
        # ep rank 1 is on ranks 1 and 3: nobody who holds its experts has a gradient of `up`.
        assert has.get("experts.up", rank not in (1, 3)) == (rank not in (1, 3))
        assert has.get("experts.down", True)
        assert has.get("dense", True)


def order_of_starts(mesh: ParallelMesh) -> list[tuple[str, ...]]:
    """Return the buckets that start before the gradient of the parameter used first arrives."""
    order = ("table", "experts.0", "dense", "experts.1")
    named = {name: nn.Parameter(torch.ones(16, 8, dtype=torch.float64)) for name in order}
    for name, parameter in named.items():
        spec = replicated_spec(parameter, mesh.tp.rank)
        set_shard_spec(parameter, replace(spec, is_expert=name.startswith("experts")))
    run = Run(named, mesh, DistributedOptimizerConfig(bucket_size=128))
    started: list[tuple[str, ...]] = []
    seen: list[tuple[str, ...]] = []
    start = GradientBucket.start

    def noted(bucket: GradientBucket, *args: Any) -> None:
        started.append(bucket.names)
        start(bucket, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucket, "start", noted)
        for _ in range(2):
            run.zero_grad()
            started.clear()
            run.reducer.begin_last_backward(0)
            for name in reversed(order):
                seen = list(started)
                (run.main.parameter(name) * 2.0).sum().backward()
            run.reducer.start_reduction(0)
            run.finish()
    return seen


def _order(rank: int, size: int) -> list[tuple[str, ...]]:
    return order_of_starts(ParallelMesh.create(ParallelLayout(size)))


def test_buckets_of_experts_do_not_wait_for_those_of_parameters_used_earlier() -> None:
    for seen in run_world(_order, 2):
        assert seen == [("experts.1",), ("dense",), ("experts.0",)]
