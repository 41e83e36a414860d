"""Pieces of gradients that this rank contributes to a global norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from lightning_megatron.shapes import Shaped
from lightning_megatron.training.flat_buffer import MainSlice
from lightning_megatron.training.same_objects import same_objects


class CountedGradients:
    """Cache of the gradient pieces that this rank counts in a global norm.

    The pieces stay valid while the gradients are the same tensor objects, as is the case for
    gradients in flat buffers.
    """

    def __init__(self) -> None:
        self._gradients: list[Tensor | None] = []
        self._is_first: dict[bool, bool] = {}
        self._runs: list[Tensor] = []

    def of(
        self,
        slices: Mapping[str, MainSlice],
        is_first: dict[bool, bool],
        names: Collection[str] | None,
    ) -> list[Shaped[Tensor, "..."]]:
        """Return the counted pieces, with adjacent pieces joined into one tensor.

        Args:
            slices: Slices that this rank trains, after their gradients were summed over the ranks.
            is_first: Whether this rank is the first of the ranks with the same gradients, and
                therefore counts them: for dense parameters (False) and for experts (True).
            names: Names of the parameters to count; None means all.
        """
        gradients = [
            main_slice.main.grad if names is None or name in names else None
            for name, main_slice in slices.items()
        ]
        if is_first == self._is_first and same_objects(gradients, self._gradients):
            return self._runs
        runs = _joined(_counted(slices, gradients, is_first))
        if all(
            gradient is None or gradient is main_slice.gradient
            for gradient, main_slice in zip(gradients, slices.values(), strict=True)
        ):
            # Caching other tensors would keep their memory from being freed.
            self._gradients = gradients
            self._is_first = is_first
            self._runs = runs
        return runs


def _counted(
    slices: Mapping[str, MainSlice], gradients: list[Tensor | None], is_first: Mapping[bool, bool]
) -> list[Tensor]:
    counted: list[Tensor] = []
    for main_slice, gradient in zip(slices.values(), gradients, strict=True):
        # If several ranks have the same gradients, only the first one counts them.
        if gradient is not None and (
            main_slice.is_exclusive or is_first[main_slice.placement.is_expert]
        ):
            counted += main_slice.counted_pieces(gradient)
    return counted


def _joined(pieces: list[Tensor]) -> list[Tensor]:
    """Join adjacent pieces of a flat buffer, because norms of few long tensors are cheaper."""
    firsts: list[Tensor] = []
    sizes: list[int] = []
    stop = -1
    memory = -1
    for piece in pieces:
        start = piece.data_ptr()
        numel = piece.numel()
        # Another buffer may begin at the address where this one ends.
        if (
            start == stop
            and piece.dtype == firsts[-1].dtype
            and piece.untyped_storage().data_ptr() == memory
        ):
            sizes[-1] += numel
        else:
            firsts.append(piece)
            sizes.append(numel)
            memory = piece.untyped_storage().data_ptr()
        stop = start + numel * piece.element_size() if piece.is_contiguous() else -1
    runs = zip(firsts, sizes, strict=True)
    return [
        first if size == first.numel() else first.as_strided((size,), (1,)) for first, size in runs
    ]
