"""Backward pass through the autograd graph of a captured forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.piece_inputs import OutputGradients
from lightning_megatron.layers.gradient_slot import SlotState, slot_of, state_of


class PieceBackward:
    """Backward pass through the autograd graph of a piece.

    Args:
        outputs: Outputs with gradients.
        inputs: Inputs of the piece.
        gradients: Memory with the gradients of the outputs.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: OutputGradients
    ) -> None:
        self.gradients = gradients
        self._outputs = outputs
        self._inputs = inputs
        self._wanted = [tensor for tensor in inputs if tensor.requires_grad]
        input_ids = set(map(id, inputs))
        self._leaves = [leaf for leaf in _leaves_of(outputs) if id(leaf.tensor) not in input_ids]

    @property
    def state(self) -> SlotState | None:
        """Return the state that the gradient sums must get; None if they may keep theirs."""
        owners = [slot for leaf in self._leaves if (slot := slot_of(leaf.tensor)) is not None]
        # A fused weight has the slots of several parameters.
        slots = [slot for owner in owners for slot in owner.slots]
        # A graph cannot overwrite some sums and add to others.
        return "filled" if state_of(slots) == "mixed" else None

    def __call__(self) -> list[Tensor | None]:
        """Add the gradients of parameters to their slots, and return those of inputs."""
        # If this runs in a capture that fails, it runs once more.
        input_edges = [get_gradient_edge(tensor) for tensor in self._wanted]
        gradients = torch.autograd.grad(
            self._outputs,
            [*input_edges, *(leaf.edge for leaf in self._leaves)],
            self.gradients.tensors,
            retain_graph=True,
            allow_unused=True,
        )
        for leaf, gradient in zip(self._leaves, gradients[len(self._wanted) :], strict=True):
            if gradient is not None:
                _add(leaf.tensor, gradient)
        # A gradient that passes unchanged, or as a view of a part, lies in memory that other passes
        # fill.
        filled = {_memory_of(tensor) for tensor in self.gradients.tensors}
        return [
            gradient.clone()
            if gradient is not None and _memory_of(gradient) in filled
            else gradient
            for gradient in gradients[: len(self._wanted)]
        ]

    def by_input(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradient of each input; None for those without one."""
        rest = iter(gradients)
        return [next(rest) if tensor.requires_grad else None for tensor in self._inputs]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Leaf:
    """Leaf of a graph, and the edge at which its gradient arrives.

    A parameter in 8 bits, which refuses operations that autograd records, is named by its edge.
    """

    tensor: Tensor
    edge: GradientEdge


def _leaves_of(outputs: Sequence[Tensor]) -> list[_Leaf]:
    """List the leaves for which a backward pass from these outputs may compute a gradient.

    Args:
        outputs: Tensors with a graph.
    """
    leaves: dict[int, _Leaf] = {}
    visited = set[object]()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = _Leaf(variable, GradientEdge(node, 0))
        nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())


def _add(leaf: Tensor, gradient: Tensor) -> None:
    slot = slot_of(leaf)
    if slot is None:
        raise UnsupportedError(
            "a captured backward pass adds gradients to gradient slots: a parameter of shape "
            f"{tuple(leaf.shape)} has none, because it belongs to no optimizer or has hooks. "
            "Freeze it, give it to the optimizer, or remove its hooks."
        )
    slot.add(gradient)
