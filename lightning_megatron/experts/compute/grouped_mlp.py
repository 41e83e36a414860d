"""Local experts of a layer: one MLP each, computed together by grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute.choose_backend import (
    LayerBackends,
    choose_layer_backends,
)
from lightning_megatron.experts.compute.expert_biases import add_expert_biases
from lightning_megatron.experts.compute.grouped_linear import (
    CloneTensors,
    grouped_linear,
    grouped_swiglu,
    weighted_activation,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.mlp import is_gated
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.layers.parameters.remade import Recipe
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.model_shape import Activation
from lightning_megatron.plan.shards import ShardRange, even_range, gated_ranges, uneven_range
from lightning_megatron.shapes import Float, Int

#: Operators of a compiled graph choose their backends when they run; the compiler fuses the rest.
_CHOSEN_AT_RUN_TIME = LayerBackends(None, None, fuses_swiglu=False)


class ExpertWeight(nn.Module):
    """One weight matrix of one expert, and the bias of its product if there is one.

    It has no ``forward``: :class:`GroupedMLP` multiplies by the matrices of all experts at once.
    Sizes are those of the full matrix; this rank holds ``ranges`` of dimension ``dim``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        out_features: int,
        in_features: int,
        ranges: tuple[ShardRange, ...],
        dim: int,
        initializer: Initializer | None,
        bias: tuple[ShardRange, ...] | None = None,
    ) -> None:
        super().__init__()
        drawn = initializer or Initializer.normal()
        # The bias precedes the weight, because flat buffers put all biases of a layer in the place
        # of the first one: there they do not separate the weights.
        self.bias = None
        if bias is not None:
            self.bias = _of_expert(sharded_parameter((out_features,), bias, ZEROS))
        self.weight = _of_expert(
            sharded_parameter((out_features, in_features), ranges, drawn, dim=dim)
        )


