"""Summed loss, whose gradients the forward pass computes, equals torch and stored logits."""

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
from tests.layers.test_chunked_loss import (
    FORMS,
    LAYOUTS,
    B,
    D,
    S,
    cross_entropy_of_stored_logits,
    draw,
)
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal
from tests.sweeps import chosen
from tests.world import run_world

#: Factors of the summed losses of three microbatches, such as a loss scale over a number of tokens.
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
    for factor, total in zip(SCALES, sums, strict=True):
        (total * factor).backward()
    gradient = head.weight.grad if slot is None else slot
    assert hidden.grad is not None
    result = torch.stack([total.detach() for total in sums]), hidden.grad, gradient.clone()
    hidden.grad = head.weight.grad = None
    return result


def compare(
    mesh: ParallelMesh, vocab_size: int, slot_scale: float | None, layout_name: str
) -> None:
    head = VocabParallelHead(vocab_size, D, mesh, multiple=8)
    initialize_(head, "cpu", seed=2)
    with torch.no_grad():
        head.weight.mul_(20.0)
        # Padding must never receive probability.
        num_true_rows = vocab_size - mesh.tp.rank * len(head.weight)
        head.weight[max(num_true_rows, 0) :] = 100.0
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
        options = {"vocab_size": vocab_size, "label_smoothing": smoothing}
        # All forward passes run before the first backward pass, as in a pipeline.
        sums = [
            cross_entropy_of_stored_logits(hidden, head.weight, batch, mesh, form, **options).sum()
            for batch in batches
        ]
        expected_results = gradients_of(head, hidden, sums, None)
        calls.clear()
        if slot is not None:
            scaled_slot = GradientSlot(slot, lambda: calls.append(1), scale=slot_scale or 1.0)
            set_slot(head.weight, scaled_slot)
        sums = [
            summed_cross_entropy(
                hidden, head.weight, batch, mesh, chunk=chunk, form=form, **options
            )
            for batch in batches
        ]
        actual_results = gradients_of(head, hidden, sums, slot)
        set_slot(head.weight, None)
        assert len(calls) == (0 if slot is None else len(batches))
        expected_results = (*expected_results[:2], expected_results[2] * (slot_scale or 1.0))
        for name, actual, expected in zip(
            ("loss", "hidden", "weight"), actual_results, expected_results, strict=True
        ):
            case = f"{layout_name}, chunk {chunk}, smoothing {smoothing}, {form}: {name}"
            assert_equal(actual, expected, case, tolerance=1e-12)


def check_layouts(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for tp, sequence_parallel in LAYOUTS:
        layout = ParallelLayout(world_size=4, tp=tp)
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        # With 9 columns, some ranks have only padding.
        for vocab_size, slot_scale in ((9, None), (21, 1.0), (21, 0.5)):
            compare(mesh, vocab_size, slot_scale, f"tp={tp} sp={sequence_parallel} V={vocab_size}")
        mesh.destroy()


def test_summed_loss_equals_sum_of_stored_logits_in_every_layout() -> None:
    run_world(check_layouts, 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_loss_and_repeated_gradients_equal_torch(smoothing: float) -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1).requires_grad_()
    labels = torch.randint(0, 40, (S, B), generator=torch.Generator().manual_seed(1))
    labels[::3] = -100
    mesh = ParallelMesh.single()
    total = summed_cross_entropy(hidden, weight, labels, mesh, 40, 5, smoothing)
    mean = total / (labels != -100).sum()
    expected_mean = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), labels.flatten(), label_smoothing=smoothing
    )
    assert_equal(mean, expected_mean, "mean", tolerance=1e-12)
    gradients = torch.autograd.grad(7.0 * mean, (hidden, weight), retain_graph=True)
    repeated_gradients = torch.autograd.grad(7.0 * mean, (hidden, weight))
    expected_gradients = torch.autograd.grad(7.0 * expected_mean, (hidden, weight))
    for actual, repeated, expected in zip(
        gradients, repeated_gradients, expected_gradients, strict=True
    ):
        assert_equal(actual, expected, "gradient", tolerance=1e-12)
        assert torch.equal(actual, repeated), "a second backward pass gives the same gradients"


