"""Construction of the blocks and norms of a GPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan
from lightning_megatron.layers.block import Block, ParallelBlock, PostNormBlock, PreNormBlock
from lightning_megatron.layers.latent_attention import LatentAttention
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.rotary import RotaryTables
from lightning_megatron.layers.self_attention import Attention, SelfAttention
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import NORM_POSITIONS, ModelConfig
from lightning_megatron.plan.context_transport import ContextChoice, choose_context_transport


def build_norm(config: GPTConfig, mesh: ParallelMesh) -> nn.Module:
    """Build a norm of the residual stream."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden_size, mesh, eps=config.norm_eps, offset=config.norm_offset)
    return LayerNorm(config.hidden_size, mesh, eps=config.norm_eps, bias=config.bias)


def span_of_layer(config: GPTConfig, index: int) -> AttentionSpan:
    """Return the attention of a block over whole rows."""
    return AttentionSpan(
        causal=config.causal,
        window=config.window_of(index),
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        slopes=_slopes(config),
    )


def _slopes(config: GPTConfig) -> AlibiSlopes | None:
    if config.position != "alibi":
        return None
    return AlibiSlopes(config.num_heads, config.alibi_bias_max, config.alibi_skips_padding)


def rotary_name(config: GPTConfig, index: int) -> str:
    """Return the name of the rotary tables of a block."""
    if config.position == "rotary" and not config.rotates_in(index):
        return "rotary.none"
    base, scaling = config.rotary_base_of(index)
    is_common = (base, scaling) == (config.rotary_base, config.rotary_scaling)
    return "rotary" if is_common else "rotary.window"


def context_choice(config: ModelConfig, mesh: ParallelMesh) -> ContextChoice:
    """Return the transport of attention over cp in all layers of a model."""
    heads, kv_heads = (count // mesh.tp.size for count in (config.num_heads, config.kv_heads))
    return choose_context_transport(
        mesh.context, mesh.cp.size, heads, max(1, kv_heads), config.attention_dropout
    )


def build_rotary(config: GPTConfig, mesh: ParallelMesh) -> dict[str, RotaryTables]:
    """Build the rotary tables of all layers; their names are those of :func:`rotary_name`."""
    layers = {rotary_name(config, layer): layer for layer in range(config.num_layers)}
    return {
        name: RotaryTables(config.rotary_size, *config.rotary_base_of(layer), context=mesh.cp)
        for name, layer in layers.items()
        if config.rotates_in(layer)
    }


def build_block(
    config: GPTConfig, mesh: ParallelMesh, index: int, output_initializer: Initializer | None = None
) -> Block:
    """Build this rank's part of a block.

    ``output_initializer`` is for the layers whose outputs are added to the residual stream; None
    means that of GPT, which is scaled by the number of layers.
    """
    initializers: dict[str, Initializer] = {
        "initializer": Initializer.normal(config.init_std),
        "output_initializer": output_initializer
        or Initializer.residual(config.init_std, config.num_layers),
    }
    position = NORM_POSITIONS[config.norm_position]
    norms: Sequence[nn.Module | None] = (None, None)
    if position.has_input_norms:
        norms = [build_norm(config, mesh) for _ in range(2)]
    output_norms = None
    if position.has_output_norms:
        output_norms = build_norm(config, mesh), build_norm(config, mesh)
    block: type[Block] = PostNormBlock if config.norm_position == "post" else PreNormBlock
    if config.parallel_residual:
        block = ParallelBlock
    return block(
        _build_attention(config, mesh, index, initializers),
        _build_network(config, mesh, index, initializers),
        *norms,
        output_norms=output_norms,
        mesh=mesh,
        layer=index + 1,
        scale=config.residual_scale,
        dropout=config.hidden_dropout,
    )


def _build_attention(
    config: GPTConfig, mesh: ParallelMesh, index: int, initializers: Mapping[str, Initializer]
) -> Attention:
    shared: dict[str, Any] = {
        "bias": config.has_qkv_bias,
        "output_bias": config.has_output_bias,
        "interleaved": config.rotary_interleaved,
        "span": span_of_layer(config, index),
        "dropout": config.attention_dropout,
        "layer": index + 1,
        **initializers,
    }
    if config.latent_attention is not None:
        sizes = config.latent_attention
        return LatentAttention(config.hidden_size, config.num_heads, sizes, mesh, **shared)
    return SelfAttention(
        config.hidden_size,
        config.num_heads,
        mesh,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        norm_eps=config.norm_eps if config.qk_norm else None,
        norm_offset=config.norm_offset,
        norm_over_layer=config.qk_norm_over == "layer",
        sinks=config.attention_sinks,
        **shared,
    )


def _build_network(
    config: GPTConfig, mesh: ParallelMesh, index: int, initializers: Mapping[str, Initializer]
) -> nn.Module:
    shared: dict[str, Any] = {"activation": config.activation, **initializers}
    if config.experts is not None and config.experts.is_in(index):
        return MixtureOfExperts(config.hidden_size, config.experts, mesh, **shared)
    return MLP(config.hidden_size, config.ffn_size, mesh, bias=config.has_mlp_bias, **shared)
