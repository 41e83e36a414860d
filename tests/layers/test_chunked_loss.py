"""Head and loss in chunks of tokens equal head and loss with stored logits, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.chunked_head import LogitForm
from lightning_megatron.layers.chunked_loss import chunked_cross_entropy
from lightning_megatron.layers.embedding import VocabParallelHead, vocab_logits
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.loss_chunks import MAX_STORED_BYTES, tokens_of_chunk
from tests.live_memory import LiveMemory
from tests.oracles import assert_equal
from tests.world import run_world

S, B, D = 8, 3, 16
LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]
FORMS = [LogitForm(), LogitForm(scale=0.5), LogitForm(scale=2.0, soft_cap=3.0)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cross_entropy_of_stored_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mesh: ParallelMesh,
    form: LogitForm,
    **options: Any,
) -> Tensor:
    logits = vocab_logits(hidden, weight, mesh) * form.scale
    if form.soft_cap is not None:
        logits = form.soft_cap * torch.tanh(logits / form.soft_cap)
    return vocab_parallel_cross_entropy(logits, labels, mesh, **options)


def gradients_of(head: nn.Module, hidden: Tensor, losses: Tensor, slot: Tensor | None) -> Any:
    (losses * draw(S, B, seed=5).abs()).sum().backward()
    gradient = head.weight.grad if slot is None else slot
    result = losses.detach(), hidden.grad, gradient.clone()
    hidden.grad = head.weight.grad = None
    return result


def compare(mesh: ParallelMesh, vocab_size: int, with_slot: bool, layout_name: str) -> None:
    head = VocabParallelHead(vocab_size, D, mesh, multiple=8)
    initialize_(head, "cpu", seed=2)
    with torch.no_grad():
        head.weight.mul_(20.0)
        # Padding must never receive probability.
        num_true_rows = vocab_size - mesh.tp.rank * len(head.weight)
        head.weight[max(num_true_rows, 0) :] = 100.0
    slot, calls = None, []
    if with_slot:
        slot = torch.full_like(head.weight, torch.nan)
    seq = S // (mesh.tp.size if mesh.sequence_parallel else 1)
    seed = 10 + mesh.tp.rank if mesh.sequence_parallel else 10
    hidden = draw(seq, B, D, seed=seed).requires_grad_()
    labels = torch.randint(0, vocab_size, (S, B), generator=torch.Generator().manual_seed(1))
    labels[0, 0], labels[1, 0] = vocab_size - 1, 0
    labels[2:4] = -100
    for form, smoothing, chunk in itertools.product(FORMS, (0.0, 0.1), (1, 7, 24, 100)):
        options = {"vocab_size": vocab_size, "label_smoothing": smoothing}
        losses = cross_entropy_of_stored_logits(hidden, head.weight, labels, mesh, form, **options)
        expected_results = gradients_of(head, hidden, losses, None)
        calls.clear()
        if slot is not None:
            set_slot(head.weight, GradientSlot(slot, lambda: calls.append(1)))
        losses = chunked_cross_entropy(
            hidden, head.weight, labels, mesh, chunk=chunk, form=form, **options
        )
        actual_results = gradients_of(head, hidden, losses, slot)
        set_slot(head.weight, None)
        assert len(calls) == with_slot, "the owner of the slot is notified of a gradient once"
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
        for vocab_size, with_slot in ((9, False), (21, True)):
            compare(mesh, vocab_size, with_slot, f"tp={tp} sp={sequence_parallel} V={vocab_size}")
        mesh.destroy()


def test_chunked_loss_equals_loss_of_stored_logits_in_every_layout() -> None:
    run_world(check_layouts, 4)


def test_memory_holds_the_logits_of_one_chunk() -> None:
    num_tokens, vocab_size, chunk = 64, 512, 16
    hidden = torch.randn(num_tokens, 1, D).requires_grad_()
    weight = torch.randn(vocab_size, D).requires_grad_()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None)
    set_slot(weight, slot)
    labels = torch.randint(0, vocab_size, (num_tokens, 1))
    memory = LiveMemory()
    memory.leave_out([hidden, weight, slot.gradient, labels])
    with memory:
        losses = chunked_cross_entropy(
            hidden, weight, labels, ParallelMesh.single(), vocab_size, chunk
        )
        memory_after_forward = memory.now
        losses.sum().backward()
    logits = 4 * chunk * vocab_size
    # A few numbers for each token stay: its loss, normaliser and index.
    assert memory_after_forward <= 64 * num_tokens
    assert logits < memory.peak < 1.5 * logits


def test_losses_of_bfloat16_inputs_are_float32_with_bfloat16_gradients() -> None:
    hidden = torch.randn(S, B, D).bfloat16().requires_grad_()
    weight = (3 * torch.randn(40, D)).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    losses = chunked_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 40, 5)
    losses.sum().backward()
    expected = F.cross_entropy(
        F.linear(hidden, weight).detach().float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert losses.dtype == torch.float32
    assert_equal(losses.flatten(), expected, "loss", tolerance=1e-5)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_gradients_equal_those_of_stored_logits() -> None:
    hidden = torch.randn(S, B, D).requires_grad_()
    weight = torch.randn(40, D).requires_grad_()
    labels = torch.randint(0, 40, (S, B))
    results = []
    for method in ("stored", "chunked"):
        with torch.autocast("cpu", torch.bfloat16):
            mesh = ParallelMesh.single()
            losses = (
                cross_entropy_of_stored_logits(
                    hidden, weight, labels, mesh, LogitForm(), vocab_size=40
                )
                if method == "stored"
                else chunked_cross_entropy(hidden, weight, labels, mesh, 40, 100)
            )
        results.append((losses, *torch.autograd.grad(losses.sum(), (hidden, weight))))
    for stored_result, chunked_result in zip(*results, strict=True):
        assert stored_result.dtype == chunked_result.dtype == torch.float32
        assert_equal(stored_result, chunked_result, "autocast", tolerance=2e-2)


def test_frozen_weights_or_inputs_get_no_gradient() -> None:
    hidden = draw(S, B, D).requires_grad_()
    weight = draw(40, D, seed=1)
    labels = torch.zeros(S, B, dtype=torch.long)
    chunked_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 40, 5).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    fixed = hidden.detach()
    losses = chunked_cross_entropy(
        fixed, weight.requires_grad_(), labels, ParallelMesh.single(), 40, 5
    )
    losses.sum().backward()
    assert weight.grad is not None


def test_losses_are_finite_beside_a_logit_of_minus_infinity() -> None:
    hidden, weight = torch.ones(1, 1, 1), torch.zeros(8, 1)
    weight[0] = -torch.inf
    labels = torch.tensor([[3]])
    losses = chunked_cross_entropy(hidden, weight, labels, ParallelMesh.single(), 8, 5)
    assert_equal(losses, torch.tensor([[7.0]]).log(), "loss", tolerance=1e-6)


@pytest.mark.parametrize("label", [8, -2])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    labels = torch.tensor([[label]])
    with pytest.raises(IndexError, match=rf"\[0, 8\): an id is {label}"):
        chunked_cross_entropy(
            torch.randn(1, 1, 4), torch.randn(16, 4), labels, ParallelMesh.single(), 8, 5
        )


def test_auto_chunks_only_large_logits_and_forward_chunks_all_logits() -> None:
    assert tokens_of_chunk(None, 10**6, 10**6, 2) is None
    assert tokens_of_chunk(100, 10, 10, 2) == 100
    vocab_size = 128_256
    max_tokens = MAX_STORED_BYTES // (2 * vocab_size)
    assert tokens_of_chunk("auto", max_tokens, vocab_size, 2) is None
    # 512 MiB of logits in half precision, rounded to a multiple of 256 tokens.
    assert tokens_of_chunk("auto", max_tokens + 1, vocab_size, 2) == 2048
    assert tokens_of_chunk("auto", 10**6, 2**30, 4) == 1
    assert tokens_of_chunk("forward", 1, vocab_size, 2) == 2048
