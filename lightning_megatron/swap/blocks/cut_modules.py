"""Plain modules of torch.nn, cut between column and row layers, by positions or by vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    BoundaryGradients,
    all_reduce_,
    broadcast_,
    copy_to_axis,
    gather_from_axis,
    reduce_from_axis,
    split_to_axis,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec, set_shard_spec
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude
from lightning_megatron.layers.fused.dropout import tensor_region_stream
from lightning_megatron.layers.linear.feature_shard import (
    FeatureShard,
    ShardUse,
    gather_sections,
    gathered,
    take_part,
)
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.linear.regions import column_linear, row_linear
from lightning_megatron.layers.linear.sequence_shard import CUT, SequenceShard, gather_shard
from lightning_megatron.layers.loss.cross_entropy import check_ids
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.plan.shards import ShardRange, even_range, padded_vocab_size, vocab_range


def shard_rows(source: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """Return a module like ``source`` with room for this rank's rows of every parameter.

    The result equals ``source`` on this rank's part of the features or heads. Each feature or head
    has its own row.

    Args:
        source: Module without children, whose parameters have the same number of rows; not changed.
    """
    result = copy.copy(source)
    result._parameters = dict(source._parameters)
    for key, parameter in source._parameters.items():
        if parameter is not None:
            cut = even_range(parameter.shape[0], mesh.tp.size, mesh.tp.rank, what=key)
            result._parameters[key] = sharded_parameter(tuple(parameter.shape), [cut], ZEROS)
    return result


class LatentLinear(nn.Linear):
    """Replicated torch.nn.Linear whose last outputs enter the heads of every rank.

    Latent attention compresses keys and values together with one positional key that all heads use.
    A ``column`` layer consumes the compressed features. The positional key enters the
    tensor-parallel region in this layer.

    Shapes: input ``(..., in)``; output ``(..., out)``.

    Args:
        num_shared: Number of last outputs, which the heads of every rank use (elements).

    Communication: one all-reduce over tp of these outputs' gradient backward.
    """

    def __init__(self, source: nn.Linear, num_shared: int, mesh: ParallelMesh) -> None:
        nn.Module.__init__(self)
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.num_shared = num_shared
        self.mesh = mesh
        self.weight = source.weight
        self.register_parameter("bias", source.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        return _LastFeatures.apply(
            F.linear(input, self.weight, self.bias), self.num_shared, self.mesh.tp
        )


class _LastFeatures(torch.autograd.Function):
    """Entry of the last features into a tensor-parallel region; only their gradient is summed."""

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients:
        """Describe this call as a border at which partial gradients are summed."""
        return BoundaryGradients((False,), takes_parts=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, tp: MeshAxis) -> Tensor:
        ctx.count = count
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = grads[0].clone()
        last = result[..., -ctx.count :]
        last.copy_(all_reduce_(last.contiguous(), ctx.tp))
        return result, None, None


class TensorDropout(nn.Dropout):
    """Dropout between a column and a row layer, with different masks on every rank.

    Equal to torch.nn.Dropout, except that masks differ between tensor-parallel ranks. Recomputation
    draws the same masks again.

    Args:
        layer: Number of the layer for random streams; None inside a block that selects the streams
            itself.
    """

    def __init__(self, p: float, mesh: ParallelMesh, layer: int | None = None) -> None:
        super().__init__(p)
        self.mesh = mesh
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, with elements dropped during training."""
        if not self.training or self.p == 0.0:
            return input
        if isinstance(input, FeatureShard):
            return input.like(self.forward(input.part), input.dim_cut)
        if self.layer is not None:
            self.mesh.random.seek(self.layer)
        with tensor_region_stream(self.p, self.training, self.mesh):
            return F.dropout(input, self.p, training=True)


#: Maximum difference between two ranks' copies of a tensor, relative to its largest element.
_TOLERANCE = 1e-2


