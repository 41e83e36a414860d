"""Linear layers sharded over the tensor axis by output (column) or input features (row)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, Magnitude
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.engine_products import (
    engine_column_linear,
    engine_row_linear,
)
from lightning_megatron.layers.linear.feature_shard import FeatureShard, take_part
from lightning_megatron.layers.linear.fp8_products import fp8_column_linear, fp8_row_linear
from lightning_megatron.layers.linear.regions import column_linear, row_linear
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.layers.parameters.parameter_stack import ParameterStack, split_parameter
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.plan.shards import ShardRange, even_range, full_range
from lightning_megatron.shapes import Float, Shaped


class ColumnParallelLinear(nn.Module):
    """Linear layer ``x A^T + b`` whose output features are sharded over tp.

    Equal to torch.nn.Linear(in_features, out_features, bias) with ``gather_output``, which needs
    equal shards, or with tp=1.

    Args:
        ranges: Rows of the full weight that this rank holds, for fused projections; None means
            equal shards.
        partial: Whether the gradients of rows that several ranks hold must be summed.

    Communication: see ``column_linear``; with ``gather_output`` an all-gather over tp.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = True,
        ranges: Sequence[ShardRange] | None = None,
        partial: bool = False,
        gather_output: bool = False,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        if gather_output and ranges is not None:
            raise ValueError(
                "gather_output needs equal parts of the outputs on all ranks: ranges were given, "
                "whose sizes may differ. Leave out gather_output or ranges.",
            )
        self.in_features = in_features
        self.out_features = out_features
        self.mesh = mesh
        self.gather_output = gather_output
        cut = tuple(
            ranges or [even_range(out_features, mesh.tp.size, mesh.tp.rank, what="out_features")],
        )
        self.weight = sharded_parameter(
            (out_features, in_features),
            cut,
            initializer or Initializer.normal(),
            partial=partial,
        )
        self.bias = None
        if bias:
            self.bias = sharded_parameter((out_features,), cut, ZEROS, partial=partial)
        #: Weights and biases of the layers that are fused in this layer. After ``split`` they
        #: replace ``weight`` and ``bias``.
        self.weights: ParameterStack | None = None
        self.biases: ParameterStack | None = None
        #: Low-rank updates of this rank's outputs; see ``layers.low_rank``.
        self.low_rank: nn.Module | None = None
        #: Settings of products in 8 bits or with Transformer Engine; None means this package's
        #: products in the dtype of the input.
        self.scaling: Scaling | EngineScaling | None = None

    @property
    def weight_parts(self) -> tuple[Shaped[Tensor, "_ in_features"], ...]:
        """Return the tensors that form the weight, from the first row to the last."""
        return (self.weight,) if self.weights is None else self.weights.parts

    @property
    def reads_magnitude(self) -> bool:
        """Return whether :meth:`forward` uses the magnitude of its input."""
        return isinstance(self.scaling, Scaling) and self.scaling.reads_magnitudes

    @property
    def whole_weight(self) -> Float[Tensor, "out_local in_features"]:
        """Return the weight, or that of the fused layers together."""
        return self.weight if self.weights is None else self.weights.concatenate()

    @property
    def whole_bias(self) -> Float[Tensor, "out_local"] | None:
        """Return the bias, or that of the fused layers together; None without a bias."""
        return self.bias if self.biases is None else self.biases.concatenate()

    def split(self, rows: Sequence[int]) -> None:
        """Split the fused weight and bias into one parameter for each of the fused layers.

        The outputs do not change. The new parameters are in :attr:`weights` and :attr:`biases`, and
        share the memory of the fused parameters; ``rows`` are the output features of each full
        layer.
        """
        weight = self.weight
        bias = self.bias
        self.weights = ParameterStack(split_parameter(weight, rows))
        self.register_parameter("weight", None)
        if bias is not None:
            self.biases = ParameterStack(split_parameter(bias, rows))
            self.register_parameter("bias", None)

    def forward(
        self,
        hidden: Float[Tensor, "seq_local *batch in_features"],
        add_bias: bool = True,
        magnitude: Magnitude | None = None,
        of_gradient: GradientMagnitude | None = None,
    ) -> Float[Tensor, "seq *batch out_local"]:
        """Return this rank's outputs, or all of them with ``gather_output``.

        Args:
            add_bias: False if the caller fuses that addition with the next operation.
            magnitude: Largest magnitude of the input; None if it is not known.
            of_gradient: Object in which the backward pass of the operator that reads the output
                stores the magnitude of the output's gradient; None if it stores no magnitude.
        """
        weight = self.whole_weight
        bias = self.whole_bias if add_bias else None
        if self.scaling is None:
            output = column_linear(hidden, weight, bias, self.mesh)
        elif isinstance(self.scaling, EngineScaling):
            output = engine_column_linear(hidden, weight, bias, self.mesh, self.scaling)
        else:
            output = fp8_column_linear(
                hidden, weight, bias, self.mesh, self.scaling, magnitude, of_gradient
            )
        if self.low_rank is not None:
            output = self.low_rank(hidden, output)
        return gather_from_axis(output, self.mesh.tp, dim=-1) if self.gather_output else output

    @override
    def extra_repr(self) -> str:
        parts = self.weights.parts if self.weights is not None else (self.weight,)
        has_bias = self.bias is not None or self.biases is not None
        num_rows = sum(map(len, parts))
        return f"{self.in_features}, {self.out_features} ({num_rows} here), bias={has_bias}"


