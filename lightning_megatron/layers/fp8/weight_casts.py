"""Casts of weights to 8 bits that the microbatches of a batch share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.layers.fp8.operand import Operand, Operands
from lightning_megatron.shapes import Int

#: Function that casts a weight. Its arguments are whether the rows and whether the columns are
#: needed, and the magnitudes of an earlier cast of the weight.
_CastWeight = Callable[[bool, bool, Tensor | None], Operands]
#: Parameters of a weight with their version counters and addresses, of which a write or replacement
#: changes one.
_State = tuple[tuple[Tensor, int, int], ...]


class _Linear(Protocol):
    """Linear layer that returns the tensors of its weight."""

    @property
    def weight_parts(self) -> tuple[Tensor, ...]:
        """Return the tensors that form the weight, from the first row to the last."""


class WeightCasts:
    """Cache of the casts of a model's weights, for the products inside a block of :meth:`shared`.

    Equal to a cast for each product. Outside of the block no cast is kept, so that no update, load
    or swap of weights between two batches is missed. Inside the block a weight is cast again if
    torch's version counter shows a write, or if a parameter or its memory was replaced. Writes
    through ``parameter.data``, which torch does not count, must be reported to :meth:`stop`.
    Weights that are not parameters, such as those of a parametrization, are cast for each product.
    """

    def __init__(self) -> None:
        self._layers: list[LayerCasts] = []
        #: Whether products share casts now.
        self.is_open = False

    def layer(self, linear: _Linear) -> LayerCasts:
        """Return new casts of the weight of a layer, which :meth:`stop` and :meth:`shared` know."""
        casts = LayerCasts(self, linear)
        self._layers.append(casts)
        return casts

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep casts until the end of the block.

        The capture of a CUDA graph must contain the whole block, so that each replay casts the
        current weights.
        """
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            for layer in self._layers:
                layer.clear()

    def stop(self, parameter: nn.Parameter) -> None:
        """Cast a parameter for each product from now on, until the end of the block.

        User code may write it without a change of the version counter.
        """
        if not self.is_open:
            return
        for layer in self._layers:
            if layer.reads(parameter):
                layer.stop()


class LayerCasts:
    """Casts of the weight of one layer."""

    def __init__(self, model: WeightCasts, linear: _Linear) -> None:
        self._model = model
        self._linear = linear
        self.clear()

    def clear(self) -> None:
        """Discard all casts, and allow new ones to be kept."""
        self._state: _State | None = None
        self._rows: Operand | None = None
        self._columns: Operand | None = None
        self._magnitude: Tensor | None = None
        self._is_counted = False
        self._is_stopped = False

    def stop(self) -> None:
        """Discard all casts, and keep none until :meth:`clear`."""
        self.clear()
        self._is_stopped = True

    def reads(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a part of the weight."""
        return any(part is parameter for part in self._linear.weight_parts)

    def operands(
        self,
        cast: _CastWeight,
        *,
        rows: bool,
        columns: bool,
        counts: bool,
        magnitude: Int[Tensor, "parts"] | None,
    ) -> Operands:
        """Return the operands of the weight; cast it only if they are not kept.

        Args:
            counts: Whether the cast must update the magnitudes of the step.
            magnitude: Magnitudes that the product's forward pass found; None computes them.

        Communication: that of ``cast``, if it is called; all ranks that share the weight make the
            same calls.
        """
        state = self._current()
        if state is not None and not _is_same(state, self._state):
            self.clear()
            self._state = state
        # Magnitudes that this cache has not computed may belong to earlier values of the weight, so
        # the result is not kept.
        is_foreign = magnitude is not None and self._magnitude is None
        if state is None or is_foreign:
            return cast(rows, columns, magnitude)
        if counts and not self._is_counted:
            # A cast kept from a pass without gradients has not updated the magnitudes.
            self._rows = self._columns = None
            self._is_counted = True
        new_rows = rows and self._rows is None
        new_columns = columns and self._columns is None
        if new_rows or new_columns:
            operands = cast(new_rows, new_columns, self._magnitude)
            self._rows = operands.rows or self._rows
            self._columns = operands.columns or self._columns
            self._magnitude = operands.magnitude
        by_rows = self._rows if rows else None
        by_columns = self._columns if columns else None
        return Operands(by_rows, by_columns, self._magnitude)

    def _current(self) -> _State | None:
        """Return the state of the weight; None if its casts must not be kept."""
        if not self._model.is_open or self._is_stopped or torch.compiler.is_compiling():
            return None
        parts = self._linear.weight_parts
        # Torch does not count the writes of other tensors.
        if not all(isinstance(part, nn.Parameter) and not part.is_inference() for part in parts):
            return None
        return tuple((part, part._version, part.data_ptr()) for part in parts)


def _is_same(state: _State, other: _State | None) -> bool:
    if other is None or len(other) != len(state):
        return False
    pairs = zip(state, other, strict=True)
    return all(left[0] is right[0] and left[1:] == right[1:] for left, right in pairs)
