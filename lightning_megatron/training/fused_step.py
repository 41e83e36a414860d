"""One step of the fused update, ready to run or to be captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Float

#: Function that updates slices of one group in place, with the arguments of ``kernels.AdamKernel``.
Kernel = Callable[..., None]


@dataclass(frozen=True)
class KernelCall:
    """Call of the kernel for the slices of one group that have the same dtypes.

    Args:
        kernel: The kernel.
        columns: Parameters, gradients, both moments, steps and half-precision views of the slices.
        numbers: Row of the group in the table of :class:`GroupNumbers`.
        has_decay: Whether the group has a weight decay.
        is_decoupled: Whether the decay shrinks the parameters (AdamW) instead of being added to
            the gradients (Adam).
    """

    kernel: Kernel
    columns: tuple[tuple[Any, ...], ...]
    numbers: Float[Tensor, "12"]
    has_decay: bool
    is_decoupled: bool


@dataclass(frozen=True)
class UpdatePiece:
    """Part of a step: kernel calls that run before the calls of the next piece.

    Args:
        calls: Calls of the kernel.
        names: Names of the parameters whose slices the calls update.
    """

    calls: Sequence[KernelCall]
    names: Sequence[str]

    @torch.no_grad()
    def run(self, coefficient: Float[Tensor, ""] | None) -> None:
        """Update the slices and round them into the model's parameters.

        A CUDA graph can capture this call after an uncaptured step with the same tensors.

        Args:
            coefficient: Factor by which the kernel multiplies the gradients first; None means 1.
        """
        factor = None if coefficient is None else coefficient.float()
        for call in self.calls:
            call.kernel(
                *call.columns,
                factor,
                call.numbers,
                has_decay=call.has_decay,
                is_decoupled=call.is_decoupled,
            )


@dataclass(frozen=True)
class FusedStep:
    """One step over all slices of an optimizer that have a gradient.

    Args:
        pieces: Parts of the step, at least one, in the order in which the next forward pass reads
            the parameters.
        tensors: Object that identifies the tensors of the calls. Steps with the same object use the
            same tensors.
        is_static: Whether later steps can use the same tensors, because all gradients lie in the
            flat buffers.
    """

    pieces: Sequence[UpdatePiece]
    tensors: object
    is_static: bool

    @property
    def calls(self) -> Iterator[KernelCall]:
        """Return the calls of all pieces."""
        return (call for piece in self.pieces for call in piece.calls)

    @property
    def names(self) -> set[str]:
        """Return the names of the parameters whose slices are updated."""
        return {name for piece in self.pieces for name in piece.names}

    @property
    def form(self) -> Hashable:
        """Return the settings that a captured CUDA graph contains as constants, without tensors."""
        return tuple((call.has_decay, call.is_decoupled) for call in self.calls)

    def addresses(self) -> Hashable:
        """Return the addresses of all tensors."""
        return tuple(
            tensor.data_ptr()
            for call in self.calls
            for column in (*call.columns, (call.numbers,))
            for tensor in column
            if tensor is not None
        )

    def end(self) -> None:
        """Set the gradients to None, so that the optimizer's own step finds nothing to update."""
        for call in self.calls:
            for parameter in call.columns[0]:
                parameter.grad = None