class GroupedMLP(nn.ModuleDict):
    """Apply to each row the MLP of its expert, and multiply the result by the row's probability.

    Equal to ``probability * MLP_e(row)`` with the MLP of ``layers.mlp``. The probability multiplies
    the inner features, and the bias of the second product. Applied after that product, its backward
    pass would need the product's output. Rows past the last end are undefined.

    Over etp, biases of the first product are cut like its output. Biases of the second product are
    cut by its output, too, although every rank computes a partial sum of all of it: each rank adds
    its part, so that the sum over ranks has every bias once, and no rank has a copy.

    Every expert has its own parameters, named by its index in the layer (``3.gate_up.weight``).
    Names, initial values, checkpoints and optimizer state are therefore the same in every layout,
    and code that reads parameters and their ``ShardSpec`` needs no special case. The kernels read
    the weights of all experts as one tensor. It is a view, because the flat buffers of training
    store parameters of equal size at a constant stride.

    Communication: none. With etp above 1 the outputs are partial sums, which the dispatcher
        reduces. Source: Shazeer et al. 2017; Shazeer 2020 (gates).
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        mesh: ParallelMesh,
        *,
        activation: Activation = "swiglu",
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.config = config
        #: Whether Transformer Engine computes the products, for which the host reads sizes.
        self.uses_engine = False
        # The backends, with the kind of rows and weights that they were chosen for.
        self._backends_of_kind: tuple[tuple[object, ...], LayerBackends] | None = None
        self.first_name = "gate_up" if is_gated(activation) else "up"
        inner = config.ffn_hidden_size
        etp = mesh.etp
        cut = even_range(inner, etp.size, etp.rank, what="ffn_hidden_size of experts", axis="etp")
        parts = gated_ranges(inner, etp.size, etp.rank) if is_gated(activation) else (cut,)
        here = even_range(
            config.num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep"
        )
        of_first = of_down = None
        if config.linear_bias:
            of_first = parts
            of_down = (uneven_range(hidden_size, etp.size, etp.rank),)
            #: First feature of an output whose bias is here.
            self.first_output = of_down[0].start
        # Experts are added in reverse, because flat buffers store parameters in reverse: the
        # experts then lie in ascending order.
        for number in reversed(range(here.start, here.stop)):
            first = ExpertWeight(len(parts) * inner, hidden_size, parts, 0, initializer, of_first)
            second = ExpertWeight(hidden_size, inner, (cut,), 1, output_initializer, of_down)
            self[str(number)] = nn.ModuleDict({self.first_name: first, "down": second})

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the products."""
        return not self.uses_engine

    @property
    def has_biases(self) -> bool:
        """Return whether both products of every expert have biases."""
        return self.config.linear_bias

    def weights(self, name: str) -> list[Float[Tensor, "out_local in_local"]]:
        """Return ``gate_up``, ``up`` or ``down`` of every local expert, in ascending order."""
        return [
            _weight_of(expert._modules[name]) for expert in reversed(list(self._modules.values()))
        ]

    def biases(self, name: str) -> list[Float[Tensor, "_"]]:
        """Return the bias next to each of :meth:`weights`, in the same order."""
        experts: list[Any] = list(self._modules.values())
        return [expert._modules[name].bias for expert in reversed(experts)]

    def matrices(self) -> tuple[list[Float[Tensor, "_ hidden"]], list[Float[Tensor, "hidden ffn"]]]:
        """Return the first matrix of every local expert, and the second."""
        return self.weights(self.first_name), self.weights("down")

    def forward(
        self,
        rows: Float[Tensor, "rows hidden"],
        probabilities: Float[Tensor, "rows"],
        ends: Int[Tensor, "experts"],
        clones: Sequence[CloneTensors] | None = None,
        rows_recipe: Recipe | None = None,
    ) -> Float[Tensor, "rows hidden"]:
        """Return the expert's output for each row, multiplied by the row's probability.

        Args:
            ends: Index one past the last row of each local expert, then of each clone (int32, on
                the device).
            clones: Weights and gradients of the first and of the second matrix of the clones on
                this rank; None means that it has no places for clones.
            rows_recipe: How the backward pass recomputes the rows; None keeps them.
        """
        if clones is None:
            return self._products(rows, probabilities, ends, None, None, rows_recipe)
        self.config.check_clones()
        return self._with_clones(rows, probabilities, ends, *clones, rows_recipe)

    @torch.compiler.disable
    def _with_clones(self, *inputs: Any) -> Tensor:
        return self._products(*inputs)

    def _products(
        self,
        rows: Tensor,
        probabilities: Tensor,
        ends: Tensor,
        first_clones: CloneTensors | None,
        down_clones: CloneTensors | None,
        rows_recipe: Recipe | None,
    ) -> Tensor:
        first, down = self.matrices()
        autocast_dtype = _autocast_dtype(rows)
        if autocast_dtype is not None:
            rows = rows.to(autocast_dtype)
            rows_recipe = None if rows_recipe is None else rows_recipe.to(autocast_dtype)
        backends = self._backends(rows, first, down, autocast_dtype is not None)
        if backends.fuses_swiglu:
            weighted, again = grouped_swiglu(
                rows, first, probabilities, ends, rows_recipe, first_clones
            )
        else:
            inner = grouped_linear(rows, first, ends, backends.first, rows_recipe, first_clones)
            if self.has_biases:
                inner = add_expert_biases(inner, self.biases(self.first_name), ends)
            weighted, again = weighted_activation(inner, probabilities, ends, self.activation)
        output = grouped_linear(weighted, down, ends, backends.down, again, down_clones)
        if self.has_biases:
            output = add_expert_biases(
                output, self.biases("down"), ends, probabilities, self.first_output
            )
        return output

    def _backends(
        self, rows: Tensor, first: Sequence[Tensor], down: Sequence[Tensor], is_autocast: bool
    ) -> LayerBackends:
        """Return the backends of the products; they are chosen again only for another kind."""
        if self.uses_engine:
            return LayerBackends("te", "te", fuses_swiglu=False)
        if torch.compiler.is_compiling():
            return _CHOSEN_AT_RUN_TIME
        # Autocast excludes the fused kernels, even where it does not change the dtype.
        kind = (rows.device, rows.dtype, is_autocast, first[0].shape, len(first))
        if self._backends_of_kind is None or self._backends_of_kind[0] != kind:
            # The kernel adds no biases between the product and SwiGLU.
            is_plain = self.activation == "swiglu" and not self.has_biases
            can_fuse = is_plain and fused_kernels(rows) is not None
            backends = choose_layer_backends(
                rows.device, rows.dtype, first, down, can_fuse=can_fuse
            )
            self._backends_of_kind = (kind, backends)
        return self._backends_of_kind[1]


def _of_expert(parameter: nn.Parameter) -> nn.Parameter:
    return set_shard_spec(parameter, replace(shard_spec_of(parameter), is_expert=True))


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _weight_of(module: Any) -> Tensor:
    """Return a module's weight, without the slow attribute lookup of ``nn.Module`` if possible."""
    weight = module._parameters.get("weight")
    return module.weight if weight is None else weight
