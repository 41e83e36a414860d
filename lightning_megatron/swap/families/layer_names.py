"""Tensor names of routers, of experts and of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.swap.tensors.mapping import Source, TensorMap

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
        size = config.hidden_size
        prefix = f"layers.{layer}.mlp"
        assert experts is not None, "only layers with experts are asked for"
        tensors = self._router(experts, size, prefix, layer)
        for number in range(experts.num_experts):
            up = tuple(name.format(layer, number) for name in self.up)
            down = self.down.format(layer, number)
            target = f"{prefix}.experts.{number}"
            inner = experts.ffn_hidden_size
            tensors += _mlp(target, up, down, config, inner, experts.linear_bias)
        shared = experts.shared_ffn_hidden_size
        if shared is not None:
            up = tuple(name.format(layer) for name in self.shared_up)
            tensors += _mlp(f"{prefix}.shared", up, self.shared_down.format(layer), config, shared)
            if experts.shared_gate:
                tensors.append(
                    _joined(
                        f"{prefix}.shared.gate.weight", (1, size), self.shared_gate.format(layer)
                    )
                )
        return tensors

    def _router(
        self, experts: ExpertsConfig, size: int, prefix: str, layer: int
    ) -> list[TensorMap]:
        count = experts.num_experts
        router = self.router.format(layer)
        tensors = [_joined(f"{prefix}.router.weight", (count, size), router)]
        if experts.router_bias:
            tensors.append(_joined(f"{prefix}.router.bias", (count,), router))
        if experts.expert_bias:
            name = self.bias.format(layer)
            # Its steps would be rounded away in a half type.
            bias = TensorMap(
                f"{prefix}.router.expert_bias", (count,), (Source(name, count),), torch.float32
            )
            tensors.append(bias)
        return tensors


def is_training_only(name: str) -> bool:
    """Return whether a tensor is a router's token statistics instead of a weight."""
    return name.endswith(".step_shares")


def _mlp(
    target: str,
    up: tuple[str, ...],
    down: str,
    config: GPTConfig,
    inner: int,
    has_biases: bool = False,
) -> list[TensorMap]:
    kind, num_rows = ("gate_up", 2 * inner) if config.is_gated else ("up", inner)
    tensors = [
        _joined(f"{target}.{kind}.weight", (num_rows, config.hidden_size), *up),
        _joined(f"{target}.down.weight", (config.hidden_size, inner), down),
    ]
    if has_biases:
        tensors += [
            _joined(f"{target}.{kind}.bias", (num_rows,), *up),
            _joined(f"{target}.down.bias", (config.hidden_size,), down),
        ]
    return tensors


def _joined(target: str, shape: tuple[int, ...], *sources: str) -> TensorMap:
    num_rows = shape[0] // len(sources)
    kind = target.rpartition(".")[2]
    return TensorMap(target, shape, tuple(Source(f"{name}.{kind}", num_rows) for name in sources))


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
            kinds = {"weight": shape} | ({"bias": shape[:1]} if bias else {})
            source = name.format(layer)
            return [
                TensorMap(f"{prefix}.{target}.{kind}", size, (Source(f"{source}.{kind}", size[0]),))
                for kind, size in kinds.items()
            ]

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
