"""On a GPU, the head and the loss in chunks beside liger-kernel and cut-cross-entropy."""

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

pytestmark = pytest.mark.gpu

TOKENS, FEATURES, VOCABULARY = 1500, 512, 32_003
#: Losses of others, with the label smoothing that they compute.
OTHERS: dict[str, tuple[Callable[[], MeanLoss], float]] = {
    "liger-kernel": (liger_loss, 0.0),
    "liger-kernel, smoothing": (liger_loss, 0.1),
    "cut-cross-entropy": (lambda: cut_loss(exact=True), 0.0),
}


def run(loss: MeanLoss, given: tuple[Tensor, ...], smoothing: float) -> list[Tensor]:
    """Return loss and gradients."""
    hidden, head, labels = given
    found = loss(hidden, head, labels, smoothing)
    return [one.double() for one in (found, *torch.autograd.grad(found, (hidden, head)))]


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, relative to that of the second tensor."""
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("loss", [chunked, summed])
@pytest.mark.parametrize("name", OTHERS)
def test_chunks_equal_other_libraries(name: str, loss: Callable[..., Tensor]) -> None:
    make, smoothing = OTHERS[name]
    try:
        other = make()
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    given = operands(TOKENS, FEATURES, VOCABULARY, "cuda")
    ours = run(lambda *values: loss(*values, chunk=256), given, smoothing)
    theirs = run(other, given, smoothing)
    wide = tuple(one.detach().double() for one in given[:2])
    exact = run(torch_operators, (*(one.requires_grad_() for one in wide), given[2]), smoothing)
    for what, own, peer, true in zip(
        ("loss", "gradient of hidden", "gradient of head"), ours, theirs, exact, strict=True
    ):
        # Both round logits or their gradients to bfloat16, with 8 significant bits.
        assert distance(own, true) < 0.01, f"{what}: chunks"
        # cut-cross-entropy adds up gradients of hidden states in bfloat16.
        assert distance(peer, true) < 0.03, f"{what}: {name}"
        assert distance(own, peer) < 0.03, what
    assert float(ours[2].abs().max()) > 0, "the head has gradients"
    assert not ours[1][::8].any(), "ignored labels have no gradients"
