"""Activations that layers keep for backward, with plain torch operations and with fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.plan.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """Activations that the layers keep for backward, as numbers that a measurement may correct.

    A copy is a tensor in the dtype of the activations. Attention runs in a fused kernel, unless
    ``stores_scores``. It keeps queries, keys, values, its output (the input of the output
    projection) and one float32 number for each row of the scores.

    Args:
        hidden_copies: Number of tensors of D features that a block keeps: the inputs of both norms,
            and their outputs as inputs of the projections. Sequence parallelism shards them.
        norm_bytes: Float32 statistics of a norm for each token (bytes).
        rotated_copies: Number of tensors of query and key features that are kept in addition to the
            projection's output: rotated ones, unless the rotation is in place.
        expanded_copies: 1 if the attention kernel needs keys and values repeated for every query
            head.
        padded_values: Whether the attention kernel needs values padded to the size of keys.
        stores_scores: Whether the attention runs in operators of torch, which keep the scores of
            all pairs of tokens.
        ffn_copies: Number of tensors of F features that the MLP keeps: those for the activation's
            backward pass, and the input of the second projection.
        expert_copies: Number of tensors of inner features that experts keep in addition: the
            activation's output before its multiplication by probabilities. 0 if one kernel computes
            both.
        expert_gradients: 1 if the gradients of all expert matrices are computed before they are
            added to those of earlier microbatches; 0 if they are added one by one or in place.
        router_keeps_logits: Whether a router keeps only its logits, from which a kernel recomputes
            the rest.
        selection_copies: Number of tensors of D features for each of a token's selections while the
            expert outputs are summed.
        ffn_backward: Number of temporary tensors of F features in the activation's backward pass.
        loss_kept: Bytes that the loss keeps for each logit from forward to backward.
        loss_forward: Temporary bytes for each logit while the loss is computed.
        loss_backward: Temporary bytes for each logit while the logit's gradient is computed.
    """

    hidden_copies: int = 4
    norm_bytes: int = 8
    rotated_copies: int = 0
    expanded_copies: int = 0
    padded_values: bool = False
    stores_scores: bool = False
    ffn_copies: int = 2
    expert_copies: int = 1
    expert_gradients: int = 0
    router_keeps_logits: bool = False
    selection_copies: int = 2
    ffn_backward: int = 1
    loss_kept: int = 4
    loss_forward: int = 6
    loss_backward: int = 6


def eager_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Return the activations that layers of plain torch operations keep.

    The gate, its activation, the up projection and their product are kept. The loss is computed in
    float32. Next to the logits it needs a float32 copy and its exponentials in forward,
    probabilities and their gradient in backward.

    Args:
        activation_bytes: Size of an activation's element (bytes).
    """
    wide = max(4, activation_bytes)
    # Logits in a half type, or their gradient, exist in addition to the float32 copy.
    narrow = activation_bytes if activation_bytes < wide else 0
    ffn_copies = 2
    ffn_backward = 1
    if model.gated:
        # One operator keeps gate and up, and recomputes everything else.
        is_one = model.activation == "clamped_swiglu"
        ffn_copies = 3 if is_one else 4
        ffn_backward = 4 if is_one else 2
    elif model.activation == "relu":
        ffn_copies = 1
    return KeptActivations(
        hidden_copies=_hidden_copies(model),
        norm_bytes=8 if model.norm == "layernorm" else 4,
        rotated_copies=int(model.qk_norm or not (model.num_positions or model.alibi)),
        padded_values=_pads_values(model),
        ffn_copies=ffn_copies,
        ffn_backward=ffn_backward,
        loss_kept=wide,
        loss_forward=wide + narrow,
        loss_backward=wide + narrow,
    )


def fused_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Return the activations that layers with fused kernels keep in half types on a GPU.

    Queries and keys are rotated in place, unless they are normed or only partly rotated. SwiGLU
    keeps only its input. The gradient of the logits overwrites them. Operations without a fused
    kernel run as plain torch operations.

    Args:
        activation_bytes: Size of an activation's element (bytes).
    """
    eager = eager_activations(model, activation_bytes)
    ffn_copies = eager.ffn_copies
    expert_copies = eager.expert_copies
    if model.gated and model.activation in ("swiglu", "clamped_swiglu"):
        # The fused kernel keeps gate and up, and multiplies by the probabilities in the same pass.
        ffn_copies = 3
        expert_copies = 0
    return KeptActivations(
        hidden_copies=eager.hidden_copies,
        rotated_copies=int(model.qk_norm or model.partly_rotated),
        padded_values=_pads_values(model),
        ffn_copies=ffn_copies,
        expert_copies=expert_copies,
        router_keeps_logits=True,
        selection_copies=0,
        ffn_backward=eager.ffn_backward,
        loss_kept=activation_bytes,
        loss_forward=0,
        loss_backward=0,
    )


def _hidden_copies(model: ModelShape) -> int:
    # If attention and MLP run in parallel, both norms read the same tensor. Norms of the sublayers'
    # outputs keep their inputs.
    return 3 if model.parallel else model.norms_per_layer + 2


def _pads_values(model: ModelShape) -> bool:
    # Most kernels have one size for all heads.
    return model.latent is not None and model.latent.value_dim < model.latent.head_dim
