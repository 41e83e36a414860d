"""Tests that chunked losses on a GPU agree with liger-kernel and cut-cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.loss import (
    MeanLoss,
    chunked,
    cut_loss,
    liger_loss,
    operands,
    summed,
    torch_operators,
)
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

TOKENS, FEATURES, VOCABULARY = 1500, 512, 32_003
#: Losses of other libraries, with the label smoothing that they support.
LIBRARIES: dict[str, tuple[Callable[[], MeanLoss], float]] = {
    "liger-kernel": (liger_loss, 0.0),
    "liger-kernel, smoothing": (liger_loss, 0.1),
    "cut-cross-entropy": (lambda: cut_loss(exact=True), 0.0),
}


def run(loss: MeanLoss, inputs: tuple[Tensor, ...], smoothing: float) -> list[Tensor]:
    """Return loss and gradients."""
    hidden, head, labels = inputs
    mean_loss = loss(hidden, head, labels, smoothing)
    return [
        tensor.double() for tensor in (mean_loss, *torch.autograd.grad(mean_loss, (hidden, head)))
    ]


@pytest.mark.parametrize("loss", [chunked, summed])
@pytest.mark.parametrize("name", LIBRARIES)
def test_chunked_losses_agree_with_other_libraries(name, loss):
    make, smoothing = LIBRARIES[name]
    try:
        library_loss = make()
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    inputs = operands(TOKENS, FEATURES, VOCABULARY, "cuda")
    ours = run(lambda *values: loss(*values, chunk=256), inputs, smoothing)
    theirs = run(library_loss, inputs, smoothing)
    wide = tuple(tensor.detach().double() for tensor in inputs[:2])
    exact = run(
        torch_operators, (*(tensor.requires_grad_() for tensor in wide), inputs[2]), smoothing
    )
    for what, our_tensor, their_tensor, exact_tensor in zip(
        ("loss", "gradient of hidden", "gradient of head"), ours, theirs, exact, strict=True
    ):
        # Both losses round logits or their gradients to bfloat16, with 8 significant bits.
        assert relative_difference(our_tensor, exact_tensor) < 0.01, f"{what}: chunks"
        # cut-cross-entropy adds up gradients of hidden states in bfloat16.
        assert relative_difference(their_tensor, exact_tensor) < 0.03, f"{what}: {name}"
        assert relative_difference(our_tensor, their_tensor) < 0.03, what
    assert float(ours[2].abs().max()) > 0, "the head has gradients"
    assert not ours[1][::8].any(), "ignored labels have no gradients"
