"""The sum of losses whose gradients the forward pass computes, against torch and stored logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.embedding import VocabParallelHead
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.summed_loss import summed_cross_entropy
from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.test_chunked_loss import CUTS, FORMS, B, D, S, draw, stored
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal
from tests.sweeps import chosen
from tests.world import run_world

#: Gradients of the sums of three microbatches, such as a loss scale divided by their tokens.
SCALES = (1.0, -3.0, 0.125)
#: Forms of logits, smoothing of labels, and tokens of a chunk.
CASES = chosen(
    list(itertools.product(FORMS, (0.0, 0.1), (1, 7, 24, 100))),
    (FORMS[0], 0.1, 7),
    (FORMS[0], 0.0, 24),
    (FORMS[1], 0.0, 100),
    (FORMS[2], 0.1, 1),
)


def gradients_of(head: nn.Module, hidden: Tensor, sums: list[Tensor], slot: Tensor | None) -> Any:
    for factor, one in zip(SCALES, sums, strict=True):
        (one * factor).backward()
    found = head.weight.grad if slot is None else slot
    assert hidden.grad is not None
    result = torch.stack([one.detach() for one in sums]), hidden.grad, found.clone()
    hidden.grad = head.weight.grad = None
    return result


def compare(mesh: ParallelMesh, vocab_size: int, slot_scale: float | None, what: str) -> None:
    head = VocabParallelHead(vocab_size, D, mesh, multiple=8)
    initialize_(head, "cpu", seed=2)
    with torch.no_grad():
        head.weight.mul_(20.0)
        # Padding must never receive probability.
        full = vocab_size - mesh.tp.rank * len(head.weight)
        head.weight[max(full, 0) :] = 100.0
    calls: list[int] = []
    slot = None if slot_scale is None else torch.full_like(head.weight, torch.nan)
    seq = S // (mesh.tp.size if mesh.sequence_parallel else 1)
    seed = 10 + mesh.tp.rank if mesh.sequence_parallel else 10
    hidden = draw(seq, B, D, seed=seed).requires_grad_()
    labels = torch.randint(0, vocab_size, (S, B), generator=torch.Generator().manual_seed(1))
    labels[0, 0], labels[1, 0] = vocab_size - 1, 0
    labels[2:4] = -100
    batches = [labels, labels.flip(0), torch.full_like(labels, -100)]
    for form, smoothing, chunk in CASES:
        how = {"vocab_size": vocab_size, "label_smoothing": smoothing}
        # All forward passes run before the first backward pass, as in a pipeline.
        sums = [stored(hidden, head.weight, one, mesh, form, **how).sum() for one in batches]
        expected = gradients_of(head, hidden, sums, None)
        calls.clear()
        if slot is not None:
            told = GradientSlot(slot, lambda: calls.append(1), scale=slot_scale or 1.0)
            set_slot(head.weight, told)
        sums = [
            summed_cross_entropy(hidden, head.weight, one, mesh, chunk=chunk, form=form, **how)
            for one in batches
        ]
        found = gradients_of(head, hidden, sums, slot)
        set_slot(head.weight, None)
        assert len(calls) == (0 if slot is None else len(batches))
        expected = (*expected[:2], expected[2] * (slot_scale or 1.0))
        for name, one, other in zip(("loss", "hidden", "weight"), found, expected, strict=True):
            case = f"{what}, chunk {chunk}, smoothing {smoothing}, {form}: {name}"
            assert_equal(one, other, case, tolerance=1e-12)


def check_cuts(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in CUTS:
        layout = ParallelLayout(world_size=4, tp=tp)
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        # 9 leaves ranks without true columns.
        for vocab_size, slot_scale in ((9, None), (21, 1.0), (21, 0.5)):
            compare(mesh, vocab_size, slot_scale, f"tp={tp} sp={sequence_parallel} V={vocab_size}")
        mesh.destroy()


def test_sums_equal_those_of_stored_logits_under_every_cut() -> None:
    run_world(check_cuts, 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_equals_that_of_torch(smoothing: float) -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1).requires_grad_()
    labels = torch.randint(0, 40, (S, B), generator=torch.Generator().manual_seed(1))
    labels[::3] = -100
    mesh = ParallelMesh.single()
    total = summed_cross_entropy(hidden, weight, labels, mesh, 40, 5, smoothing)
    mean = total / (labels != -100).sum()
    expected = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), labels.flatten(), label_smoothing=smoothing
    )
    assert_equal(mean, expected, "mean", tolerance=1e-12)
    found = torch.autograd.grad(7.0 * mean, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(7.0 * mean, (hidden, weight))
    wanted = torch.autograd.grad(7.0 * expected, (hidden, weight))
    for one, second, other in zip(found, again, wanted, strict=True):
        assert_equal(one, other, "gradient", tolerance=1e-12)
        assert torch.equal(one, second), "a backward pass leaves what a second one needs"


def test_the_weight_half_of_a_backward_pass_gets_nothing() -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1).requires_grad_()
    labels = torch.zeros(S, B, dtype=torch.long)
    queue = WeightGradientQueue()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None, queue=queue)
    set_slot(weight, slot)
    total = summed_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 40, 5)
    with queue.open("half"):
        total.backward()
    found = slot.gradient.clone()
    queue.run("half")
    assert found.any()
    assert torch.equal(slot.gradient, found)


def test_only_the_gradients_stay_between_forward_and_backward() -> None:
    num_tokens, vocab_size, chunk = 64, 512, 16
    hidden = torch.randn(num_tokens, 1, D).requires_grad_()
    weight = torch.randn(vocab_size, D).requires_grad_()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None)
    set_slot(weight, slot)
    labels = torch.randint(0, vocab_size, (num_tokens, 1))
    how = labels, ParallelMesh.single(), vocab_size, chunk
    memory = LiveMemory()
    memory.leave_out([hidden, weight, slot.gradient, labels])
    with memory:
        total = summed_cross_entropy(hidden, weight, *how)
        kept = memory.now
        total.backward()
    gradients = weight.nbytes + hidden.nbytes
    assert gradients <= kept <= gradients + 64
    # Operators of torch need a second copy of the logits.
    logits = 4 * chunk * vocab_size
    assert memory.peak < gradients + 2.5 * logits
    with torch.no_grad(), LiveMemory() as unwatched:
        summed_cross_entropy(hidden, weight, *how)
    assert unwatched.peak < 2.5 * logits, "without gradients no memory is for them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_get_the_gradients_of_stored_logits(dtype: torch.dtype) -> None:
    hidden = torch.randn(S, B, D).to(dtype).requires_grad_()
    weight = torch.randn(40, D).to(dtype).requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    mesh = ParallelMesh.single()
    total = summed_cross_entropy(hidden, weight, labels, mesh, 40, 5)
    assert total.dtype == torch.float32
    found = torch.autograd.grad(total * 0.3, (hidden, weight))
    logits = F.linear(hidden.detach().double(), weight.detach().double())
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = F.linear(*wide).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected * 0.3, wide)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert_equal(one.double(), other, "gradient", tolerance=3e-2)


def test_gradients_of_float16_wait_for_the_loss_scale() -> None:
    hidden = torch.zeros(1, 1, D, dtype=torch.float16).requires_grad_()
    # The gradient of the input is 2e-8 without the loss scale, and no number of float16.
    weight = torch.full((8, D), 1e-6, dtype=torch.float16)
    weight[0] = 0.0
    labels = torch.ones(1, 1, dtype=torch.long)
    total = summed_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 8, 5)
    (total * 2.0**14).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().min() > 0


def test_autocast_gives_gradients_in_the_types_of_the_operands() -> None:
    hidden, weight = torch.randn(S, B, D).requires_grad_(), torch.randn(40, D).requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    found = []
    mesh = ParallelMesh.single()
    for run in ("stored", "summed"):
        with torch.autocast("cpu", torch.bfloat16):
            total = (
                stored(hidden, weight, labels, mesh, FORMS[0], vocab_size=40).sum()
                if run == "stored"
                else summed_cross_entropy(hidden, weight, labels, mesh, 40, 7)
            )
        found.append((total, *torch.autograd.grad(total, (hidden, weight))))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert_equal(one, other, "autocast", tolerance=2e-2)


def test_frozen_operands_get_no_gradient() -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1)
    labels = torch.zeros(S, B, dtype=torch.long)
    how = labels, ParallelMesh.single(), 40, 5
    summed_cross_entropy(hidden, weight, *how).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    summed_cross_entropy(hidden.detach(), weight.requires_grad_(), *how).backward()
    assert weight.grad is not None


def test_labels_outside_the_vocabulary_are_refused() -> None:
    labels = torch.tensor([[8]])
    with pytest.raises(IndexError, match=r"\[0, 8\): an id is 8"):
        summed_cross_entropy(
            torch.randn(1, 1, 4), torch.randn(16, 4), labels, ParallelMesh.single(), 8, 5
        )
