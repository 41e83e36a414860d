"""Graphs of pieces keep values in memory that no other pass changes before they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.graphs.piece_backward import PieceBackward
from lightning_megatron.graphs.piece_inputs import OutputGradients, PieceInputs


def backward_through(output: Tensor, inputs: list[Tensor], shared: dict) -> list[Tensor | None]:
    """Return the gradients of inputs for an output gradient that is copied into shared memory."""
    gradient = torch.arange(output.numel(), dtype=output.dtype).view(output.shape)
    memory = OutputGradients([output], [gradient], lambda tensor: False, shared)
    memory.fill([gradient])
    return PieceBackward([output], inputs, memory)()


def test_gradients_of_inputs_share_no_memory_with_copied_gradients_of_outputs() -> None:
    first, second = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
    outputs = {
        "unchanged": (first.view_as(first), [first]),
        "parts": (torch.cat([first, second]), [first, second]),
        "columns": (torch.cat([first, second], 1), [first, second]),
    }
    for name, (output, inputs) in outputs.items():
        shared: dict = {}
        actual = backward_through(output, inputs, shared)
        expected = torch.autograd.grad(
            output, inputs, torch.arange(float(output.numel())).view(output.shape)
        )
        # Another slot copies its gradients into the same memory.
        for copied in shared.values():
            copied.fill_(torch.nan)
        for gradient, reference in zip(actual, expected, strict=True):
            assert gradient is not None
            assert torch.equal(gradient, reference), name


def test_an_input_that_is_read_in_place_keeps_address_and_strides() -> None:
    square = torch.zeros(3, 3)
    inputs = PieceInputs([square], lambda tensor: True)
    assert inputs.find_mismatch([square]) is None
    assert "strides" in (inputs.find_mismatch([square.t()]) or "")
    assert "address" in (inputs.find_mismatch([square.clone()]) or "")
    copied = PieceInputs([square], lambda tensor: False)
    copied.fill([torch.arange(9.0).view(3, 3).t()])
    assert torch.equal(copied.tensors[0], torch.arange(9.0).view(3, 3).t())
    assert copied.find_mismatch([square.t()]) is None
