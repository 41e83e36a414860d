"""The shape of a GPT: one frozen record for every family of decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.models.config_checks import (
    Activation,
    check_axes,
    check_config,
    check_length,
)
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import Count, Index, NotNegative, Positive, Probability, settle
from lightning_megatron.plan.shards import attention_ranges, even_range
from lightning_megatron.plan.stages import split_layers

#: The lookup is a copy; this is what it, the position sum and the dropout weigh against one layer.
_EMBEDDING_COST = 0.1
#: Which activation needs the same memory.
_MEMORY_OF: Mapping[Activation, Literal["gelu", "relu", "swiglu", "geglu"]] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "relu": "relu",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "geglu_tanh": "geglu",
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Describe a decoder-only Transformer.

    Args:
        vocab_size: Tokens of the vocabulary, without padding (tokens).
        max_seq_length: Longest sequence (tokens).
        num_layers: Transformer blocks (layers).
        hidden_size: Size D of the residual stream (elements).
        num_heads: Query heads (heads).
        num_kv_heads: Key/value heads, a divisor of num_heads; None means num_heads (heads).
        head_dim: Size of a head; None means hidden_size / num_heads (elements).
        ffn_hidden_size: Inner features of the MLP; None means 4 hidden_size (elements).
        activation: ``gelu`` (exact), ``gelu_tanh``, ``relu``; with a gate ``swiglu``, ``geglu``, ``geglu_tanh``.
        norm: ``layernorm`` or ``rmsnorm``.
        norm_eps: Added to variances.
        norm_position: ``pre`` (norms before the residual sums, and a final one) or ``post`` (after them, and no final
            one).
        position: ``learned`` or ``rotary``.
        rotary_base: Ratio of the longest to the shortest rotary wavelength.
        rotary_dim: Elements of a head that are rotated, the first ones; None means all (elements).
        rotary_scaling: How rotary angles are stretched for longer sequences; None means not at all.
        bias: Whether linear layers and LayerNorms have biases.
        qkv_bias: Whether the projections to queries, keys and values have; None means ``bias``.
        output_bias: Whether the attention's output projection has; None means ``bias``.
        mlp_bias: Whether both projections of the MLP have; None means ``bias``.
        qk_norm: Whether every query and key head goes through an RMSNorm before it is rotated.
        norm_offset: RMSNorms multiply by their weight plus this.
        padding_id: Token whose vector is not trained by its lookups; None means every one is.
        embedding_scale: Token vectors are multiplied by it, rounded to the model's dtype.
        attention_scale: Scores are multiplied by it; None means head_dim to the power of -0.5.
        sliding_window: How many positions one sees, itself and those before it; None means all (tokens).
        window_layers: Which layers have the window; None means all.
        experts: The mixture of experts in place of the MLP of all or some layers; None means there is none.
        parallel_residual: Whether attention and MLP of a block both read the same residual stream.
        tie_embeddings: Whether the output head shares the token embedding's weight.
        hidden_dropout: Probability that an element is dropped after the embedding and before each residual sum.
        attention_dropout: Probability that an attention weight is dropped.
        init_std: Standard deviation of initial weights.
        vocab_multiple: The vocabulary is padded to a multiple of this times tp (tokens).

    Raises:
        ParallelPlanError: If a value is of another type or outside of its range, or sizes contradict each other.
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
    norm_position: Literal["pre", "post"] = "pre"
    position: Literal["learned", "rotary"] = "learned"
    rotary_base: Positive = 10000.0
    rotary_dim: Count | None = None
    rotary_scaling: RotaryScaling | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    norm_offset: float = 0.0
    padding_id: Index | None = None
    embedding_scale: Positive = 1.0
    attention_scale: Positive | None = None
    sliding_window: Count | None = None
    window_layers: tuple[bool, ...] | None = None
    experts: ExpertsConfig | None = None
    parallel_residual: bool = False
    tie_embeddings: bool = True
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_std: NotNegative = 0.02
    vocab_multiple: Count = 128

    def __post_init__(self) -> None:
        settle(self)
        check_config(self)

    @classmethod
    def gpt2(cls, **sizes: Any) -> GPTConfig:
        """Describe a model of the GPT-2 family; without arguments GPT-2 small without dropout."""
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
        """Describe a model of the Llama family; without arguments Llama 3 8B."""
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
    def kv_heads(self) -> int:
        """Count key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Return the size of a head (elements)."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Return the inner features of the MLP (elements)."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotary_size(self) -> int:
        """Return how many elements of a head are rotated, 0 for learned positions (elements)."""
        return (self.rotary_dim or self.head_size) if self.position == "rotary" else 0

    @property
    def is_gated(self) -> bool:
        """Tell whether the first projection of the MLP has a gate beside it."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def has_qkv_bias(self) -> bool:
        """Tell whether the projections to queries, keys and values add biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_output_bias(self) -> bool:
        """Tell whether the attention's output projection adds a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Tell whether both projections of the MLP add biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    def window_of(self, layer: int) -> int | None:
        """Return how many positions one sees in a layer, itself included; None means all before it (tokens)."""
        return self.sliding_window if self.window_layers is None or self.window_layers[layer] else None

    def has_experts_in(self, layer: int) -> bool:
        """Tell whether a layer has a mixture of experts in place of its MLP."""
        return self.experts is not None and self.experts.is_in(layer)

    def stage_layers(self, layout: ParallelLayout) -> tuple[tuple[range, ...], ...]:
        """Return ``layers[stage][chunk]``, the global indices of the layers that each virtual stage holds.

        Layers that divide evenly are cut evenly; otherwise embedding and head weigh in, by their work.

        Raises:
            ParallelPlanError: If there are fewer layers than virtual stages.
        """
        even = self.num_layers % (layout.pp * layout.vpp) == 0
        costs = (0.0, 0.0) if even else (_EMBEDDING_COST, self._head_cost())
        return split_layers(self.num_layers, layout.pp, layout.vpp, *costs)

    def memory_shape(self) -> ModelShape:
        """Return what the model's memory depends on, for :func:`~lightning_megatron.plan.budget.estimate_memory`."""
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
            gated=self.is_gated,
            activation=_MEMORY_OF[self.activation],
            norm=self.norm,
            bias=self.bias,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            partly_rotated=self.position == "rotary" and self.rotary_size < self.head_size,
            parallel=self.parallel_residual,
            tied=self.tie_embeddings,
            final_norm=self.norm_position == "pre",
            dropout=self.hidden_dropout > 0.0,
            window=self.sliding_window,
            experts=self.experts,
        )

    def check_layout(
        self, layout: ParallelLayout, sequence_parallel: bool = False, seq_length: int | None = None
    ) -> None:
        """Refuse a layout that cannot hold this model; needs no process group.

        Args:
            layout: Sizes of the axes.
            sequence_parallel: Whether activations are cut along the sequence.
            seq_length: Length of the sequences, if it is known (tokens).

        Raises:
            ParallelPlanError: If sizes do not fit together.
            UnsupportedError: If the model cannot be cut along an axis of the layout.
        """
        attention_ranges(self.num_heads, self.kv_heads, self.head_size, layout.tp, 0)
        even_range(self.ffn_size, layout.tp, 0, what="ffn_hidden_size")
        self.stage_layers(layout)
        check_axes(layout, "GPT", self.experts)
        if seq_length is not None:
            self.check_seq_length(seq_length, layout.tp if sequence_parallel else 1)

    def check_seq_length(self, seq_length: int, sequence_shards: int = 1) -> None:
        """Refuse sequences that are too long, or that do not divide over the ranks that share them.

        Args:
            seq_length: Length of the sequences (tokens).
            sequence_shards: tp under sequence parallelism, else 1 (ranks).

        Raises:
            ParallelPlanError: If the length does not fit.
        """
        check_length(seq_length, self.max_seq_length, sequence_shards)

    def _head_cost(self) -> float:
        """Return the multiplications of the output head over those of one layer, per token."""
        heads = (2 * self.num_heads + 2 * self.kv_heads) * self.head_size
        ffn = (3 if self.is_gated else 2) * self.ffn_size
        core = self.max_seq_length * self.num_heads * self.head_size
        return self.vocab_size * self.hidden_size / (self.hidden_size * (heads + ffn) + core)
