"""Dropout masks are those of one process in every layout, and recomputation repeats them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

SIZES = {"vocab_size": 40, "max_seq_length": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 4}
DROPPING = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
CONFIGS = [
    GPTConfig.gpt2(**SIZES, **DROPPING),
    GPTConfig.llama(**SIZES, **DROPPING, norm_position="post"),
]


def draw_mask(mesh: ParallelMesh) -> Tensor:
    """Drop elements of the residual stream, and return which were dropped in whole rows."""
    shares = mesh.tp.size if mesh.sequence_parallel else 1
    dropped = hidden_dropout(torch.ones(8 // shares, 2, 33), 0.5, True, mesh) == 0
    return torch.cat(all_gather_objects(dropped, mesh.tp)[:shares])


def draw_attention_mask(mesh: ParallelMesh) -> Tensor:
    """Drop attention weights of a layer whose heads compute the same, and return where weights of
    all heads were dropped.
    """
    model = GPT(GPTConfig.gpt2(**SIZES, attention_dropout=0.5), mesh, seed=1)
    core = model.layers["0"].attention._core
    value = torch.eye(8).view(8, 1, 1, 8).expand(8, 2, 4 // mesh.tp.size, 8)
    dropped = core(torch.zeros_like(value), torch.zeros_like(value), value) == 0
    return torch.cat(all_gather_objects(dropped, mesh.tp), -1)


def draw_masks(mesh: ParallelMesh) -> list[Tensor]:
    mesh.random.begin_microbatch(3, 1, (4, 1, 2))
    mesh.random.seek(2)
    return [draw_mask(mesh), draw_mask(mesh), draw_attention_mask(mesh)]


def check_masks(mesh: ParallelMesh) -> None:
    before = torch.get_rng_state()
    first, second, weights = draw_masks(mesh)
    assert not torch.equal(first, second), "a layer's draws follow one another"
    assert torch.equal(torch.get_rng_state(), before), "default generators are left alone"
    for actual, expected in zip(
        (first, second, weights), draw_masks(ParallelMesh.single(seed=4)), strict=True
    ):
        assert torch.equal(actual, expected), "masks are those of one process"
    heads = weights.unflatten(-1, (4, 8)).unbind(-2)
    assert not torch.equal(heads[0], heads[3]), "heads drop different weights"


def train(mesh: ParallelMesh, config: GPTConfig, recompute: str) -> list[Tensor]:
    """Run two microbatches forward, then both backward, and return losses and gradients."""
    model = GPT(config, mesh, seed=1)
    model.recompute = recompute
    tokens = torch.randint(0, 40, (2, 2, 8), generator=torch.Generator().manual_seed(2))
    losses = []
    for number in range(2):
        mesh.random.begin_microbatch(5, number)
        losses.append(model(tokens[number], tokens[number]).mean())
    for loss in losses:
        loss.backward()
    assert losses[0] != losses[1]
    return [loss.detach() for loss in losses] + [p.grad for p in model.parameters()]


def check_replay(mesh: ParallelMesh) -> None:
    for config in CONFIGS:
        expected_tensors = train(mesh, config, "none")
        for recompute in ("selective", "full"):
            for actual, expected in zip(
                train(mesh, config, recompute), expected_tensors, strict=True
            ):
                assert torch.equal(actual, expected), f"{recompute} sp={mesh.sequence_parallel}"


def check_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for sequence_parallel in (False, True):
        mesh = ParallelMesh.create(
            ParallelLayout(world_size=2, tp=2), seed=4, sequence_parallel=sequence_parallel
        )
        check_masks(mesh)
        check_replay(mesh)
        mesh.destroy()


def test_masks_of_tp_are_those_of_one_process_and_repeated_by_recomputation() -> None:
    run_world(check_all, 2)


def test_recomputation_repeats_masks_in_one_process() -> None:
    check_replay(ParallelMesh.single(seed=4))


def test_evaluation_and_zero_dropout_draw_no_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = ParallelMesh.single()
    monkeypatch.setattr(mesh.random, "fork", lambda name: pytest.fail(f"stream {name} was opened"))
    monkeypatch.setattr(mesh.random, "mask_key", lambda *draw: pytest.fail(f"{draw} was drawn"))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    GPT(CONFIGS[0], mesh, seed=1).eval()(tokens)
    GPT(GPTConfig.gpt2(**SIZES), mesh, seed=1).train()(tokens)


def test_every_call_of_a_model_without_a_strategy_draws_new_masks() -> None:
    model = GPT(CONFIGS[0], seed=1)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_recomputation_restores_the_position_of_the_streams() -> None:
    mesh = ParallelMesh.single()
    mesh.random.begin_microbatch(1, 1)
    x = torch.ones(4, 1, 4, requires_grad=True)
    y = replayed(lambda t: hidden_dropout(t, 0.5, True, mesh) * t, mesh.random, 0, x)
    mesh.random.begin_microbatch(1, 2)
    position = mesh.random.position
    y.sum().backward()
    assert mesh.random.position == position


def test_full_recomputation_saves_fewest_activations() -> None:
    num_saved = {
        recompute: count_saved_elements(recompute) for recompute in ("none", "selective", "full")
    }
    assert num_saved["full"] < num_saved["selective"] <= num_saved["none"]


def count_saved_elements(recompute: str) -> int:
    model = GPT(CONFIGS[0], seed=1)
    model.recompute = recompute
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 8, dtype=torch.long))
    return total