def test_the_head_leaves_no_weight_gradient_to_the_weight_half() -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1).requires_grad_()
    labels = torch.zeros(S, B, dtype=torch.long)
    queue = WeightGradientQueue()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None, queue=queue)
    set_slot(weight, slot)
    total = summed_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 40, 5)
    with queue.open("half"):
        total.backward()
    gradient = slot.gradient.clone()
    queue.run("half")
    assert gradient.any()
    assert torch.equal(slot.gradient, gradient)


def test_memory_between_forward_and_backward_holds_only_gradients() -> None:
    num_tokens, vocab_size, chunk = 64, 512, 16
    hidden = torch.randn(num_tokens, 1, D).requires_grad_()
    weight = torch.randn(vocab_size, D).requires_grad_()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None)
    set_slot(weight, slot)
    labels = torch.randint(0, vocab_size, (num_tokens, 1))
    arguments = labels, ParallelMesh.single(), vocab_size, chunk
    memory = LiveMemory()
    memory.leave_out([hidden, weight, slot.gradient, labels])
    with memory:
        total = summed_cross_entropy(hidden, weight, *arguments)
        memory_after_forward = memory.now
        total.backward()
    gradients = weight.nbytes + hidden.nbytes
    assert gradients <= memory_after_forward <= gradients + 64
    # The bound leaves room for a second copy of the logits, which operators of torch need.
    logits = 4 * chunk * vocab_size
    assert memory.peak < gradients + 2.5 * logits
    with torch.no_grad(), LiveMemory() as memory_without_gradients:
        summed_cross_entropy(hidden, weight, *arguments)
    assert memory_without_gradients.peak < 2.5 * logits, (
        "without gradients no memory is reserved for them"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_equal_those_of_stored_logits(dtype: torch.dtype) -> None:
    hidden = torch.randn(S, B, D).to(dtype).requires_grad_()
    weight = torch.randn(40, D).to(dtype).requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    mesh = ParallelMesh.single()
    total = summed_cross_entropy(hidden, weight, labels, mesh, 40, 5)
    assert total.dtype == torch.float32
    gradients = torch.autograd.grad(total * 0.3, (hidden, weight))
    logits = F.linear(hidden.detach().double(), weight.detach().double())
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = F.linear(*wide).flatten(0, 1)
    expected_total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    expected_gradients = torch.autograd.grad(expected_total * 0.3, wide)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype
        assert_equal(actual.double(), expected, "gradient", tolerance=3e-2)


def test_small_gradients_of_float16_survive_with_a_loss_scale() -> None:
    hidden = torch.zeros(1, 1, D, dtype=torch.float16).requires_grad_()
    # Without the loss scale the gradient of the input is 2e-8, which is not representable in float16.
    weight = torch.full((8, D), 1e-6, dtype=torch.float16)
    weight[0] = 0.0
    labels = torch.ones(1, 1, dtype=torch.long)
    total = summed_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 8, 5)
    (total * 2.0**14).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().min() > 0


def test_autocast_gradients_have_the_types_of_the_operands() -> None:
    hidden, weight = torch.randn(S, B, D).requires_grad_(), torch.randn(40, D).requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    results = []
    mesh = ParallelMesh.single()
    for method in ("stored", "summed"):
        with torch.autocast("cpu", torch.bfloat16):
            total = (
                cross_entropy_of_stored_logits(
                    hidden, weight, labels, mesh, FORMS[0], vocab_size=40
                ).sum()
                if method == "stored"
                else summed_cross_entropy(hidden, weight, labels, mesh, 40, 7)
            )
        results.append((total, *torch.autograd.grad(total, (hidden, weight))))
    for stored_result, summed_result in zip(*results, strict=True):
        assert stored_result.dtype == summed_result.dtype == torch.float32
        assert_equal(stored_result, summed_result, "autocast", tolerance=2e-2)


def test_frozen_operands_get_no_gradient() -> None:
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1)
    labels = torch.zeros(S, B, dtype=torch.long)
    arguments = labels, ParallelMesh.single(), 40, 5
    summed_cross_entropy(hidden, weight, *arguments).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    summed_cross_entropy(hidden.detach(), weight.requires_grad_(), *arguments).backward()
    assert weight.grad is not None


def test_labels_outside_the_vocabulary_are_refused() -> None:
    labels = torch.tensor([[8]])
    with pytest.raises(IndexError, match=r"\[0, 8\): an id is 8"):
        summed_cross_entropy(
            torch.randn(1, 1, 4), torch.randn(16, 4), labels, ParallelMesh.single(), 8, 5
        )
