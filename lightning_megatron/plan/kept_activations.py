"""What the layers keep from forward to backward: in plain torch operations, and in fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.plan.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """Say what the layers keep from forward to backward: the table that a measurement may correct.

    Copies are tensors in the activations' type. Attention runs in a fused kernel, which keeps queries, keys, values,
    its output (which the output projection keeps as its input) and a float32 number for each row of the scores.

    Args:
        hidden_copies: tensors of D features a block keeps: the inputs of both norms, and their outputs as inputs of the
            projections. Sequence parallelism cuts them.
        norm_bytes: bytes a token and norm: float32 statistics.
        rotated_copies: tensors of the queries' and keys' features kept beside the projection's output: rotated ones,
            unless they are rotated in place.
        expanded_copies: 1 where the attention kernel needs keys and values repeated for every query head.
        ffn_copies: tensors of F features: what the activation keeps, and the input of the second projection.
        expert_copies: tensors of their inner features that experts keep beside those: the activation's output before it
            is multiplied by probabilities; 0 where a kernel does both.
        expert_gradients: 1 where the gradients of all experts' matrices are made before they are added to those of
            earlier microbatches, 0 where they are added one by one or in place.
        router_keeps_logits: whether a router keeps its logits alone, from which a kernel makes all else again.
        choice_copies: tensors of D features for every choice of a token, while outputs of experts are added up.
        ffn_backward: tensors of F features that backward of the activation adds to what is kept.
        loss_kept: bytes a logit from forward to backward.
        loss_forward: bytes a logit beside those, while the loss is computed.
        loss_backward: bytes a logit beside those kept, while its gradient is computed.
    """

    hidden_copies: int = 4
    norm_bytes: int = 8
    rotated_copies: int = 0
    expanded_copies: int = 0
    ffn_copies: int = 2
    expert_copies: int = 1
    expert_gradients: int = 0
    router_keeps_logits: bool = False
    choice_copies: int = 2
    ffn_backward: int = 1
    loss_kept: int = 4
    loss_forward: int = 6
    loss_backward: int = 6


def eager_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Describe the layers in plain torch operations.

    The gate, its activation, the up projection and their product are kept. The loss is computed in float32 beside the
    logits: their copy and its exponentials in forward, probabilities and their gradient in backward.

    Args:
        model: the model.
        activation_bytes: size of an activation's element.
    """
    wide = max(4, activation_bytes)
    narrow = activation_bytes if activation_bytes < wide else 0  # logits, or their gradient, beside the wide ones
    return KeptActivations(
        hidden_copies=_hidden_copies(model),
        norm_bytes=8 if model.norm == "layernorm" else 4,
        rotated_copies=1 if model.qk_norm or not model.num_positions else 0,
        ffn_copies=4 if model.gated else 1 if model.activation == "relu" else 2,
        ffn_backward=2 if model.gated else 1,
        loss_kept=wide,
        loss_forward=wide + narrow,
        loss_backward=wide + narrow,
    )


def fused_activations(model: ModelShape, activation_bytes: int = 2) -> KeptActivations:
    """Describe the layers in fused kernels, as they run in half types on a GPU.

    Queries and keys are rotated in place, unless they are normed or rotated in part; swiglu keeps its input alone; the
    gradient of the logits overwrites them. What has no fused kernel runs in plain operations.

    Args:
        model: the model.
        activation_bytes: size of an activation's element.
    """
    eager = eager_activations(model, activation_bytes)
    return KeptActivations(
        hidden_copies=eager.hidden_copies,
        rotated_copies=1 if model.qk_norm or model.partly_rotated else 0,
        ffn_copies=3 if model.gated and model.activation == "swiglu" else eager.ffn_copies,
        expert_copies=0 if model.gated and model.activation == "swiglu" else eager.expert_copies,
        router_keeps_logits=True,
        choice_copies=0,
        ffn_backward=eager.ffn_backward,
        loss_kept=activation_bytes,
        loss_forward=0,
        loss_backward=0,
    )


def _hidden_copies(model: ModelShape) -> int:
    # In parallel both norms read the same tensor.
    return 3 if model.parallel else 4
