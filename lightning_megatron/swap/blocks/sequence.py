"""Norms, dropouts and linear layers of plain modules under sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import (
    all_reduce_,
    broadcast_,
    gather_from_axis,
    split_to_axis,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec, set_shard_spec
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.linear.regions import column_linear, row_linear
from lightning_megatron.layers.linear.sequence_shard import CUT, SequenceShard, gather_shard
from lightning_megatron.swap.blocks.sharded_features import TensorDropout

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

    def __init__(self, name: str, p: float, mesh: ParallelMesh, layer: int) -> None:
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
        if self.split_input:
            hidden = split_to_axis(gather_shard(hidden), self.mesh.tp, dim=-1)
        rows = gather_shard(hidden).movedim(CUT, 0)
        output = row_linear(rows, self.weight, self.bias if add_bias else None, self.mesh)
        return SequenceShard.of(output.movedim(0, CUT), self.mesh.tp)


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
