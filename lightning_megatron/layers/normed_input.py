"""Norm of the residual stream, which also computes the magnitude that the next layer needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor, nn

from lightning_megatron.layers.fp8.magnitude import Magnitude, no_magnitude
from lightning_megatron.layers.recompute import output_recomputed
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


def norm_recomputed(
    norm: nn.Module | None,
    stream: Float[Tensor, "*tokens hidden"],
    normed: Float[Tensor, "*tokens hidden"],
) -> AbstractContextManager[None]:
    """Return a context in which operators recompute a norm's output instead of keeping it.

    The norm's attribute ``is_recomputed`` chooses that; otherwise the context does nothing.

    Args:
        norm: The norm; None means that there is none.
        stream: The residual stream.
        normed: Output of the norm for this stream.
    """
    if norm is None or not getattr(norm, "is_recomputed", False):
        return nullcontext()
    return output_recomputed(normed, partial(norm.forward, stream.detach()))
