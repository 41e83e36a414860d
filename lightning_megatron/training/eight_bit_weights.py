"""Weights of a model that are stored in 8 bits while an optimizer trains them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.stored_weight import StoredWeight
from lightning_megatron.shapes import Float
from lightning_megatron.training.eight_bit_buffer import EightBitBuffer
from lightning_megatron.training.flat_buffer import FlatBuffer


class EightBitWeights:
    """Registry of the weights that are stored in 8 bits, and of their buffers.

    Args:
        weights: Names of the parameters of each weight, from the first row to the last.
        buffers: Flat buffers of the trained parameters; the list may grow.
    """

    def __init__(self, weights: Iterable[tuple[str, ...]], buffers: Sequence[FlatBuffer]) -> None:
        self._weights = tuple(weights)
        self._buffers = buffers

    @property
    def buffers(self) -> list[EightBitBuffer]:
        """Return the buffers that store their weights in 8 bits now."""
        buffers = (buffer for buffer in self._buffers if isinstance(buffer, EightBitBuffer))
        return [buffer for buffer in buffers if buffer.is_in_eight_bits]

    def among(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Return the weights whose parameters are all among some names.

        Args:
            names: Names of parameters that one optimizer begins to train.
        """
        inside = set(names)
        return [weight for weight in self._weights if inside.issuperset(weight)]

    def publish(self, mesh: ParallelMesh) -> None:
        """Quantize the main parameters to 8 bits, and gather the parts of all ranks.

        Args:
            mesh: Process groups of this rank.

        Communication: that of :meth:`EightBitBuffer.store_main_parameters`, and an all-gather of
            each bucket over the data ranks.
        """
        for buffer in self.buffers:
            buffer.store_main_parameters(mesh)
            buffer.gather(mesh)

    def magnitudes(self) -> dict[str, Float[Tensor, "1"]]:
        """Return the largest magnitude of each weight in 8 bits, by the names of its parameters."""
        return {
            name: magnitude
            for buffer in self.buffers
            for name, magnitude in buffer.magnitudes().items()
        }

    def stored(self, weight: tuple[str, ...]) -> StoredWeight | None:
        """Return the 8-bit form of a weight; None if the weight is not stored in 8 bits now.

        Args:
            weight: Names of the weight's parameters, from the first row to the last.
        """
        for buffer in self.buffers:
            if weight[0] in buffer.members:
                return buffer.stored_weight(weight)
        return None