class _Entry:
    """Function that cuts a module's complete inputs along the sequence."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_checked = False

    def __call__(self, hidden: Tensor, mesh: ParallelMesh) -> Tensor:
        """Return this rank's positions.

        Raises:
            ValueError: If the length of the sequence is not a multiple of tp.
        """
        if isinstance(hidden, SequenceShard):
            return hidden.part
        if not self._is_checked:
            self._check(hidden.detach(), mesh)
            self._is_checked = True
        return split_to_axis(hidden, mesh.tp, CUT)

    def _check(self, hidden: Tensor, mesh: ParallelMesh) -> None:
        first = broadcast_(hidden.clone(), mesh.tp, 0)
        differs = ((first - hidden).abs().max() > _TOLERANCE * first.abs().max()).to(hidden.dtype)
        if float(all_reduce_(differs, mesh.tp, "max")):
            raise UnsupportedError(
                f"{self.name!r} of the kind 'sequence' must get the same input on all "
                "tensor-parallel ranks: here each rank has its own part of the features. Between a "
                "'column' and a 'row' layer use the kind 'dropout' or 'partial'; elsewhere use "
                "'replicate'."
            )


class SequenceLayerNorm(nn.LayerNorm):
    """LayerNorm of this rank's positions; equal to torch.nn.LayerNorm."""

    def __init__(self, name: str, source: nn.LayerNorm, mesh: ParallelMesh) -> None:
        affine = source.elementwise_affine
        super().__init__(
            source.normalized_shape, source.eps, affine, bias=affine and source.bias is not None
        )
        self.mesh = mesh
        self._entry = _Entry(name)
        _gather_parts_of_gradients(self, mesh)

    @override
    def forward(self, input: Tensor) -> Tensor:
        return SequenceShard.of(super().forward(self._entry(input, self.mesh)), self.mesh.tp)


class SequenceRMSNorm(nn.RMSNorm):
    """RMSNorm of this rank's positions; equal to torch.nn.RMSNorm."""

    def __init__(self, name: str, source: nn.RMSNorm, mesh: ParallelMesh) -> None:
        super().__init__(source.normalized_shape, source.eps, source.elementwise_affine)
        self.mesh = mesh
        self._entry = _Entry(name)
        _gather_parts_of_gradients(self, mesh)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return SequenceShard.of(super().forward(self._entry(x, self.mesh)), self.mesh.tp)


class SequenceDropout(TensorDropout):
    """Dropout of this rank's positions, with different masks on every rank."""

    def __init__(self, name: str, p: float, mesh: ParallelMesh, layer: int | None) -> None:
        super().__init__(p, mesh, layer)
        self._entry = _Entry(name)

    @override
    def forward(self, input: Tensor) -> Tensor:
        return SequenceShard.of(super().forward(self._entry(input, self.mesh)), self.mesh.tp)


class SequenceColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear that gathers the positions of its inputs.

    Communication: if the inputs are parts of sequences, an all-gather over tp forward, and an
    all-gather and a reduce-scatter backward.
    """

    @override
    def forward(
        self,
        hidden: Tensor,
        add_bias: bool = True,
        magnitude: Magnitude | None = None,
        of_gradient: GradientMagnitude | None = None,
    ) -> Tensor:
        if not isinstance(hidden, SequenceShard):
            return super().forward(hidden, add_bias, magnitude, of_gradient)
        shares = replace(self.mesh, sequence_parallel=True)
        rows = hidden.part.movedim(CUT, 0)
        output = column_linear(rows, self.weight, self.bias if add_bias else None, shares).movedim(
            0, CUT
        )
        return gather_from_axis(output, self.mesh.tp, dim=-1) if self.gather_output else output


class SequenceRowLinear(RowParallelLinear):
    """RowParallelLinear whose outputs are scattered over the positions.

    The mesh of the layer has sequence parallelism.

    Communication: a reduce-scatter over tp forward, an all-gather backward.
    """

    @override
    def forward(
        self, hidden: Tensor, add_bias: bool = True, magnitude: Magnitude | None = None
    ) -> Tensor:
        has_part = isinstance(hidden, FeatureShard)
        hidden = hidden if has_part else gather_shard(hidden)
        if has_part or self.split_input:
            hidden = take_part(hidden, self.mesh.tp)
        rows = hidden.movedim(CUT, 0)
        output = row_linear(rows, self.weight, self.bias if add_bias else None, self.mesh)
        return SequenceShard.of(output.movedim(0, CUT), self.mesh.tp)


class FullColumnLinear(SequenceColumnLinear):
    """Linear layer whose output features are sharded, while user code sees all of them.

    Equal to torch.nn.Linear(in_features, sum(sections), bias).

    Args:
        sections: Output features of each of the layers that are fused in this one (elements). Every
            rank has an equal part of each.

    Communication: that of ``column_linear``, and of the functions that need all features.
    """

    def __init__(
        self, in_features: int, sections: Sequence[int], mesh: ParallelMesh, *, bias: bool
    ) -> None:
        starts = accumulate(sections, initial=0)
        ranges = []
        for start, size in zip(starts, sections, strict=False):
            cut = even_range(size, mesh.tp.size, mesh.tp.rank, what="out_features")
            ranges.append(ShardRange(start + cut.start, start + cut.stop))
        super().__init__(in_features, sum(sections), mesh, bias=bias, ranges=ranges)
        self.sections = tuple(sections)
        #: Use of the outputs by user code.
        self.use = ShardUse()

    @override
    def forward(
        self,
        hidden: Tensor,
        add_bias: bool = True,
        magnitude: Magnitude | None = None,
        of_gradient: GradientMagnitude | None = None,
    ) -> Tensor:
        part = super().forward(gathered(hidden), add_bias, magnitude, of_gradient)
        if torch.compiler.is_compiling():
            return gather_sections(part, self.mesh.tp, part.dim() - 1, self.sections)
        return FeatureShard.of(part, self.mesh.tp, part.dim() - 1, self.sections, self.use)


def gather_feature_inputs(module: nn.Module) -> None:
    """Register a hook that gathers the inputs of a block that needs all features."""
    module.register_forward_pre_hook(_all_features, with_kwargs=True)


def _all_features(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return tuple(map(gathered, args)), {name: gathered(value) for name, value in kwargs.items()}


def gather_sequence_inputs(module: nn.Module) -> None:
    """Register a hook that gathers complete sequences for a block that needs them."""
    module.register_forward_pre_hook(_full_inputs, with_kwargs=True)


def _full_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    gathered = {name: gather_shard(value) for name, value in kwargs.items()}
    return tuple(map(gather_shard, args)), gathered


def _gather_parts_of_gradients(module: nn.Module, mesh: ParallelMesh) -> None:
    for parameter in module.parameters():
        set_shard_spec(parameter, replicated_spec(parameter, mesh.tp.rank, partial=True))


#: Multiple to which each rank's rows are padded for tensor cores. A full tensor has no padding.
ROWS_MULTIPLE = 8


class EmbeddingOverVocabulary(nn.Module):
    """Embedding whose rows are cut over tp.

    Equal to torch.nn.Embedding(num_embeddings, embedding_dim, padding_idx).

    Shapes: ids ``(...)``; output ``(..., D)``.

    Raises:
        IndexError: In forward, if an id is outside the table (on CPU; a CUDA kernel asserts).

    Communication: one all-reduce over tp forward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: ParallelMesh,
        *,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.mesh = mesh
        self.weight = _vocabulary_parameter(
            (num_embeddings, embedding_dim), Initializer.normal(), mesh
        )
        self.first = mesh.tp.rank * self.weight.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        """Return the vector of every id."""
        check_ids(input, self.num_embeddings)
        num_rows = self.weight.shape[0]
        local = input - self.first
        is_remote = (local < 0) | (local >= num_rows)
        # An illegal id is mapped to an illegal row, so that the CUDA kernel that reads the row
        # asserts.
        illegal = (input < 0) | (input >= self.num_embeddings)
        index = local.masked_fill(is_remote, 0).masked_fill(illegal, num_rows)
        vectors = F.embedding(index, self.weight, padding_idx=self._local_padding_idx())
        return reduce_from_axis(vectors.masked_fill(is_remote.unsqueeze(-1), 0.0), self.mesh.tp)

    def _local_padding_idx(self) -> int | None:
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.first
        return local if 0 <= local < self.weight.shape[0] else None

    @override
    def extra_repr(self) -> str:
        return f"{self.num_embeddings} ({self.weight.shape[0]} here), {self.embedding_dim}"


class LinearOverVocabulary(nn.Module):
    """Linear layer ``x A^T + b`` with outputs cut over tp and gathered.

    Equal to torch.nn.Linear(in_features, out_features, bias). Its rows are sharded like those of
    EmbeddingOverVocabulary, so that the two can share one weight.

    Shapes: input ``(..., in)``; output ``(..., out)``.

    Communication: an all-gather over tp forward, an all-reduce backward.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.mesh = mesh
        self.weight = _vocabulary_parameter((out_features, in_features), Initializer.normal(), mesh)
        self.bias = _vocabulary_parameter((out_features,), ZEROS, mesh) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs on every rank."""
        part = F.linear(copy_to_axis(input, self.mesh.tp), self.weight, self.bias)
        # Padding rows follow the last true row, so that removing them keeps the true outputs in
        # order.
        return gather_from_axis(part, self.mesh.tp, dim=-1)[..., : self.out_features]

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features} ({self.weight.shape[0]} here), "
            f"bias={self.bias is not None}"
        )


def _vocabulary_parameter(
    full_shape: tuple[int, ...], initializer: Initializer, mesh: ParallelMesh
) -> nn.Parameter:
    num_rows = full_shape[0]
    tp = mesh.tp
    return sharded_parameter(
        full_shape,
        [vocab_range(num_rows, tp.size, tp.rank, ROWS_MULTIPLE)],
        initializer,
        local_size=padded_vocab_size(num_rows, tp.size, ROWS_MULTIPLE) // tp.size,
    )
