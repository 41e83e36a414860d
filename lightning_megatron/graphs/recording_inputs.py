"""Memory from which a graph reads its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RecordingInputs:
    """Tensors from which a graph reads its inputs.

    An input that has the same address whenever the graph runs is read in place. Every other input
    is copied into separate memory before each replay.

    Args:
        tensors: Inputs for which the graph is captured.
        stays: Function that returns whether an input keeps its address at every replay.
    """

    def __init__(self, tensors: Sequence[Tensor], stays: Callable[[Tensor], bool]) -> None:
        self._is_copied = [not stays(tensor) for tensor in tensors]
        #: Inputs of the captured function.
        self.tensors = [
            _twin_of(tensor) if is_copied else tensor.detach()
            for tensor, is_copied in zip(tensors, self._is_copied, strict=True)
        ]
        for static, tensor in zip(self.tensors, tensors, strict=True):
            static.requires_grad_(tensor.requires_grad)
        self._addresses = [static.data_ptr() for static in self.tensors]

    @property
    def copied(self) -> list[Tensor]:
        """Return the tensors into which inputs are copied."""
        pairs = zip(self.tensors, self._is_copied, strict=True)
        return [tensor for tensor, is_copied in pairs if is_copied]

    @property
    def num_bytes(self) -> int:
        """Return the size of the copies (bytes)."""
        return sum(tensor.nbytes for tensor in self.copied)

    def find_mismatch(self, tensors: Sequence[Tensor]) -> str | None:
        """Return why a replay cannot use these inputs; None if it can."""
        for position, (static, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            if given.shape != static.shape or given.dtype != static.dtype:
                return f"{_shown(given)}, captured for {_shown(static)}"
            if given.requires_grad != static.requires_grad:
                return f"{_shown(given)} with requires_grad={given.requires_grad}"
            if self._is_copied[position]:
                continue
            if given.data_ptr() != self._addresses[position]:
                return f"{_shown(given)} at another address than at the capture"
            if given.stride() != static.stride():
                return f"{_shown(given)} with other strides than at the capture"
        return None

    def give_up(
        self, is_written: Callable[[Tensor], bool], give_up: Callable[[Tensor], Tensor]
    ) -> None:
        """Release the references to memory that graphs of the slot write.

        Args:
            is_written: Function that returns whether a graph of the slot writes a tensor.
            give_up: Function that returns a tensor at the same address, which keeps no memory.
        """
        for number, tensor in enumerate(self.tensors):
            if not self._is_copied[number] and is_written(tensor):
                static = give_up(tensor.detach())
                self.tensors[number] = static.requires_grad_(tensor.requires_grad)

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy inputs for the next replay.

        Args:
            tensors: Inputs that fit.
        """
        for static, given, is_copied in zip(self.tensors, tensors, self._is_copied, strict=True):
            if is_copied:
                static.data.copy_(given)


class OutputGradients:
    """Tensors from which the graph of a backward pass reads the gradients of its outputs.

    A gradient that an earlier graph of the same slot has written is read in place. All others are
    copied. Copies of equal shapes may share memory between slots, if they are read only while one
    backward pass runs.

    Args:
        outputs: Outputs with gradients.
        gradients: Gradients for which the graph is captured; None where nothing used the output.
        stays: Function that returns whether a graph of this slot has written a gradient.
        shared: Memory for copies, by position, shape and dtype.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        stays: Callable[[Tensor], bool],
        shared: dict[tuple[int, torch.Size, torch.dtype], Tensor],
    ) -> None:
        #: Gradients of the captured backward pass.
        self.tensors: list[Tensor] = []
        for position, (output, given) in enumerate(zip(outputs, gradients, strict=True)):
            if given is not None and stays(given) and given.stride() == output.stride():
                self.tensors.append(given.detach())
                continue
            key = (position, output.shape, output.dtype)
            if key not in shared:
                shared[key] = torch.empty_like(output, requires_grad=False)
            self.tensors.append(shared[key])

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients for the next replay, and zeros for outputs that nothing used."""
        for static, given in zip(self.tensors, gradients, strict=True):
            if given is None:
                static.zero_()
            elif given.data_ptr() != static.data_ptr() or given.stride() != static.stride():
                static.copy_(given)


def _twin_of(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor)


def _shown(tensor: Tensor) -> str:
    return f"a tensor of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
