"""The experts of a layer that this rank holds: each an MLP of its own, all computed together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_megatron.experts.grouped_linear import grouped_linear
from lightning_megatron.experts.grouped_swiglu import grouped_swiglu, is_one_launch
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.init import Initializer, sharded_parameter
from lightning_megatron.layers.kernel_choice import fused_kernels
from lightning_megatron.layers.mlp import Activation, activate, is_gated
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.shards import ShardRange, even_range, gated_ranges


class ExpertWeight(nn.Module):
    """Hold one matrix of one expert; the experts compute with those of all.

    Args:
        out_features: Rows of the full matrix (elements).
        in_features: Columns of the full matrix (elements).
        ranges: What this rank holds of it.
        dim: The dimension that ``ranges`` cut.
        initializer: How the full matrix starts.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        ranges: tuple[ShardRange, ...],
        dim: int,
        initializer: Initializer | None,
    ) -> None:
        super().__init__()
        drawn = initializer or Initializer.normal()
        weight = sharded_parameter((out_features, in_features), ranges, drawn, dim=dim)
        self.weight = set_shard_spec(weight, replace(shard_spec_of(weight), is_expert=True))


class GroupedMLP(nn.ModuleDict):
    """Apply to each row the MLP of its expert, and multiply by the row's probability.

    Equal to ``probability * MLP_e(row)`` with the MLP of ``layers.mlp`` without biases. The probability is applied to
    the inner features, where the second product's backward pass needs no output of it.

    Every expert has parameters of its own, under its number in the whole model (``3.gate_up.weight``): names, first
    values, checkpoints and optimizer state are the same in every layout, and whatever reads parameters and their
    ShardSpec knows experts without a further word. Products want the weights of all experts as one tensor: it is a view
    of them, because the flat buffers of training lay parameters of equal sizes out at equal distances.

    Shapes: rows ``(R, D)`` sorted by expert; probabilities ``(R)``; ends ``(E/ep)``; output ``(R, D)``. Rows past the
    last end are undefined.

    Args:
        hidden_size: Size of each row (elements).
        config: Numbers and sizes of the experts.
        mesh: The groups of this rank.
        activation: As of ``layers.mlp``.
        initializer: How first weights start.
        output_initializer: How second weights start.

    Raises:
        ParallelPlanError: If the experts do not divide by ep, or their inner features by etp.

    Communication: none; with etp above 1 the outputs are parts of a sum over etp, which the dispatcher adds up.
    Source: Shazeer et al. 2017; Shazeer 2020 (gates).
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
        self.first_name = "gate_up" if is_gated(activation) else "up"
        inner, etp = config.ffn_hidden_size, mesh.etp
        cut = even_range(inner, etp.size, etp.rank, what="ffn_hidden_size of experts", axis="etp")
        parts = gated_ranges(inner, etp.size, etp.rank) if is_gated(activation) else (cut,)
        here = even_range(config.num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep")
        # The last one first: flat buffers have parameters in reverse order, and views of several go forward.
        for number in reversed(range(here.start, here.stop)):
            first = ExpertWeight(len(parts) * inner, hidden_size, parts, 0, initializer)
            second = ExpertWeight(hidden_size, inner, (cut,), 1, output_initializer)
            self[str(number)] = nn.ModuleDict({self.first_name: first, "down": second})

    def weights(self, name: str) -> list[Tensor]:
        """List one of the matrices of all experts here, in their order.

        Args:
            name: ``gate_up`` or ``up``, or ``down``.
        """
        return [_weight_of(expert._modules[name]) for expert in reversed(list(self._modules.values()))]

    def forward(self, rows: Tensor, probabilities: Tensor, ends: Tensor) -> Tensor:
        """Return every row's output of its expert, times its probability.

        Args:
            rows: Rows sorted by expert.
            probabilities: What each row's output is multiplied by.
            ends: One past the last row of every expert here (int32, on the device).
        """
        first = self.weights(self.first_name)
        if self.activation == "swiglu" and is_one_launch(rows, first):
            weighted = grouped_swiglu(rows, first, probabilities, ends)
        else:
            weighted = weighted_activation(grouped_linear(rows, first, ends), probabilities, ends, self.activation)
        return grouped_linear(weighted, self.weights("down"), ends)


def _weight_of(module: Any) -> Tensor:
    """Return the weight; asked of all experts in every product, so not by nn.Module's search where it is plain."""
    weight = module._parameters.get("weight")
    return module.weight if weight is None else weight


def weighted_activation(inner: Tensor, probabilities: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to rows, and multiply each by its probability.

    Shapes: inner ``(R, F)``, of gated activations ``(R, 2 F)``; probabilities ``(R)``; output ``(R, F)``. Rows past the
    last end are undefined.

    Args:
        inner: What the activation is applied to.
        probabilities: Of every row, in float32 or wider.
        ends: One past the last row of every expert here.
        activation: As of ``layers.mlp``.
    """
    kernels = fused_kernels(inner) if activation == "swiglu" else None
    if kernels is not None:
        return kernels.apply_weighted_swiglu(inner, probabilities, ends)
    return (activate(inner, activation) * probabilities.unsqueeze(-1)).to(inner.dtype)
