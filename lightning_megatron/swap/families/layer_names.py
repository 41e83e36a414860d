"""Tensor names of routers, of experts and of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.swap.tensors.mapping import Source, TensorMap, joined, joined_layers

#: Field of a configuration for training settings for which Hugging Face has no fields.
SETTINGS = "expert_settings"


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of mixtures of experts, with ``{}`` for the layer and for the expert.

    Every expert has separate tensors, so that any group of ranks can read and write the tensors of
    its experts.

    Biases of the products of experts, and of the router's logits, have the names of the weights
    with ``bias`` in place of ``weight``.

    Args:
        router: Projection of tokens to the router's logits.
        up: First projections of an expert: gate and up, the joint one, or the one before the
            activation.
        down: Second projection of an expert.
        bias: Biases of experts, if there are any; the name of the tensor.
        shared_up: First projections of the shared MLP next to the experts, if there is one.
        shared_down: Second projection of the shared MLP.
        shared_gate: Projection of tokens to the gate of the shared MLP's output, if there is one.
    """

    router: str
    up: tuple[str, ...]
    down: str
    bias: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""

    def __call__(self, config: GPTConfig) -> tuple[TensorMap, ...]:
        """List the sources of the full tensors of all mixtures of experts in a model."""
        layers = [layer for layer in range(config.num_layers) if config.has_experts_in(layer)]
        return tuple(tensor for layer in layers for tensor in self.layer(config, layer))

    def layer(self, config: GPTConfig, layer: int) -> list[TensorMap]:
        """List the sources of the full tensors of one layer's mixture."""
        experts = config.experts
        assert experts is not None, "only layers with experts are asked for"
        prefix = f"layers.{layer}.mlp"
        tensors = self._router(experts, config.hidden_size, prefix, layer)
        for number in range(experts.num_experts):
            tensors += _mlp(
                f"{prefix}.experts.{number}",
                tuple(name.format(layer, number) for name in self.up),
                self.down.format(layer, number),
                config,
                experts.ffn_hidden_size,
                experts.linear_bias,
            )
        if experts.shared_ffn_hidden_size is not None:
            up = tuple(name.format(layer) for name in self.shared_up)
            down = self.shared_down.format(layer)
            size = experts.shared_ffn_hidden_size
            tensors += _mlp(f"{prefix}.shared", up, down, config, size, has_bias=False)
            if experts.shared_gate:
                gate = f"{self.shared_gate.format(layer)}.weight"
                shape = (1, config.hidden_size)
                tensors.append(joined(f"{prefix}.shared.gate.weight", shape, gate))
        return tensors

    def _router(
        self, experts: ExpertsConfig, size: int, prefix: str, layer: int
    ) -> list[TensorMap]:
        count = experts.num_experts
        router = self.router.format(layer)
        tensors = joined_layers(
            f"{prefix}.router", (count, size), router, has_bias=experts.router_bias
        )
        if experts.expert_bias:
            source = Source(self.bias.format(layer), count)
            # Its steps would be rounded away in a half type.
            tensors.append(
                TensorMap(f"{prefix}.router.expert_bias", (count,), (source,), torch.float32)
            )
        return tensors


def is_training_only(name: str) -> bool:
    """Return whether a tensor is a router's token statistics instead of a weight."""
    return name.endswith(".step_shares")


def _mlp(
    target: str, up: tuple[str, ...], down: str, config: GPTConfig, inner: int, has_bias: bool
) -> list[TensorMap]:
    kind, num_rows = ("gate_up", 2 * inner) if config.is_gated else ("up", inner)
    size = config.hidden_size
    return [
        *joined_layers(f"{target}.{kind}", (num_rows, size), *up, has_bias=has_bias),
        *joined_layers(f"{target}.down", (size, inner), down, has_bias=has_bias),
    ]


@dataclass(frozen=True)
class LatentNames:
    """Tensor names of latent attention, with ``{}`` for the layer.

    Args:
        query_down: Projection to latent vectors of queries.
        query_norm: Norm of the latent vectors of queries.
        query_up: Projection of the latent vectors to query heads.
        query: Projection of the hidden states to query heads, without latent vectors.
        key_value_down: Projection to latent vectors of keys and values, and to the keys' elements
            that all heads share.
        key_value_norm: Norm of these latent vectors.
        key_value: Projection of these latent vectors to the keys and values of one head after the
            other.
    """

    query_down: str
    query_norm: str
    query_up: str
    query: str
    key_value_down: str
    key_value_norm: str
    key_value: str

    def layer(self, config: GPTConfig, layer: int) -> list[TensorMap]:
        """List the sources of the full tensors of one layer, without the output projection."""
        sizes = config.latent_attention
        assert sizes is not None, "only families with latent attention have such names"
        prefix = f"layers.{layer}.attention"
        width = config.hidden_size
        heads = config.num_heads
        rank = sizes.query_rank

        def linear(target: str, name: str, shape: tuple[int, ...], bias: bool) -> list[TensorMap]:
            return joined_layers(f"{prefix}.{target}", shape, name.format(layer), has_bias=bias)

        has_bias = config.has_qkv_bias
        tensors = []
        if rank is not None:
            tensors += linear("query_down", self.query_down, (rank, width), has_bias)
            tensors += linear("query_norm", self.query_norm, (rank,), False)
        query = self.query if rank is None else self.query_up
        tensors += linear("query", query, (heads * sizes.head_dim, rank or width), False)
        down = (sizes.key_value_rank + sizes.rotary_dim, width)
        up = (heads * (sizes.plain_dim + sizes.value_dim), sizes.key_value_rank)
        tensors += linear("key_value_down", self.key_value_down, down, has_bias)
        tensors += linear("key_value_norm", self.key_value_norm, (sizes.key_value_rank,), False)
        return tensors + linear("key_value", self.key_value, up, False)
