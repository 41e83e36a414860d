"""Construction of the embedding and the layers of an encoder."""

from __future__ import annotations

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.block import Block, PostNormBlock, PreNormBlock
from lightning_megatron.layers.embedding import EncoderEmbedding, VocabParallelEmbedding
from lightning_megatron.layers.init import Initializer
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.context_transport import ContextChoice, choose_context_transport


def build_embedding(config: EncoderConfig, mesh: ParallelMesh) -> EncoderEmbedding:
    """Build the embedding of an encoder, which ends with a norm unless layers begin with norms.

    Args:
        config: Configuration of the model.
        mesh: Process groups of this rank.
    """
    drawn = Initializer.normal(config.init_std)
    size = config.hidden_size
    untrained = config.padding_id if config.positions == "tokens" else None
    return EncoderEmbedding(
        VocabParallelEmbedding(
            config.vocab_size,
            size,
            mesh,
            multiple=config.vocab_multiple,
            initializer=drawn,
            padding_id=config.padding_id,
        ),
        TableEmbedding(config.num_positions, size, mesh, untrained=untrained, initializer=drawn),
        TableEmbedding(config.num_token_types, size, mesh, initializer=drawn),
        LayerNorm(size, mesh, eps=config.norm_eps) if config.norm_position == "post" else None,
        mesh=mesh,
        dropout=config.hidden_dropout,
    )


def context_choice(config: EncoderConfig, mesh: ParallelMesh) -> ContextChoice:
    """Return the transport of attention over cp in all layers of an encoder.

    Args:
        config: Configuration of the model.
        mesh: Process groups of this rank.
    """
    heads = config.num_heads // mesh.tp.size
    return choose_context_transport(
        mesh.context, mesh.cp.size, heads, heads, config.attention_dropout
    )


def build_block(config: EncoderConfig, mesh: ParallelMesh, index: int) -> Block:
    """Build this rank's part of a layer of an encoder.

    Args:
        config: Configuration of the model.
        mesh: Process groups of this rank.
        index: Index of the layer in the whole model.
    """
    size = config.hidden_size
    drawn = Initializer.normal(config.init_std)
    output = drawn
    if config.scaled_init:
        output = Initializer.residual(config.init_std, config.num_layers)
    layer = index + 1
    attention = SelfAttention(
        size,
        config.num_heads,
        mesh,
        causal=False,
        dropout=config.attention_dropout,
        layer=layer,
        initializer=drawn,
        output_initializer=output,
    )
    mlp = MLP(
        size,
        config.ffn_hidden_size,
        mesh,
        activation=config.activation,
        initializer=drawn,
        output_initializer=output,
    )
    block = PostNormBlock if config.norm_position == "post" else PreNormBlock
    return block(
        attention,
        mlp,
        LayerNorm(size, mesh, eps=config.norm_eps),
        LayerNorm(size, mesh, eps=config.norm_eps),
        mesh=mesh,
        layer=layer,
        dropout=config.hidden_dropout,
    )