class RowParallelLinear(nn.Module):
    """Linear layer ``x A^T + b`` whose input features are sharded over tp.

    Equal to torch.nn.Linear(in_features, out_features, bias) of the full inputs. The bias is added
    once, after the sum over tp; every rank holds all of it.

    Shapes: the input has ``in_features`` features with ``split_input``, of which this rank uses its
        shard.

    Communication: see ``row_linear``; with ``split_input`` an all-gather over tp backward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: ParallelMesh,
        *,
        bias: bool = True,
        split_input: bool = False,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.mesh = mesh
        self.split_input = split_input
        cut = even_range(in_features, mesh.tp.size, mesh.tp.rank, what="in_features")
        self.weight = sharded_parameter(
            (out_features, in_features),
            [cut],
            initializer or Initializer.normal(),
            dim=1,
        )
        # Under sequence parallelism each rank adds the bias only to its positions, so the gradients
        # of the bias must be summed.
        whole = full_range(out_features, mesh.tp.rank)
        self.bias = None
        if bias:
            is_partial = mesh.sequence_parallel
            self.bias = sharded_parameter((out_features,), [whole], ZEROS, partial=is_partial)
        #: Low-rank updates of the outputs; see ``layers.low_rank``.
        self.low_rank: nn.Module | None = None
        #: Settings of products in 8 bits or with Transformer Engine; None means this package's
        #: products in the dtype of the input.
        self.scaling: Scaling | EngineScaling | None = None

    @property
    def weight_parts(self) -> tuple[Shaped[Tensor, "out_features in_local"], ...]:
        """Return a tuple of the one tensor that forms the weight."""
        return (self.weight,)

    @property
    def reads_magnitude(self) -> bool:
        """Return whether :meth:`forward` uses the magnitude of its input."""
        return isinstance(self.scaling, Scaling) and self.scaling.reads_magnitudes

    def forward(
        self,
        hidden: Float[Tensor, "seq *batch in_local"],
        add_bias: bool = True,
        magnitude: Magnitude | None = None,
    ) -> Float[Tensor, "seq_local *batch out_features"]:
        """Return the product summed over the tensor-parallel ranks, plus the bias.

        The arguments are those of :meth:`ColumnParallelLinear.forward`.
        """
        if self.split_input or isinstance(hidden, FeatureShard):
            hidden = take_part(hidden, self.mesh.tp)
        bias = self.bias if add_bias else None
        if self.scaling is None:
            output = row_linear(hidden, self.weight, bias, self.mesh)
        elif isinstance(self.scaling, EngineScaling):
            output = engine_row_linear(hidden, self.weight, bias, self.mesh, self.scaling)
        else:
            output = fp8_row_linear(hidden, self.weight, bias, self.mesh, self.scaling, magnitude)
        return output if self.low_rank is None else self.low_rank(hidden, output)

    @override
    def extra_repr(self) -> str:
        num_columns = self.weight.shape[1]
        has_bias = self.bias is not None
        return f"{self.in_features} ({num_columns} here), {self.out_features}, bias={has_bias}"
