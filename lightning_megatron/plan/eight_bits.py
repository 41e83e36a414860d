"""Sizes of linear layers, and their memory in 8 bits beside that in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lightning_megatron.plan.fp8 import BLOCK, FP8
from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape

#: Output and input features of each linear layer of a rank, by its name in the block (elements).
LinearSizes = dict[str, tuple[int, int]]


def linear_sizes(model: ModelShape, layer: int, tp: int) -> LinearSizes:
    """Return the sizes of the linear layers of a block, except routers and routed experts.

    Equal to the sizes of the layers that a model builds and cuts over tp.

    Args:
        layer: Index of the block.

    Raises:
        ParallelPlanError: If the heads cannot be divided among the ranks.
    """
    sizes = {f"attention.{name}": size for name, size in _of_attention(model, tp).items()}
    if not model.has_experts_in(layer):
        sizes |= _of_network(model, "mlp", model.ffn_hidden_size, tp)
    elif model.experts is not None and model.experts.shared_ffn_hidden_size:
        sizes |= _of_network(model, "mlp.shared", model.experts.shared_ffn_hidden_size, tp)
    return sizes


def _of_network(model: ModelShape, name: str, inner: int, tp: int) -> LinearSizes:
    up = "gate_up" if model.gated else "up"
    features = 2 * inner if model.gated else inner
    return {
        f"{name}.{up}": (features // tp, model.hidden_size),
        f"{name}.down": (model.hidden_size, inner // tp),
    }


def _of_attention(model: ModelShape, tp: int) -> LinearSizes:
    hidden = model.hidden_size
    if model.latent is None:
        query, key = model.widths(tp)
        return {"qkv": (query + 2 * key, hidden), "output": (hidden, query)}
    latent = model.latent
    heads = model.num_heads // tp
    up = latent.plain_dim + latent.value_dim
    return {
        "query": (heads * latent.head_dim, latent.query_rank or hidden),
        "key_value": (heads * up, latent.key_value_rank),
        "output": (hidden, heads * latent.value_dim),
    }


#: Size of a scale and of a magnitude (bytes).
_SCALE = 4
#: Factors of a layer's products: input, weight and gradient.
_NUM_FACTORS = 3


@dataclass(frozen=True)
class EightBitLayers:
    """Linear layers of a block that compute in 8 bits on one rank.

    Args:
        sizes: Name in the block, output and input features of each layer (elements).
        shares_casts: Whether microbatches share the casts of weights.
    """

    settings: FP8
    sizes: tuple[tuple[str, tuple[int, int]], ...]
    shares_casts: bool

    @classmethod
    def of(
        cls, settings: FP8, model: ModelShape, layer: int, tp: int, *, shares_casts: bool
    ) -> EightBitLayers:
        """Return the layers of a block.

        Args:
            layer: Index of the block.
            shares_casts: Whether microbatches share the casts of weights.
        """
        sizes = tuple(
            (name, size)
            for name, size in linear_sizes(model, layer, tp).items()
            if settings.includes(layer, model.num_layers, f"layers.{layer}.{name}")
        )
        return cls(settings, sizes, shares_casts)

    @property
    def weight_bytes(self) -> int:
        """Return the memory of shared casts of all weights, rows and columns (bytes)."""
        if not self.shares_casts:
            return 0
        if self.is_stored:
            # Only transposed copies: the stored weights have the scales.
            return self.num_weights
        return sum(2 * prod(size) + self._scales_of_weight(*size) for _, size in self.sizes)

    @property
    def is_stored(self) -> bool:
        """Return whether the weights themselves are kept in 8 bits."""
        return self.settings.parameters is not None

    @property
    def num_weights(self) -> int:
        """Count the elements of the weights (elements)."""
        return sum(prod(size) for _, size in self.sizes)

    @property
    def passing_weight_bytes(self) -> int:
        """Return the memory of one cast that a product of the backward pass makes (bytes)."""
        if self.shares_casts:
            return 0
        return max((prod(size) for _, size in self.sizes), default=0)

    @property
    def passing_rows_bytes(self) -> int:
        """Return the memory of one cast that a product of the forward pass makes (bytes)."""
        return 0 if self.is_stored else self.passing_weight_bytes

    @property
    def history_bytes(self) -> int:
        """Return the memory of the scales of earlier steps (bytes)."""
        if self.settings.recipe != "delayed":
            return 0
        # The history; two magnitudes and an inverse scale of each factor.
        return len(self.sizes) * _NUM_FACTORS * _SCALE * (self.settings.history + 3)

    def columns(self, features: int, num_tokens: int) -> int:
        """Return the memory of a transposed matrix in 8 bits, with its scales (bytes).

        Args:
            features: Features of each token (elements).
            num_tokens: Tokens, which are padded (tokens).
        """
        padded = num_tokens + -num_tokens % self.settings.multiple
        scales = {"rowwise": features, "blockwise": features * (padded // BLOCK)}
        return features * padded + _SCALE * scales.get(self.settings.recipe, 1)

    def gathered_input(self, features: int, batch: MicrobatchShape) -> int | None:
        """Return what a layer at the start of a tensor-parallel region keeps (bytes).

        Args:
            features: Features of its input (elements).

        Returns:
            The bytes; None if it keeps its input in the type of the activations, to gather it.
        """
        if not batch.sequence_parallel:
            return self.columns(features, batch.num_tokens)
        return features * batch.stream_tokens + _SCALE if self.settings.has_one_scale else None

    def _scales_of_weight(self, out_features: int, in_features: int) -> int:
        if self.settings.recipe == "rowwise":
            return _SCALE * (out_features + in_features)
        if self.settings.recipe == "blockwise":
            return 2 * _SCALE * -(-out_features // BLOCK) * -(-in_features // BLOCK)
        return 2 * _SCALE


@dataclass(frozen=True)
class EightBitCosts:
    """Bytes of a block that change if linear layers compute in 8 bits.

    Inputs that are kept in 8 bits replace those in 16 bits, unless another operator also keeps the
    16-bit tensor: the attention core keeps its output, ReLU its result, and a router its input.

    Args:
        attention_norm: Change of what is kept of the output of the norm before attention.
        network_norm: Change of what is kept of the output of the norm before the MLP.
        attention: Change of what attention keeps.
        network: Change of what the MLP or the mixture keeps.
        attention_waiting: Change of what waits for the weight half of attention.
        network_waiting: Change of what waits for that of the MLP or the mixture.
        forward: Temporary buffers at the largest product of the forward pass: its input in both
            types, and a weight in 8 bits that is not kept.
        attention_backward: Additional temporary buffers of the backward pass of attention.
        network_backward: Minimum size of the temporary buffers of the backward pass of the MLP.
        frees_norms: Whether the outputs of the norms before attention and before the MLP are freed.
        frees_activation: Whether the result of the MLP's activation is freed.
    """

    attention_norm: int = 0
    network_norm: int = 0
    attention: int = 0
    network: int = 0
    attention_waiting: int = 0
    network_waiting: int = 0
    forward: int = 0
    attention_backward: int = 0
    network_backward: int = 0
    frees_norms: tuple[bool, bool] = (False, False)
    frees_activation: bool = False

    @property
    def norms(self) -> int:
        """Return the change of what is kept of the outputs of norms (bytes)."""
        return self.attention_norm + self.network_norm

    def num_norms_in_16_bits(self, has_experts: bool) -> int:
        """Count the norms whose outputs are kept as they are, and could be computed again.

        Args:
            has_experts: Whether the block has experts, whose router keeps its input in any case.
        """
        return self.frees_norms[: 1 if has_experts else 2].count(False)

    @classmethod
    def of(
        cls,
        layers: EightBitLayers | None,
        model: ModelShape,
        table: KeptActivations,
        batch: MicrobatchShape,
        recomputes_core: bool = False,
    ) -> EightBitCosts:
        """Return the changes of a block.

        Args:
            layers: Layers of the block in 8 bits; None without any.
            recomputes_core: Whether the backward pass computes the attention core again.
        """
        costs = cls()
        if layers is None:
            return costs
        for name, size in layers.sizes:
            costs = _Layer(layers, model, table, batch, recomputes_core, name, *size).added_to(
                costs
            )
        return costs


@dataclass(frozen=True)
class _Layer:
    """One linear layer in 8 bits, with its input and output features of this rank."""

    layers: EightBitLayers
    model: ModelShape
    table: KeptActivations
    batch: MicrobatchShape
    recomputes_core: bool
    name: str
    out_features: int
    in_features: int

    @property
    def ends_region(self) -> bool:
        """Return whether the layer leaves a tensor-parallel region."""
        return self.name.endswith((".output", ".down"))

    @property
    def wide_input(self) -> int:
        """Return the input of the layer in the type of the activations (bytes)."""
        num_bytes = self.batch.num_tokens * self.batch.activation_bytes * self.in_features
        divisor = self.batch.tp if self.batch.sequence_parallel and not self.ends_region else 1
        return num_bytes // divisor

    @property
    def kept(self) -> int | None:
        """Return what the layer keeps of it in 8 bits (bytes); None if it keeps the input."""
        if self.ends_region:
            return self.layers.columns(self.in_features, self.batch.num_tokens)
        return self.layers.gathered_input(self.in_features, self.batch)

    @property
    def is_kept_elsewhere(self) -> bool:
        """Return whether another operator keeps the input in the type of the activations."""
        if self.name == "attention.output":
            # The core keeps it unless it consists of operators, pads its output or is recomputed.
            is_passing = self.table.padded_values or self.table.stores_scores
            return not (is_passing or self.recomputes_core)
        if self.name.endswith(".down"):
            return self.model.activation == "relu" and not self.model.gated
        # The projection to latent vectors of keys reads the same norm as queries without latent
        # vectors. A router reads the input of a shared MLP.
        is_query = self.name == "attention.query"
        latent = self.model.latent
        return self.name.startswith("mlp.shared.") or (
            is_query and latent is not None and latent.query_rank is None
        )

    def added_to(self, costs: EightBitCosts) -> EightBitCosts:
        """Return the changes of a block with those of this layer."""
        tokens = self.batch.num_tokens
        kept = self.kept
        is_freed = kept is not None and not self.is_kept_elsewhere
        freed = self.wide_input if is_freed else 0
        change = 0 if kept is None else kept - freed
        gradient = self.layers.columns(self.out_features, tokens)
        gradient -= tokens * self.batch.activation_bytes * self.out_features
        waiting = gradient + (0 if kept is None else kept - self.wide_input)
        forward = tokens * self.in_features + freed
        values = vars(costs) | {
            "forward": max(costs.forward, forward + self.layers.passing_rows_bytes)
        }
        part = "attention" if self.name.startswith("attention.") else "network"
        place = self._norm or part
        values[place] += change
        values[f"{part}_waiting"] += waiting
        # Rows and columns of the gradient.
        gradient_bytes = 2 * tokens * self.out_features + self.layers.passing_weight_bytes
        if part == "attention":
            values["attention_backward"] = max(costs.attention_backward, gradient_bytes)
        else:
            values["network_backward"] = max(costs.network_backward, self._backward(gradient_bytes))
        if self._norm is not None:
            first, second = costs.frees_norms
            is_first = part == "attention"
            values["frees_norms"] = (is_freed, second) if is_first else (first, is_freed)
        if self.name == "mlp.down":
            values["frees_activation"] = is_freed
        return EightBitCosts(**values)

    @property
    def _norm(self) -> str | None:
        """Return the field of the norm whose output this layer alone reads; None for others."""
        names = {
            "attention.qkv": "attention_norm",
            "mlp.up": "network_norm",
            "mlp.gate_up": "network_norm",
        }
        return names.get(self.name)

    def _backward(self, gradient_bytes: int) -> int:
        """Return the temporary buffers of the layer in the backward pass of an MLP (bytes)."""
        element = self.batch.num_tokens * self.batch.activation_bytes
        gathered = element * self.model.hidden_size if self.batch.sequence_parallel else 0
        if self.ends_region:
            return element * self.in_features + gathered + gradient_bytes
        # The features of the activation have been freed, in 16 bits and in 8.
        features = self.out_features // (2 if self.model.gated else 1)
        return 2 * gathered + gradient_bytes - self.batch.num_tokens * features
