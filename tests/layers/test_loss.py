"""Vocabulary-parallel cross entropy equals cross entropy of torch on gathered logits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal
from tests.world import run_world

SHAPE = (6, 3)


def check_case(
    mesh: ParallelMesh, vocab_size: int, smoothing: float, labels: torch.Tensor, padding: float
) -> None:
    case_name = f"tp={mesh.tp.size} vocabulary={vocab_size} smoothing={smoothing}"
    padded_size = -(-vocab_size // (8 * mesh.tp.size)) * 8 * mesh.tp.size
    generator = torch.Generator().manual_seed(vocab_size)
    full = 5 * torch.randn(*SHAPE, vocab_size, generator=generator)
    full = full.requires_grad_()
    weight = torch.rand(SHAPE, generator=generator)
    expected = F.cross_entropy(
        full.flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=smoothing,
        ignore_index=-1,
    ).view(SHAPE)
    (expected * weight).sum().backward()

    padded_logits = F.pad(full.detach(), (0, padded_size - vocab_size), value=padding)
    shard = padded_logits.chunk(mesh.tp.size, -1)[mesh.tp.rank].clone().requires_grad_()
    before = shard.detach().clone()
    losses = vocab_parallel_cross_entropy(
        shard, labels, mesh, vocab_size, smoothing, ignore_index=-1
    )
    (losses * weight).sum().backward()
    assert torch.equal(shard.detach(), before), f"{case_name}: the input was modified"
    assert_equal(losses, expected, f"{case_name}: loss")
    gradient = F.pad(full.grad, (0, padded_size - vocab_size)).chunk(mesh.tp.size, -1)[mesh.tp.rank]
    assert_equal(shard.grad, gradient, f"{case_name}: gradient")


def check_losses(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp in (1, 2, 4):
        mesh = ParallelMesh.create(ParallelLayout(world_size=4, tp=tp))
        # With 9 and 17 columns some ranks have few true columns or none; large padding must never
        # receive probability.
        for vocab_size, smoothing, padding in itertools.product(
            (9, 17, 32), (0.0, 0.1), (0.0, 1e3)
        ):
            labels = torch.randint(0, vocab_size, SHAPE, generator=torch.Generator().manual_seed(1))
            labels[0, 0], labels[1, 0] = vocab_size - 1, 0
            check_case(mesh, vocab_size, smoothing, labels, padding)
            labels[2:4] = -1
            check_case(mesh, vocab_size, smoothing, labels, padding)
            check_case(mesh, vocab_size, smoothing, torch.full(SHAPE, -1), padding)
        mesh.destroy()


def test_losses_and_gradients_equal_torch_for_every_tp() -> None:
    run_world(check_losses, 4)


def test_losses_of_bfloat16_logits_are_float32_with_bfloat16_gradients() -> None:
    logits = (3 * torch.randn(4, 2, 16)).bfloat16().requires_grad_()
    labels = torch.randint(0, 16, (4, 2))
    losses = vocab_parallel_cross_entropy(logits, labels, ParallelMesh.single(), 16)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    expected = F.cross_entropy(
        logits.detach().float().flatten(0, 1), labels.flatten(), reduction="none"
    ).view(4, 2)
    assert_equal(losses, expected, "loss", tolerance=1e-6)


def test_losses_are_finite_beside_a_logit_of_minus_infinity() -> None:
    logits = torch.randn(1, 1, 8)
    logits[..., 0] = -torch.inf
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([[3]]), ParallelMesh.single(), 8)
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("label", [8, -2])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    with pytest.raises(IndexError, match=rf"\[0, 8\): an id is {label}"):
        vocab_parallel_cross_entropy(
            torch.randn(1, 1, 16), torch.tensor([[label]]), ParallelMesh.single(), 8
        )
