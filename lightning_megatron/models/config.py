"""Configuration of GPT for all supported decoder families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.models.config_checks import (
    NORM_POSITIONS,
    ModelConfig,
    check_padding,
    require,
)
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.model_shape import (
    GATED,
    Activation,
    LossChunk,
    ModelShape,
    window_of_layer,
)
from lightning_megatron.plan.partition import LayerCosts
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import (
    Count,
    Index,
    NotNegative,
    Positive,
    Probability,
    coerce_fields,
)
from lightning_megatron.plan.shards import attention_ranges, padded_vocab_size

#: The rule of :meth:`GPTConfig.flops_per_token` in one sentence.
FLOP_RULE = (
    "model FLOPs of forward and backward (twice the forward): two for each weight of a matrix "
    "product and token, attention by half because it is causal, logits with the padded vocabulary; "
    "embeddings, norms and recomputation do not count"
)
#: Fields that belong to a kind of position encoding, with what they describe and their defaults.
_POSITION_FIELDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "rotary": (
        "rotary angles",
        {
            "rotary_dim": None,
            "rotary_scaling": None,
            "rotary_layers": None,
            "window_rotary_base": None,
            "rotary_interleaved": False,
        },
    ),
    "alibi": ("slopes", {"alibi_bias_max": 8.0, "alibi_skips_padding": False}),
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Configuration of a decoder-only Transformer.

    Args:
        vocab_size: Size of the vocabulary, without padding (tokens).
        max_seq_length: Longest sequence (tokens).
        num_layers: Number of Transformer blocks (layers).
        hidden_size: Size D of the residual stream (elements).
        num_heads: Number of query heads (heads).
        num_kv_heads: Number of key/value heads, a divisor of num_heads; None means num_heads
            (heads).
        head_dim: Size of a head; None means hidden_size / num_heads (elements).
        ffn_hidden_size: Inner features of the MLP; None means 4 hidden_size (elements).
        activation: Activation of the MLP: ``gelu`` (exact), ``gelu_tanh`` or ``relu``, or with a
            gate ``swiglu``, ``geglu``, ``geglu_tanh`` or ``clamped_swiglu`` (gpt-oss).
        norm: Kind of the norms: ``layernorm`` or ``rmsnorm``.
        norm_eps: Constant added to variances.
        norm_position: Position of the norms: ``pre`` (before each sublayer, with a final norm),
            ``post`` (after each residual sum, without a final norm), ``sandwich`` (before each
            sublayer and after it, before the residual sum, with a final norm) or ``output`` (after
            each sublayer, before the residual sum, with a final norm).
        position: Kind of position encoding: ``learned``, ``rotary`` or ``alibi`` (a bias that
            lowers attention scores in proportion to the distance of query and key).
        alibi_bias_max: Negative logarithm to base 2 of the smallest slope of ALiBi.
        alibi_skips_padding: Whether ALiBi distances do not count padding between tokens.
        rotary_base: Ratio of the longest to the shortest rotary wavelength.
        rotary_dim: Number of rotated elements of a head, from the first; None means all (elements).
        rotary_scaling: Scaling of rotary angles for longer sequences; None means no scaling.
        rotary_interleaved: Whether neighbouring elements of a head are rotated as a pair; otherwise
            the elements ``i`` and ``i + rotary_dim / 2`` are a pair.
        rotary_layers: For each layer, whether it rotates queries and keys; None means that all
            layers do.
        window_rotary_base: ``rotary_base`` of the layers with a sliding window, whose angles are
            not scaled; None means that all layers have the same angles.
        bias: Whether linear layers and LayerNorms have biases.
        qkv_bias: Whether the query, key and value projections have biases; None means ``bias``.
        output_bias: Whether the attention's output projection has a bias; None means ``bias``.
        mlp_bias: Whether both projections of the MLP have biases; None means ``bias``.
        qk_norm: Whether an RMSNorm is applied to queries and keys before the rotation.
        qk_norm_over: Features over which these norms compute the root mean square: those of each
            ``head``, or those of all heads of the queries or keys (``layer``).
        norm_offset: Constant added to the weights of RMSNorms.
        padding_id: Token whose embedding gets no gradient from lookups; None means no such token.
        embedding_norm: Whether a norm follows the embedding.
        embedding_scale: Factor of token embeddings, rounded to the model's dtype.
        scales_vectors: Whether vectors that replace token embeddings get this factor, too.
        causal: Whether a position attends only to itself and to earlier positions.
        attention_scale: Factor of attention scores; None means head_dim to the power of -0.5.
        attention_soft_cap: Bound c of attention scores s, which become ``c tanh(s / c)``; None
            means no bound.
        attention_sinks: Whether each head has a learned sink: a score that enters the softmax of
            the attention, but has no value.
        residual_scale: Factor of each sublayer's output before the residual sum.
        logit_scale: Factor of the logits.
        logit_soft_cap: Bound c of the scaled logits z, which become ``c tanh(z / c)``; None means
            no bound.
        sliding_window: Number of positions to which a query attends: itself and earlier ones, and
            without ``causal`` as many later ones; None means no limit (tokens).
        window_layers: For each layer, whether it has the sliding window; None means that all layers
            have it.
        latent_attention: Sizes of the latent vectors from which queries, keys and values are
            computed, whose projections have the biases of ``qkv_bias``. None means that queries,
            keys and values are projected directly from the residual stream.
        experts: Mixture of experts that replaces the MLP of all or some layers; None means no
            experts.
        parallel_residual: Whether attention and MLP of a block read the same residual stream.
        tie_embeddings: Whether the output head shares the token embedding's weight.
        hidden_dropout: Dropout probability after the embedding and before each residual sum.
        attention_dropout: Dropout probability of attention weights.
        init_std: Standard deviation of initial weights.
        vocab_multiple: Divisor of the padded vocabulary of each tp rank (tokens).

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or sizes are
            inconsistent.
    """

    vocab_size: Count
    max_seq_length: Count
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn_hidden_size: Count | None = None
    activation: Activation = "gelu_tanh"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: NotNegative = 1e-5
    norm_position: Literal["pre", "post", "sandwich", "output"] = "pre"
    position: Literal["learned", "rotary", "alibi"] = "learned"
    alibi_bias_max: Positive = 8.0
    alibi_skips_padding: bool = False
    rotary_base: Positive = 10000.0
    rotary_dim: Count | None = None
    rotary_scaling: RotaryScaling | None = None
    rotary_interleaved: bool = False
    rotary_layers: tuple[bool, ...] | None = None
    window_rotary_base: Positive | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_over: Literal["head", "layer"] = "head"
    norm_offset: float = 0.0
    padding_id: Index | None = None
    embedding_norm: bool = False
    embedding_scale: Positive = 1.0
    scales_vectors: bool = False
    causal: bool = True
    attention_scale: Positive | None = None
    attention_soft_cap: Positive | None = None
    attention_sinks: bool = False
    residual_scale: Positive = 1.0
    logit_scale: Positive = 1.0
    logit_soft_cap: Positive | None = None
    sliding_window: Count | None = None
    window_layers: tuple[bool, ...] | None = None
    latent_attention: LatentAttentionConfig | None = None
    experts: ExpertsConfig | None = None
    parallel_residual: bool = False
    tie_embeddings: bool = True
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_std: NotNegative = 0.02
    vocab_multiple: Count = 128

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_padding(self.padding_id, self.vocab_size)
        self._check_heads()
        self._check_positions()
        self._check_layers()
        self._check_experts()
        self._check_norms()

    @classmethod
    def gpt2(cls, **sizes: Any) -> GPTConfig:
        """Return a configuration of the GPT-2 family; the default is GPT-2 small without dropout.

        Args:
            sizes: Fields with other values.
        """
        small: dict[str, Any] = {
            "vocab_size": 50257,
            "max_seq_length": 1024,
            "num_layers": 12,
            "hidden_size": 768,
            "num_heads": 12,
        }
        return cls(**(small | sizes))

    @classmethod
    def llama(cls, **sizes: Any) -> GPTConfig:
        """Return a configuration of the Llama family; the default is Llama 3 8B.

        Args:
            sizes: Fields with other values.
        """
        kind: dict[str, Any] = {
            "activation": "swiglu",
            "norm": "rmsnorm",
            "position": "rotary",
            "rotary_base": 500000.0,
            "bias": False,
            "tie_embeddings": False,
        }
        large: dict[str, Any] = {
            "vocab_size": 128256,
            "max_seq_length": 8192,
            "num_layers": 32,
            "hidden_size": 4096,
            "num_heads": 32,
        }
        if "hidden_size" not in sizes:
            large |= {"ffn_hidden_size": 14336, "num_kv_heads": 8}
        return cls(**(kind | large | sizes))

    @property
    @override
    def kv_heads(self) -> int:
        """Return the number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    @override
    def head_size(self) -> int:
        """Return the size of a query or key head (elements)."""
        if self.latent_attention is not None:
            return self.latent_attention.head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """Return the size of a value head (elements)."""
        return self.latent_attention.value_dim if self.latent_attention else self.head_size

    @property
    @override
    def ffn_size(self) -> int:
        """Return the inner features of the MLP (elements)."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotary_size(self) -> int:
        """Return the number of rotated elements of a head; 0 without rotary positions."""
        if self.latent_attention is not None:
            return self.latent_attention.rotary_dim
        return (self.rotary_dim or self.head_size) if self.position == "rotary" else 0

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP has a gate."""
        return self.activation in GATED

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether the query, key and value projections have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_output_bias(self) -> bool:
        """Return whether the attention's output projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether both projections of the MLP have biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None means no window (tokens)."""
        return window_of_layer(self.sliding_window, self.window_layers, layer)

    def rotates_in(self, layer: int) -> bool:
        """Return whether a layer rotates queries and keys."""
        return self.position == "rotary" and (
            self.rotary_layers is None or self.rotary_layers[layer]
        )

    def rotary_base_of(self, layer: int) -> tuple[float, RotaryScaling | None]:
        """Return the base of a layer's rotary wavelengths, and the scaling of its angles."""
        if self.window_rotary_base is None or self.window_of(layer) is None:
            return self.rotary_base, self.rotary_scaling
        return self.window_rotary_base, None

    def has_experts_in(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts instead of an MLP."""
        return self.experts is not None and self.experts.is_in(layer)

    def flops_per_token(self, seq_length: int) -> float:
        """Return the model FLOPs of the forward and backward pass of one token.

        A matrix product counts two FLOPs for each weight and token. Attention counts half, because
        a token attends to half of the sequence on average. Logits count with the padded vocabulary.
        Of a mixture of experts, the selected experts and the router's logits count. The backward
        pass counts twice the forward pass. Embeddings, norms and recomputation do not count.

        Args:
            seq_length: Length of a sequence (tokens).
        """
        width = self.hidden_size
        head = self.head_size
        projections = 2 * width * head * (2 * self.num_heads + 2 * self.kv_heads)
        if self.latent_attention is not None:
            projections = 2 * self.latent_attention.num_weights(width, self.num_heads)
        attention = 2 * seq_length * self.num_heads * (head + self.value_size) / 2
        products = 2 * width * (3 if self.is_gated else 2)
        mlp = products * self.ffn_size
        mixture = 0
        if self.experts is not None:
            shared = self.experts.shared_ffn_hidden_size or 0
            inner = self.experts.top_k * self.experts.ffn_hidden_size + shared
            mixture = products * inner + 2 * width * self.experts.num_experts
        num_mixtures = sum(self.has_experts_in(layer) for layer in range(self.num_layers))
        networks = num_mixtures * mixture + (self.num_layers - num_mixtures) * mlp
        logits = 2 * width * padded_vocab_size(self.vocab_size, 1, self.vocab_multiple)
        return 3 * (self.num_layers * (projections + attention) + networks + logits)

    def memory_shape(self) -> ModelShape:
        """Return the sizes that count parameters and costs of layers."""
        norms = NORM_POSITIONS[self.norm_position]
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_size,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_size,
            vocab_size=self.vocab_size,
            vocab_multiple=self.vocab_multiple,
            num_positions=self.max_seq_length if self.position == "learned" else 0,
            embedding_norm=self.embedding_norm,
            max_seq_length=self.max_seq_length,
            gated=self.is_gated,
            norm=self.norm,
            bias=self.bias,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            qk_norm_over=self.qk_norm_over,
            sinks=self.attention_sinks,
            tied=self.tie_embeddings,
            final_norm=norms.has_final_norm,
            norms_per_layer=norms.num_per_block,
            window=self.sliding_window,
            window_layers=self.window_layers,
            latent=self.latent_attention,
            experts=self.experts,
        )

    @override
    def _costs(self, loss_chunk: LossChunk, tp: int) -> LayerCosts:
        return self.memory_shape().costs(loss_chunk, tp)

    def _check_heads(self) -> None:
        """Raise if the numbers or sizes of heads contradict each other or other fields."""
        latent = self.latent_attention
        if latent is None:
            if self.head_dim is None and self.hidden_size % self.num_heads:
                raise ParallelPlanError(
                    f"hidden_size ({self.hidden_size}) must be a multiple of num_heads "
                    f"({self.num_heads}), because each head takes an equal part. Use a "
                    f"hidden_size of {-(-self.hidden_size // self.num_heads) * self.num_heads}, "
                    "or give head_dim."
                )
            attention_ranges(self.num_heads, self.kv_heads, self.head_size, 1, 0)
            return
        heads = self.num_heads
        separate = "every head has separate keys and values"
        rules: tuple[tuple[str, tuple[object, ...], str, str], ...] = (
            ("position", ("rotary",), "be rotary", "a part of each head has rotary positions"),
            (
                "head_dim",
                (None, latent.head_dim),
                "be None",
                "latent_attention has the sizes of heads",
            ),
            (
                "rotary_dim",
                (None, latent.rotary_dim),
                "be None",
                "latent_attention has a rotary_dim",
            ),
            ("num_kv_heads", (None, heads), f"be None or num_heads ({heads})", separate),
            ("qk_norm", (False,), "be False", "norms apply to latent vectors instead of heads"),
        )
        for name, legal, rule, why in rules:
            value = getattr(self, name)
            require(value in legal, name, value, f"{rule} with latent_attention", why)

    def _check_positions(self) -> None:
        """Raise if fields of another kind of position are set, or heads cannot be rotated."""
        for kind, (what, defaults) in _POSITION_FIELDS.items():
            for name, default in defaults.items() if kind != self.position else ():
                value = getattr(self, name)
                why = f"position ({self.position}) has no {what}"
                require(value == default, name, value, f"be {default}", why)
        if self.position != "rotary":
            return
        head_size = self.rotary_size if self.latent_attention else self.head_size
        if self.rotary_dim is None and head_size % 2:
            raise ParallelPlanError(
                f"head_dim ({head_size}) must be even, because rotary positions rotate pairs of "
                f"elements. Use {head_size + 1} or learned positions."
            )
        size = self.rotary_dim or head_size
        is_legal = size % 2 == 0 and 2 <= size <= head_size
        rule = f"be even and at most head_dim ({head_size})"
        why = "rotary positions rotate pairs of a head's elements"
        require(is_legal, "rotary_dim", size, rule, why)
        scaling = self.rotary_scaling
        if scaling is not None and scaling.kind == "longrope":
            num_factors = len(scaling.short_factors)
            what = "the number of rotary_scaling's factors"
            why = f"each pair of rotary_dim ({size}) elements has a factor"
            require(num_factors == size // 2, what, num_factors, f"be {size // 2}", why)

    def _check_layers(self) -> None:
        """Raise if settings of some layers do not match the layers."""
        for name in ("rotary_layers", "window_layers"):
            flags = getattr(self, name)
            count = self.num_layers if flags is None else len(flags)
            why = f"each of num_layers ({self.num_layers}) needs a flag"
            what = f"the number of {name}"
            require(count == self.num_layers, what, count, "be num_layers", why)
        for name in ("window_rotary_base", "window_layers"):
            value = getattr(self, name)
            is_legal = value is None or self.sliding_window is not None
            rule = "be None without sliding_window"
            require(is_legal, name, value, rule, "no layer has a window")

    def _check_norms(self) -> None:
        """Raise if the norms contradict each other or the residual sums."""
        is_legal = not self.norm_offset or self.norm == "rmsnorm"
        why = f"norm ({self.norm}) adds no offset to its weight"
        require(is_legal, "norm_offset", self.norm_offset, "be 0", why)
        is_legal = not self.parallel_residual or self.norm_position == "pre"
        why = "parallel_residual adds both branches in one sum"
        require(is_legal, "norm_position", self.norm_position, "be pre", why)

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        self.experts.check_num_layers(self.num_layers)
        has_bias = self.has_mlp_bias
        why = "linear_bias of experts determines whether experts have biases"
        require(not has_bias, "mlp_bias", has_bias, "be False with experts", why)
