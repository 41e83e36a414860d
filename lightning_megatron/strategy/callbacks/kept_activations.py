"""Activations that the layers of a model keep for the backward pass, for the memory estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.choose_core import choose_core
from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.context_parallel.attend_across import transport_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_block import attention_kind
from lightning_megatron.plan.kept_activations import (
    KeptActivations,
    eager_activations,
    fused_activations,
)


def kept_activations_of(model: GPT) -> KeptActivations:
    """Return the activations that layers keep for the backward pass on the model's device.

    The result depends on the kernels that the device supports, since fused kernels keep fewer
    activations.

    Args:
        model: Model, already on its device.
    """
    parameter = next(model.parameters())
    make = fused_activations if fused_kernels(parameter) is not None else eager_activations
    table = make(model.config.memory_shape(), parameter.element_size())
    config = model.config
    sizes: Any = {"head_dim": config.head_size, "value_dim": config.value_size}
    dropout = config.attention_dropout
    choice = choose_core(
        parameter.device, parameter.dtype, _scores_of(config), dropout=dropout, **sizes
    )
    repeats = int(config.kv_heads < config.num_heads and choice.expand_kv)
    activations = replace(table, expanded_copies=repeats, padded_values=choice.pads_values)
    # Attention over parts of the keys keeps no scores, because its backward pass recomputes them.
    transport = transport_of(attention_kind(config, 0), model.mesh, model.context)
    has_parts_of_keys = model.mesh.cp.size > 1 and transport != "all_to_all"
    activations = replace(
        activations, stores_scores=choice.core == "operators" and not has_parts_of_keys
    )
    return replace(activations, expert_gradients=int(_makes_expert_gradients(model)))


def _scores_of(config: GPTConfig) -> AttentionSpan:
    """Return the attention span of a model over whole rows, which determines the kind of scores."""
    kind = attention_kind(config, 0)
    sinks = torch.zeros(config.num_heads) if config.attention_sinks else None
    return replace(kind, window=None, sinks=sinks)


def _makes_expert_gradients(model: GPT) -> bool:
    """Return whether the gradients of all experts exist at once before their accumulation."""
    for layer in model.mixtures().values():
        first, *rest = layer.experts.weights("down")
        kind = choose_backend(
            first.device, first.dtype, 1 + len(rest), first.shape[1], first.shape[0]
        )
        return kind.backend == "grouped_mm"
    return False
