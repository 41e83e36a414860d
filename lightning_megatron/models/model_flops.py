"""Model FLOPs: floating-point operations that the formulas of a model need on any hardware."""

from __future__ import annotations

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.shards import padded_vocab_size

#: The rule of :func:`flops_per_token` in one sentence.
FLOP_RULE = (
    "model FLOPs of forward and backward (twice the forward): two for each weight of a matrix "
    "product and token, attention by half because it is causal, logits with the padded vocabulary; "
    "embeddings, norms and recomputation do not count"
)


def flops_per_token(config: GPTConfig, seq_length: int) -> float:
    """Return the model FLOPs of the forward and backward pass of one token.

    A matrix product counts two FLOPs for each weight and token. Attention counts half, because a
    token attends to half of the sequence on average. Logits count with the padded vocabulary. Of a
    mixture of experts, the selected experts and the router's logits count. The backward pass counts
    twice the forward pass. Embeddings, norms and recomputation do not count.

    Args:
        seq_length: Length of a sequence (tokens).
    """
    width = config.hidden_size
    head = config.head_size
    projections = 2 * width * head * (2 * config.num_heads + 2 * config.kv_heads)
    if config.latent_attention is not None:
        projections = 2 * config.latent_attention.num_weights(width, config.num_heads)
    attention = 2 * seq_length * config.num_heads * (head + config.value_size) / 2
    products = 2 * width * (3 if config.is_gated else 2)
    mlp = products * config.ffn_size
    mixture = 0
    if config.experts is not None:
        shared = config.experts.shared_ffn_hidden_size or 0
        inner = config.experts.top_k * config.experts.ffn_hidden_size + shared
        mixture = products * inner + 2 * width * config.experts.num_experts
    num_mixtures = sum(config.has_experts_in(layer) for layer in range(config.num_layers))
    networks = num_mixtures * mixture + (config.num_layers - num_mixtures) * mlp
    logits = 2 * width * padded_vocab_size(config.vocab_size, 1, config.vocab_multiple)
    return 3 * (config.num_layers * (projections + attention) + networks + logits)
