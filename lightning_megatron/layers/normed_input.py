"""Norm of the residual stream, which also computes the magnitude that the next layer needs."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.layers.fp8.magnitude import Magnitude, no_magnitude
from lightning_megatron.shapes import Float


def normalise_for(
    reader: nn.Module | None,
    norm: nn.Module | None,
    hidden: Float[Tensor, "*tokens hidden"],
    update: Float[Tensor, "*tokens hidden"] | None = None,
) -> tuple[Float[Tensor, "*tokens hidden"], Float[Tensor, "*tokens hidden"], dict[str, Magnitude]]:
    """Add an update to the residual stream and normalise the sum for a layer.

    Returns:
        The new residual stream, the normalised vectors, and keyword arguments for the call of the
        layer: ``magnitude`` if its attribute ``reads_magnitude`` is true.

    Args:
        reader: Layer that is called with the normalised vectors; None if no layer can use the
            magnitude.
        norm: The norm; None means that the layer reads the residual stream.
        hidden: The residual stream.
        update: Tensor that is added to the stream; None means no addition.
    """
    if norm is None:
        stream = hidden if update is None else hidden + update
        return stream, stream, {}
    if not getattr(reader, "reads_magnitude", False):
        stream, normed = norm(hidden, update, True)
        return stream, normed, {}
    bits = no_magnitude(hidden)
    stream, normed = norm(hidden, update, True, bits)
    return stream, normed, {"magnitude": Magnitude(normed, bits)}
