"""Normalisation layers, replicated on every tensor-parallel rank or with sharded features."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.collectives import copy_to_axis, reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.magnitude import Magnitude, find_magnitude, no_magnitude
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.gradient_slot import slot_of
from lightning_megatron.layers.parameters.init import ONES, ZEROS, Initializer, sharded_parameter
from lightning_megatron.layers.recompute import output_recomputed
from lightning_megatron.layers.transformer_engine.engine_norm import engine_norm
from lightning_megatron.plan.shards import ShardRange, full_range
from lightning_megatron.shapes import Float, Int


class ShardedRMSNorm(nn.Module):
    """RMS norm of vectors whose features are sharded over the tensor-parallel axis.

    Equal to torch.nn.RMSNorm(num_features, eps) of the full vectors. The mean square of half types
    is computed in float32.

    Args:
        part: Features that this rank holds; ranks may hold copies of them (elements).
        offset: Number that is added to the weight; the weight starts at 1 minus it.

    Communication: one all-reduce over tp forward, one backward, of a number for each vector.
    """

    def __init__(
        self,
        num_features: int,
        part: ShardRange,
        mesh: ParallelMesh,
        *,
        eps: float = 1e-5,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.mesh = mesh
        self.eps = eps
        self.offset = offset
        #: Features on all ranks, copies included.
        self.num_counted = part.size * mesh.tp.size
        initializer = Initializer.constant(1.0 - offset) if offset else ONES
        has_copies = self.num_counted > num_features
        self.weight = sharded_parameter((num_features,), [part], initializer, partial=has_copies)

    def forward(
        self, features: Float[Tensor, "seq batch in_local"]
    ) -> Float[Tensor, "seq batch in_local"]:
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        # Every rank's result depends on the sum, so the gradient of the sum is summed, too.
        squares = reduce_from_axis(wide.square().sum(-1, keepdim=True), self.mesh.tp)
        mean = copy_to_axis(squares, self.mesh.tp) / self.num_counted
        scale = self.weight.to(wide.dtype) + self.offset
        return (wide * torch.rsqrt(mean + self.eps) * scale).to(features.dtype)


class _Norm(nn.Module):
    """Norm of the residual stream, fused with the residual addition before it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float
    is_rms: bool
    offset: float = 0.0
    #: Whether Transformer Engine computes the norm.
    uses_engine: bool = False
    #: Whether the backward pass of the layer that reads the output recomputes it.
    is_recomputed: bool = False

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        update: Float[Tensor, "*tokens hidden"] | None = None,
        with_stream: bool = False,
        magnitudes: Int[Tensor, "parts"] | None = None,
    ) -> (
        Float[Tensor, "*tokens hidden"]
        | tuple[Float[Tensor, "*tokens hidden"], Float[Tensor, "*tokens hidden"]]
    ):
        """Return the normalised vectors in the dtype of the input.

        Args:
            update: Tensor that is added to ``hidden`` before the norm; None means no addition.
            with_stream: Whether to return ``(hidden + update, normalised)``. A layer that uses both
                results should get them from one call, so that one kernel adds both gradients.
            magnitudes: Bit patterns, raised to the largest magnitude of the normalised vectors.
        """
        kernels = None if self.uses_engine else fused_kernels(hidden)
        if self.uses_engine and hidden.numel() and self.offset in (0.0, 1.0):
            stream = hidden if update is None else hidden + update
            normalised = engine_norm(
                stream, self.weight, self.bias, self.eps, self.is_rms, adds_one=self.offset == 1
            )
        elif kernels is not None and hidden.shape[-1] <= kernels.MAX_NORM_WIDTH:
            scale = self.scale()
            bias = self.bias
            sinks = (slot and slot.add_sum for slot in (slot_of(scale), slot_of(bias)))
            stream, normalised = kernels.add_norm(
                hidden,
                update,
                scale,
                bias,
                self.eps,
                self.is_rms,
                *sinks,
                magnitudes,
            )
            magnitudes = None
        else:
            stream = hidden if update is None else hidden + update
            normalised = self._normalise(stream)
        if magnitudes is not None:
            find_magnitude(normalised, magnitudes)
        return (stream, normalised) if with_stream else normalised

    def scale(self) -> Float[Tensor, "hidden"]:
        return self.weight

    def _normalise(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class LayerNorm(_Norm):
    """Layer norm: normalise each vector to mean 0 and variance 1, then scale and shift it.

    Equal to torch.nn.LayerNorm(hidden_size, eps, bias=bias). Statistics of half types are computed
    in float32.
    """

    is_rms = False

    def __init__(
        self,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(hidden_size, mesh, ONES)
        self.bias = _replicated(hidden_size, mesh, ZEROS) if bias else None

    def _normalise(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """RMS norm: scale each vector to a root mean square of 1, then multiply it by a weight.

    Equal to torch.nn.RMSNorm(hidden_size, eps). With ``offset`` 1 equal to Hugging Face's
    GemmaRMSNorm. Statistics of half types are computed in float32.

    Shapes: ``hidden`` is ``head_dim`` for norms of the heads of this rank.

    Args:
        offset: Number that is added to the weight, in float32 for half types; the weight starts at
            1 minus it.
        partial: Whether the ranks normalise different vectors, so that their gradients must be
            summed; None means under sequence parallelism only.
    """

    is_rms = True
    bias = None

    def __init__(
        self,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        eps: float = 1e-5,
        offset: float = 0.0,
        partial: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        initializer = Initializer.constant(1.0 - offset) if offset else ONES
        self.weight = _replicated(hidden_size, mesh, initializer, partial)

    def scale(self) -> Float[Tensor, "hidden"]:
        """Return the factor of every feature, the offset included."""
        if not self.offset:
            return self.weight
        # In half precision, a weight that is small compared with the offset would be rounded away.
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def _normalise(self, hidden: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        scale = self.scale()
        return F.rms_norm(hidden.to(scale.dtype), scale.shape, scale, self.eps).to(hidden.dtype)


def _replicated(
    size: int,
    mesh: ParallelMesh,
    initializer: Initializer,
    partial: bool | None = None,
) -> nn.Parameter:
    # Under sequence parallelism each rank normalises its own positions only, so gradients are
    # summed over tp.
    partial = mesh.sequence_parallel if partial is None else partial
    return sharded_parameter(
        (size,),
        [full_range(size, mesh.tp.rank)],
        initializer,
        partial=partial,
    )


def add_and_normalise(
    norm: nn.Module | None,
    hidden: Float[Tensor, "*tokens hidden"],
    update: Float[Tensor, "*tokens hidden"] | None = None,
    *,
    reader: nn.Module | None = None,
) -> tuple[Float[Tensor, "*tokens hidden"], Float[Tensor, "*tokens hidden"], dict[str, Magnitude]]:
    """Add an update to the residual stream, and normalise the sum.

    The results are the new stream, the normalised vectors (the stream itself without a norm), and
    keyword arguments for the call of the layer: ``magnitude`` if its attribute ``reads_magnitude``
    is true.

    Args:
        reader: Layer that is called with the normalised vectors; None if no layer can use the
            magnitude.
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
    """
    if norm is None or not getattr(norm, "is_recomputed", False):
        return nullcontext()
    return output_recomputed(normed, partial(norm.forward, stream.detach()))
