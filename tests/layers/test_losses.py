"""Losses of stored logits, in chunks of tokens, and as a sum: types, memory and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.loss.chunked_loss import (
    ChunkedHead,
    chunked_cross_entropy,
    summed_cross_entropy,
)
from lightning_megatron.layers.loss.cross_entropy import LossTerms
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.plan.model_shape import MAX_STORED_BYTES, tokens_of_chunk
from tests.layers.small_layers import B, D, S, draw, stored_losses
from tests.oracles import assert_equal

MESH = ParallelMesh.single()


def head_of(vocab_size: int, chunk: int = 5, smoothing: float = 0.0) -> ChunkedHead:
    return ChunkedHead(LossTerms(MESH.tp, vocab_size, smoothing, -100), MESH, chunk)


#: Losses of each token, or their sum, with a chunk of 5 tokens where logits are not stored.
FUNCTIONS: dict[str, Any] = {
    "stored": lambda *given, size: stored_losses(*given, MESH, vocab_size=size),
    "chunked": lambda *given, size: chunked_cross_entropy(*given, head_of(size)),
    "summed": lambda *given, size: summed_cross_entropy(*given, head_of(size)),
}
kinds = pytest.mark.parametrize("kind", FUNCTIONS)
NOT_STORED = ("chunked", "summed")


@kinds
def test_losses_of_half_precision_are_float32_with_gradients_of_half_precision(kind):
    for dtype in (torch.bfloat16, torch.float16):
        hidden = torch.randn(S, B, D).to(dtype).requires_grad_()
        weight = torch.randn(40, D).to(dtype).requires_grad_()
        labels = torch.randint(0, 40, (S, B))
        losses = FUNCTIONS[kind](hidden, weight, labels, size=40)
        assert losses.dtype == torch.float32
        gradients = torch.autograd.grad(losses.sum() * 0.3, (hidden, weight))
        wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        logits = F.linear(*wide).flatten(0, 1)
        expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        assert_equal(losses.sum().double(), expected, "sum", tolerance=1e-2)
        for actual, twin in zip(gradients, torch.autograd.grad(expected * 0.3, wide), strict=True):
            assert actual.dtype == dtype
            assert_equal(actual.double(), twin, "gradient", tolerance=3e-2)


@pytest.mark.parametrize("kind", NOT_STORED)
def test_autocast_gradients_equal_those_of_stored_logits(kind):
    hidden, weight = torch.randn(S, B, D).requires_grad_(), torch.randn(40, D).requires_grad_()
    labels, results = torch.randint(0, 40, (S, B)), []
    for function in (FUNCTIONS["stored"], FUNCTIONS[kind]):
        with torch.autocast("cpu", torch.bfloat16):
            total = function(hidden, weight, labels, size=40).sum()
        results.append((total, *torch.autograd.grad(total, (hidden, weight))))
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype == torch.float32
        assert_equal(actual, expected, "autocast", tolerance=2e-2)


@kinds
def test_frozen_operands_get_no_gradient(kind):
    hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1)
    labels = torch.zeros(S, B, dtype=torch.long)
    FUNCTIONS[kind](hidden, weight, labels, size=40).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    FUNCTIONS[kind](hidden.detach(), weight.requires_grad_(), labels, size=40).sum().backward()
    assert weight.grad is not None


@kinds
def test_extreme_logits_give_finite_losses_and_unknown_labels_are_refused(kind):
    hidden, weight = torch.ones(1, 1, 1), torch.zeros(8, 1)
    weight[0] = -torch.inf
    losses = FUNCTIONS[kind](hidden, weight, torch.tensor([[3]]), size=8)
    assert_equal(losses.sum(), torch.tensor(7.0).log(), "loss", tolerance=1e-6)
    for label in (8, -2):
        with pytest.raises(IndexError, match=rf"\[0, 8\): an id is {label}"):
            FUNCTIONS[kind](
                torch.randn(1, 1, 4), torch.randn(16, 4), torch.tensor([[label]]), size=8
            )


@pytest.mark.parametrize("kind", NOT_STORED)
def test_memory_holds_the_logits_of_one_chunk_and_after_a_sum_only_gradients(kind):
    num_tokens, vocab_size, chunk = 64, 512, 16
    hidden = torch.randn(num_tokens, 1, D).requires_grad_()
    weight = torch.randn(vocab_size, D).requires_grad_()
    slot = GradientSlot(torch.zeros_like(weight), lambda: None)
    set_slot(weight, slot)
    labels = torch.randint(0, vocab_size, (num_tokens, 1))
    function = chunked_cross_entropy if kind == "chunked" else summed_cross_entropy
    memory = LiveMemory()
    memory.leave_out([hidden, weight, slot.gradient, labels])
    with memory:
        losses = function(hidden, weight, labels, head_of(vocab_size, chunk))
        after_forward = memory.now
        losses.sum().backward()
    logits, gradients = 4 * chunk * vocab_size, weight.nbytes + hidden.nbytes
    if kind == "chunked":
        # A few numbers for each token stay: its loss, normaliser and index.
        assert after_forward <= 64 * num_tokens
        assert logits < memory.peak < 1.5 * logits
        return
    assert gradients <= after_forward <= gradients + 64
    # The bound leaves room for a second copy of the logits, which operators of torch need.
    assert memory.peak < gradients + 2.5 * logits
    with torch.no_grad(), LiveMemory() as without_gradients:
        function(hidden, weight, labels, head_of(vocab_size, chunk))
    assert without_gradients.peak < 2.5 * logits, "no memory is reserved for gradients"


def test_auto_chunks_only_large_logits_and_forward_chunks_all_logits():
    assert tokens_of_chunk(None, 10**6, 10**6, 2) is None
    assert tokens_of_chunk(100, 10, 10, 2) == 100
    vocab_size = 128_256
    max_tokens = MAX_STORED_BYTES // (2 * vocab_size)
    assert tokens_of_chunk("auto", max_tokens, vocab_size, 2) is None
    # 512 MiB of logits in half precision, rounded to a multiple of 256 tokens.
    assert tokens_of_chunk("auto", max_tokens + 1, vocab_size, 2) == 2048
    assert tokens_of_chunk("auto", 10**6, 2**30, 4) == 1
    assert tokens_of_chunk("forward", 1, vocab_size, 2) == 2048


def test_the_mean_loss_and_repeated_gradients_equal_torch():
    leaves = hidden, weight = draw(S, B, D).requires_grad_(), draw(40, D, seed=1).requires_grad_()
    labels = torch.randint(0, 40, (S, B), generator=torch.Generator().manual_seed(1))
    labels[::3] = -100
    logits = F.linear(hidden, weight).flatten(0, 1)
    for smoothing in (0.0, 0.1):
        total = summed_cross_entropy(hidden, weight, labels, head_of(40, smoothing=smoothing))
        mean = total / (labels != -100).sum()
        exact = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)
        assert_equal(mean, exact, "mean", tolerance=1e-12)
        gradients = [torch.autograd.grad(7.0 * mean, leaves, retain_graph=True) for _ in range(2)]
        assert all(map(torch.equal, *gradients)), "a second backward pass gives the same gradients"
        expected = torch.autograd.grad(7.0 * exact, leaves, retain_graph=True)
        for pair in zip(gradients[0], expected, strict=True):
            assert_equal(*pair, "gradient", tolerance=1e-12)


def test_small_gradients_of_float16_survive_with_a_loss_scale():
    hidden = torch.zeros(1, 1, D, dtype=torch.float16).requires_grad_()
    # Without the loss scale the gradient of the input is 2e-8, which is not representable in float16.
    weight = torch.full((8, D), 1e-6, dtype=torch.float16)
    weight[0] = 0.0
    labels = torch.ones(1, 1, dtype=torch.long)
    total = summed_cross_entropy(hidden, weight, labels, head_of(8))
    (total * 2.0**14).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().min() > 0
