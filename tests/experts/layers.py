"""Layers of experts with the same weights in every layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.experts import ExpertsConfig
from tests.experts.dense import draw

SIZE, INNER, NUM_EXPERTS, TOP_K, S, B = 6, 8, 4, 2, 8, 2
LOSSES = {"aux_loss": 0.3, "z_loss": 0.01, "aux_loss_scope": "sequence"}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_ffn_hidden_size": 8, "shared_gate": True},
    "sigmoid with biases": {"scoring": "sigmoid", "expert_bias": True, "shared_ffn_hidden_size": 4},
    "capacity": {"capacity_factor": 0.6},
    "one choice": {"top_k": 1},
    "experts with biases": {"linear_bias": True, "router_bias": True},
}


def layer_of(
    mesh: ParallelMesh | None = None, options: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """Build a layer with the same full weights in every layout."""
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "ffn_hidden_size": INNER}
    config = ExpertsConfig(**{**sizes, **LOSSES, **settings})
    layer = MixtureOfExperts(SIZE, config, mesh or ParallelMesh.single(), **options or {}).double()
    for name, parameter in layer.named_parameters():
        spec = shard_spec_of(parameter)
        parameter.data = spec.shard(draw(name, shape=spec.full_shape)).contiguous()
    return layer


def hidden_of(*names: object) -> Tensor:
    return draw("hidden", *names, shape=(S, B, SIZE))


def run(
    layer: MixtureOfExperts, hidden: Tensor, output_gradient: Tensor, weight: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return output and gradient of the input, and keep gradients of
    parameters.
    """
    hidden = hidden.clone().requires_grad_()
    layer.loss_weight.value = weight
    output = layer(hidden)
    (weight * (output * output_gradient).sum()).backward()
    assert hidden.grad is not None
    return output.detach(), hidden.grad
