"""Configuration of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, NotNegative, coerce_fields


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Attention whose keys and values are computed from one small latent vector of each token.

    A query or key head has ``plain_dim`` elements without positions and ``rotary_dim`` elements
    that are rotated. The rotated elements of the keys are the same for all heads, and are
    projected from the hidden states directly.

    Args:
        key_value_rank: Size of the latent vectors of keys and values (elements).
        query_rank: Size of the latent vectors of queries; None means that queries are projected
            from the hidden states directly (elements).
        plain_dim: Elements of a query or key head without positions (elements).
        rotary_dim: Rotated elements of a query or key head; even (elements).
        value_dim: Size of a value head, at most ``plain_dim + rotary_dim`` (elements).
        norm_eps: Constant added to the mean squares of latent vectors.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of its range.

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """

    key_value_rank: Count
    query_rank: Count | None = None
    plain_dim: Count
    rotary_dim: Count
    value_dim: Count
    norm_eps: NotNegative = 1e-6

    def __post_init__(self) -> None:
        coerce_fields(self, "latent_attention.")
        if self.rotary_dim % 2:
            raise ParallelPlanError(
                f"rotary_dim ({self.rotary_dim}) of latent_attention must be even, because rotary "
                f"positions rotate pairs of elements. Use {self.rotary_dim + 1}."
            )
        if self.value_dim > self.head_dim:
            raise ParallelPlanError(
                f"value_dim ({self.value_dim}) of latent_attention must be at most plain_dim + "
                f"rotary_dim ({self.head_dim}), because kernels with one head size get values that "
                f"are padded to the size of keys. Use at most {self.head_dim}."
            )

    @property
    def head_dim(self) -> int:
        """Return the size of a query or key head (elements)."""
        return self.plain_dim + self.rotary_dim

    @property
    def norm_features(self) -> int:
        """Return the features of the latent vectors of a token (elements)."""
        return self.key_value_rank + (self.query_rank or 0)

    @property
    def down_features(self) -> int:
        """Return the outputs of the projections to latent vectors and shared keys (elements)."""
        return self.norm_features + self.rotary_dim

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Count the weights of all projections of a rank, without biases and norms.

        They are also the multiplications of the projections for each token.
        """
        query = num_heads * self.head_dim * (self.query_rank or hidden_size)
        keys_and_values = num_heads * (self.plain_dim + self.value_dim) * self.key_value_rank
        output = num_heads * self.value_dim * hidden_size
        return hidden_size * self.down_features + query + keys_and_values + output
