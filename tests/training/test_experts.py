"""Gradients of experts are summed over the ranks that hold the same experts, in every expert grid,
and match one process.
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


def draw(*seeds: object, shape: tuple[int, ...]) -> Tensor:
    """Draw the same values on every rank, which float32 holds exactly."""
    generator = torch.Generator().manual_seed(derive_seed(*map(str, seeds)))
    return torch.randn(shape, generator=generator).double()


def gradient_of(name: str, rank: int, step: int, mesh: ParallelMesh) -> Tensor:
    """Return what the tokens of a rank add to the full gradient of its loss."""
    if name.startswith("experts"):
        return draw(name, rank, step, shape=SHAPES[name])
    # Ranks of a tensor-parallel group share one loss, and have the same gradients of the parameters
    # that they hold in full.
    data_rank = mesh.layout.coordinates(rank)["dp"]
    return draw(name, "data", data_rank, step, shape=SHAPES[name])


def true_gradient(name: str, step: int, mesh: ParallelMesh) -> Tensor:
    """Return the gradient of the mean of the losses."""
    ranks = range(mesh.layout.world_size)
    if not name.startswith("experts"):
        ranks = [rank for rank in ranks if mesh.layout.coordinates(rank)["tp"] == 0]
    return sum(gradient_of(name, rank, step, mesh) for rank in ranks) / mesh.data.size


def parameters(mesh: ParallelMesh, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    named = {}
    for name, shape in SHAPES.items():
        full = draw(name, shape=shape)
        spec = replicated_spec(full, mesh.tp.rank)
        if name.startswith("experts"):
            spec = ShardSpec(
                shape, (even_range(shape[0], mesh.ep.size, mesh.ep.rank),), is_expert=True
            )
        named[name] = set_shard_spec(nn.Parameter(spec.shard(full).to(dtype)), spec)
    return named


def local_gradients(mesh: ParallelMesh, step: int) -> dict[str, Tensor]:
    """Return the gradients that a rank's backward pass leaves; those of its experts cover the tokens of
    all ranks of its expert-parallel group.
    """
    gradients = {}
    for name, parameter in parameters(mesh, torch.float64).items():
        if name.startswith("experts"):
            full = sum(gradient_of(name, rank, step, mesh) for rank in mesh.ep.ranks)
            gradients[name] = parameter.shard_spec.shard(full)  # type: ignore[attr-defined]
        else:
            gradients[name] = gradient_of(name, mesh.rank, step, mesh)
    return gradients


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1, weight_decay=0.1)


def errors_of_layout(
    mesh: ParallelMesh, division: DistributedOptimizerConfig, folder: str
) -> dict[str, float]:
    """Train, and return the largest differences from one process that holds all experts."""
    model_dtype = torch.float32 if division.main_dtype == torch.float64 else torch.float64
    run = Run(parameters(mesh, model_dtype), mesh, division, adamw)
    twins = {name: nn.Parameter(draw(name, shape=shape)) for name, shape in SHAPES.items()}
    twin_optimizer, errors = (
        adamw(twins.values()),
        {"norm": 0.0, "parameters": 0.0, "checkpoint": 0.0},
    )
    for step in range(STEPS):
        run.zero_grad()
        run.backward(
            {
                name: gradient.to(model_dtype)
                for name, gradient in local_gradients(mesh, step).items()
            }
        )
        run.finish()
        for name, twin in twins.items():
            twin.grad = true_gradient(name, step, mesh)
        expected = float(nn.utils.clip_grad_norm_(twins.values(), MAX_NORM))
        errors["norm"] = max(
            errors["norm"], abs(float(clip_by_norm_(run.main, MAX_NORM)) - expected)
        )
        errors["norm after"] = abs(float(grad_norm(run.main)) - MAX_NORM)
        run.step()
        twin_optimizer.step()
    for name, twin in twins.items():
        expected_shard = run.main.spec(name).shard(twin.detach()).to(model_dtype)
        errors["parameters"] = max(
            errors["parameters"], float((run.main.parameter(name) - expected_shard).abs().max())
        )
    entries = {
        name: Entry(main_slice.main, main_slice.placement, main_slice.is_exclusive)
        for name, main_slice in run.main.slices.items()
    }
    writer = CheckpointWriter(mesh)
    writer.save(folder, entries, {}, {})
    writer.close()
    for name, saved in read_full(folder).items():
        errors["checkpoint"] = max(errors["checkpoint"], float((saved - twins[name]).abs().max()))
    return errors


def unused_experts(mesh: ParallelMesh) -> dict[str, Any]:
    """Return which slices have gradients if experts get no tokens on one rank, or on all ranks that
    hold them.
    """
    run = Run(parameters(mesh, torch.float64), mesh)
    gradients = local_gradients(mesh, 0)
    if mesh.ep.rank == 1:
        del gradients["experts.up"]
    if mesh.rank == 0:
        del gradients["experts.down"]
    run.backward(gradients)
    run.finish()
    return {name: main_slice.main.grad is not None for name, main_slice in run.main.slices.items()}


def _train_in_every_layout(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    outcomes: dict[str, Any] = {}
    for layout_name, sizes in LAYOUTS.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes))
        for name, division in DIVISIONS.items():
            checkpoint = f"{folder}/{layout_name} {name}".replace(" ", "_")
            outcomes[f"{layout_name}, {name}"] = errors_of_layout(mesh, division, checkpoint)
        if layout_name == "ep2 edp2":
            outcomes["unused"] = unused_experts(mesh)
        mesh.destroy()
    return outcomes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_train_in_every_layout, 4, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_training_steps_match_one_process(
    results: list[dict[str, Any]], layout: str, division: str
) -> None:
    for rank, outcomes in enumerate(results):
        for quantity, error in outcomes[f"{layout}, {division}"].items():
            # Mixed: gradients and the model's parameters are rounded to float32.
            limit = 1e-5 if division == "mixed" else 1e-10
            # The norm after clipping is as far below the limit as torch's own.
            assert error < (1e-5 if quantity == "norm after" else limit), (
                f"rank {rank}: {quantity} differs by {error}"
            )


def test_experts_without_tokens_do_not_hang_and_get_no_gradient(
    results: list[dict[str, Any]],
) -> None:
    for rank, outcomes in enumerate(results):
        has_gradient = outcomes["unused"]
        # Ranks 1 and 3 hold the experts of ep rank 1, and neither has a gradient of `up`.
        assert has_gradient.get("experts.up", rank not in (1, 3)) == (rank not in (1, 3))
        assert has_gradient.get("experts.down", True)
        assert has_gradient.get("dense", True)


def order_of_starts(mesh: ParallelMesh) -> list[tuple[str, ...]]:
    """Return the buckets that start before the gradient of the parameter used first arrives."""
    order = ("table", "experts.0", "dense", "experts.1")
    named = {name: nn.Parameter(torch.ones(16, 8, dtype=torch.float64)) for name in order}
    for name, parameter in named.items():
        spec = replicated_spec(parameter, mesh.tp.rank)
        set_shard_spec(parameter, replace(spec, is_expert=name.startswith("experts")))
    run = Run(named, mesh, DistributedOptimizerConfig(bucket_size=128))
    started: list[tuple[str, ...]] = []
    started_before_last: list[tuple[str, ...]] = []
    start = GradientBucket.start

    def record_start(bucket: GradientBucket, *args: Any) -> None:
        started.append(bucket.names)
        start(bucket, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucket, "start", record_start)
        for _ in range(2):
            run.zero_grad()
            started.clear()
            run.reducer.begin_last_backward(0)
            for name in reversed(order):
                started_before_last = list(started)
                (run.main.parameter(name) * 2.0).sum().backward()
            run.reducer.start_reduction(0)
            run.finish()
    return started_before_last


def _order_on_rank(rank: int, size: int) -> list[tuple[str, ...]]:
    return order_of_starts(ParallelMesh.create(ParallelLayout(size)))


def test_expert_buckets_do_not_wait_for_buckets_of_parameters_used_earlier() -> None:
    for started in run_world(_order_on_rank, 2):
        assert started == [("experts.1",), ("dense",), ("experts.0",)]
