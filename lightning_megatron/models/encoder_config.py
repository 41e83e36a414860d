"""The shape of an encoder: one frozen record for BERT and RoBERTa with their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.models.config_checks import check_axes, check_length
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.settings import Count, Index, NotNegative, Probability, settle
from lightning_megatron.plan.shards import attention_ranges, even_range
from lightning_megatron.plan.stages import split_layers

EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]
EncoderHead = Literal["none", "pooler", "masked_lm", "classifier"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Describe an encoder-only Transformer with norms after the residual sums, and what follows it.

    Args:
        vocab_size: Tokens of the vocabulary, without padding (tokens).
        num_positions: Rows of the position embedding.
        num_layers: Transformer blocks (layers).
        hidden_size: Size D of the residual stream (elements).
        num_heads: Attention heads (heads).
        ffn_hidden_size: Inner features of the MLP (elements).
        activation: ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        norm_eps: Added to variances.
        num_token_types: Kinds of tokens.
        padding_id: The token of padding, whose vector gets no gradient where it is looked up; None means none.
        positions: ``row`` counts from 0 along the row. ``tokens`` counts tokens other than padding from
            ``padding_id + 1``; padding has the position ``padding_id``, whose vector gets no gradient.
        hidden_dropout: Probability that an element is dropped after the embedding and before each residual sum.
        attention_dropout: Probability that an attention weight is dropped.
        head: ``none``; ``pooler`` (a dense layer and tanh of the first place); ``masked_lm`` (a dense layer,
            activation and norm, then the embedding's weight and a bias); ``classifier`` (a dense layer and tanh of the
            first place, then a linear one).
        head_activation: Activation in the ``masked_lm`` head.
        num_labels: Outputs of the ``classifier``.
        head_dropout: Probability that an element is dropped before the last layer of the ``classifier``.
        drops_first: Whether elements are dropped before its first layer, too.
        init_std: Standard deviation of initial weights.
        vocab_multiple: The vocabulary is padded to a multiple of this times tp (tokens).

    Raises:
        ParallelPlanError: If a value is of another type or outside of its range, or sizes contradict each other.
    """

    vocab_size: Count
    num_positions: Count
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    ffn_hidden_size: Count
    activation: EncoderActivation = "gelu"
    norm_eps: NotNegative = 1e-12
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
    vocab_multiple: Count = 128

    def __post_init__(self) -> None:
        settle(self)
        rule = f"be a multiple of num_heads ({self.num_heads})"
        _require(self.hidden_size % self.num_heads == 0, "hidden_size", self.hidden_size, rule, "heads are equal parts")
        self._check_padding()

    @property
    def experts(self) -> None:
        """Tell that no layer has a mixture of experts."""
        return None

    @property
    def tie_embeddings(self) -> bool:
        """Tell whether an output head shares the token embedding's weight."""
        return self.head == "masked_lm"

    @property
    def first_position(self) -> int:
        """Return the position of the first token."""
        return 0 if self.positions == "row" or self.padding_id is None else self.padding_id + 1

    @property
    def max_seq_length(self) -> int:
        """Return the length of the longest sequence (tokens)."""
        return self.num_positions - self.first_position

    @property
    def head_size(self) -> int:
        """Return the size of an attention head (elements)."""
        return self.hidden_size // self.num_heads

    def stage_layers(self, layout: ParallelLayout) -> tuple[tuple[range, ...], ...]:
        """Return ``layers[stage][chunk]``, the global indices of the layers that each virtual stage holds.

        Raises:
            ParallelPlanError: If there are fewer layers than virtual stages.
        """
        return split_layers(self.num_layers, layout.pp, layout.vpp)

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
        attention_ranges(self.num_heads, self.num_heads, self.head_size, layout.tp, 0)
        even_range(self.ffn_hidden_size, layout.tp, 0, what="ffn_hidden_size")
        self.stage_layers(layout)
        check_axes(layout, "an encoder")
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

    def _check_padding(self) -> None:
        token = self.padding_id
        if self.positions == "tokens":
            _require(token is not None, "padding_id", token, "be a token", "positions count the tokens beside it")
        legal = token is None or 0 <= token < self.vocab_size
        _require(legal, "padding_id", token, f"lie in [0, {self.vocab_size})", "it is a row of the vocabulary")
        rule = f"be above padding_id + 1 ({self.first_position})"
        _require(self.max_seq_length >= 1, "num_positions", self.num_positions, rule, "positions begin there")


def _require(holds: bool, name: str, value: object, rule: str, why: str) -> None:
    if not holds:
        raise ParallelPlanError(f"{name} ({value}) must {rule}, because {why}. Change {name}.")
