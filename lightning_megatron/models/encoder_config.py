"""Configuration of BERT and RoBERTa encoders and of their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import ModelConfig, check_padding, require
from lightning_megatron.plan.model_shape import COUNTED_LENGTH, EMBEDDING_COST, LossChunk
from lightning_megatron.plan.partition import LayerCosts
from lightning_megatron.plan.settings import Count, Index, NotNegative, Probability, coerce_fields

EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]
EncoderHead = Literal["none", "pooler", "masked_lm", "classifier", "pretraining", "span"]
BERTSize = Literal["336m", "1.3b", "3.9b"]

#: Layers, hidden size and attention heads of the paper's BERT models (table 4).
BERT_SIZES: dict[BERTSize, tuple[int, int, int]] = {
    "336m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "3.9b": (48, 2560, 40),
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Configuration of an encoder-only Transformer and of its head.

    Args:
        vocab_size: Size of the vocabulary, without padding (tokens).
        num_positions: Number of rows of the position embedding.
        num_layers: Number of Transformer blocks (layers).
        hidden_size: Size D of the residual stream (elements).
        num_heads: Number of attention heads (heads).
        ffn_hidden_size: Inner features of the MLP (elements).
        activation: Activation of the MLP: ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        norm_eps: Constant added to variances.
        norm_position: Order of norms and residual sums. ``post`` is the original BERT: norms follow
            the embedding and each residual sum. ``pre`` is the rearranged order, which trains
            stably at larger sizes: norms precede attention and MLP, and one follows the last layer.
        num_token_types: Number of token types.
        padding_id: Padding token, whose embedding gets no gradient from lookups; None means no such
            token.
        positions: Numbering of positions. ``row`` counts from 0 along the row. ``tokens`` counts
            tokens other than padding from ``padding_id + 1``. Padding then has the position
            ``padding_id``, whose embedding gets no gradient.
        hidden_dropout: Dropout probability after the embedding and before each residual sum.
        attention_dropout: Dropout probability of attention weights.
        head: Kind of the head. ``none`` has no layer. ``pooler`` applies a dense layer and tanh to
            the first token. ``masked_lm`` applies a dense layer, an activation and a norm, and
            multiplies by the token embedding. ``classifier`` applies a dense layer, tanh and a
            linear layer to the first token. ``pretraining`` combines ``masked_lm`` with a
            ``pooler`` and a linear layer that predicts the order of two segments. ``span`` applies
            a linear layer to every token, with one output for the start of an answer and one for
            its end.
        head_activation: Activation in the heads ``masked_lm`` and ``pretraining``.
        num_labels: Number of outputs of the ``classifier``.
        head_dropout: Dropout probability before the last layer of the ``classifier``.
        drops_first: Whether dropout also precedes the first layer of the ``classifier``.
        init_std: Standard deviation of initial weights.
        scaled_init: Whether initial weights of layers whose outputs are added to the residual
            stream are divided by sqrt(2 * num_layers).
        vocab_multiple: Divisor of the padded vocabulary of each tp rank (tokens).

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or sizes are
            inconsistent.
    """

    vocab_size: Count
    num_positions: Count
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    ffn_hidden_size: Count
    activation: EncoderActivation = "gelu"
    norm_eps: NotNegative = 1e-12
    norm_position: Literal["pre", "post"] = "post"
    num_token_types: Count = 2
    padding_id: Index | None = None
    positions: Literal["row", "tokens"] = "row"
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    head: EncoderHead = "pooler"
    head_activation: EncoderActivation = "gelu"
    num_labels: Count = 2
    head_dropout: Probability = 0.0
    drops_first: bool = False
    init_std: NotNegative = 0.02
    scaled_init: bool = False
    vocab_multiple: Count = 128

    def __post_init__(self) -> None:
        coerce_fields(self)
        is_legal = self.hidden_size % self.num_heads == 0
        rule = f"be a multiple of num_heads ({self.num_heads})"
        require(is_legal, "hidden_size", self.hidden_size, rule, "each head takes an equal part")
        is_legal = self.positions == "row" or self.padding_id is not None
        why = "positions count only tokens other than padding"
        require(is_legal, "padding_id", self.padding_id, "be a token", why)
        check_padding(self.padding_id, self.vocab_size)
        rule = f"be above padding_id + 1 ({self.first_position})"
        why = "positions begin at this number"
        require(self.max_seq_length >= 1, "num_positions", self.num_positions, rule, why)

    @classmethod
    def bert(cls, size: BERTSize = "336m", **changes: Any) -> EncoderConfig:
        """Return the configuration of a BERT model of the Megatron-LM paper.

        It has the rearranged order of norms (figure 7 (b)), the vocabulary of BERT and the
        pre-training head.

        Args:
            size: Size of the model: 336 million, 1.3 billion or 3.9 billion parameters.
            changes: Fields with other values.

        Raises:
            ParallelPlanError: If the size is unknown, or a value is invalid.

        Source: Shoeybi et al. 2019, section 4.2 and table 4.
        """
        require(
            size in BERT_SIZES,
            "size",
            size,
            f"be one of {', '.join(BERT_SIZES)}",
            "these are the sizes of the paper",
        )
        layers, hidden, heads = BERT_SIZES[size]
        values: dict[str, Any] = {
            "vocab_size": 30522,
            "num_positions": 512,
            "num_layers": layers,
            "hidden_size": hidden,
            "num_heads": heads,
            "ffn_hidden_size": 4 * changes.get("hidden_size", hidden),
            "norm_position": "pre",
            "padding_id": 0,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "head": "pretraining",
            "scaled_init": True,
        }
        return cls(**(values | changes))

    def of_layers(self) -> GPTConfig:
        """Return the configuration of a GPT that is not causal and has the same layers."""
        return GPTConfig(
            vocab_size=self.vocab_size,
            max_seq_length=self.max_seq_length,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            ffn_hidden_size=self.ffn_hidden_size,
            activation=self.activation,
            norm_eps=self.norm_eps,
            norm_position=self.norm_position,
            causal=False,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            init_std=self.init_std,
        )

    @property
    def tie_embeddings(self) -> bool:
        """Return whether the output head shares the token embedding's weight."""
        return self.head in ("masked_lm", "pretraining")

    @property
    def first_position(self) -> int:
        """Return the position of the first token."""
        return 0 if self.positions == "row" or self.padding_id is None else self.padding_id + 1

    @property
    @override
    def max_seq_length(self) -> int:
        """Return the length of the longest sequence (tokens)."""
        return self.num_positions - self.first_position

    @property
    @override
    def ffn_size(self) -> int:
        """Return the inner features of the MLP (elements)."""
        return self.ffn_hidden_size

    @override
    def _costs(self, loss_chunk: LossChunk, tp: int) -> LayerCosts:
        # The work of heads that read only the first token is neglected.
        size = self.hidden_size
        keys = min(self.max_seq_length, COUNTED_LENGTH)
        layer = size * (4 * size + 2 * self.ffn_hidden_size + 2 * keys)
        head = size * (size + self.vocab_size) if self.tie_embeddings else 0
        return LayerCosts((layer,) * self.num_layers, EMBEDDING_COST * layer, head)
