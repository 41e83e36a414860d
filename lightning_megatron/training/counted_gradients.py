"""Which pieces of this rank's gradients count in a norm over the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from lightning_megatron.training.flat_buffer import MainSlice
from lightning_megatron.training.same_objects import same_objects


class CountedGradients:
    """List the pieces of gradients that no other rank of the world counts, and remember them from step to step.

    They are the same as long as gradients are the same tensors, which those in flat buffers are.
    """

    def __init__(self) -> None:
        self._gradients: list[Tensor | None] = []
        self._is_first: dict[bool, bool] = {}
        self._runs: list[Tensor] = []

    def of(
        self, slices: Mapping[str, MainSlice], is_first: dict[bool, bool], names: Collection[str] | None
    ) -> list[Tensor]:
        """Return pieces that lie one behind the other as one.

        Args:
            slices: What this rank trains, after gradients were summed over the ranks.
            is_first: Whether this rank counts gradients that others have as well: those of dense parameters, and of
                experts (True).
            names: Count only these parameters; None means all.
        """
        gradients = [one.main.grad if names is None or name in names else None for name, one in slices.items()]
        if is_first == self._is_first and same_objects(gradients, self._gradients):
            return self._runs
        runs = _joined(_counted(slices, gradients, is_first))
        if all(
            gradient is None or gradient is one.gradient
            for gradient, one in zip(gradients, slices.values(), strict=True)
        ):
            # Others would be kept from being freed.
            self._gradients, self._is_first, self._runs = gradients, is_first, runs
        return runs


def _counted(
    slices: Mapping[str, MainSlice], gradients: list[Tensor | None], is_first: Mapping[bool, bool]
) -> list[Tensor]:
    counted: list[Tensor] = []
    for one, gradient in zip(slices.values(), gradients, strict=True):
        # Where several ranks hold the same gradients, the first one counts them.
        if gradient is not None and (one.is_exclusive or is_first[one.placement.is_expert]):
            counted += one.counted_in(gradient)
    return counted


def _joined(pieces: list[Tensor]) -> list[Tensor]:
    """Join pieces that lie one behind the other in a flat buffer: norms of few long ones cost the host less."""
    firsts: list[Tensor] = []
    sizes: list[int] = []
    stop, memory = -1, -1
    for piece in pieces:
        start, numel = piece.data_ptr(), piece.numel()
        # Another buffer may begin where one ends.
        if start == stop and piece.dtype == firsts[-1].dtype and piece.untyped_storage().data_ptr() == memory:
            sizes[-1] += numel
        else:
            firsts.append(piece)
            sizes.append(numel)
            memory = piece.untyped_storage().data_ptr()
        stop = start + numel * piece.element_size() if piece.is_contiguous() else -1
    runs = zip(firsts, sizes, strict=True)
    return [first if size == first.numel() else first.as_strided((size,), (1,)) for first, size in runs]
