"""Builders of the blocks that replace torch.nn blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.plan.settings import divisors, join_or
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.sequence import (
    SequenceColumnLinear,
    SequenceDropout,
    SequenceLayerNorm,
    SequenceRMSNorm,
    SequenceRowLinear,
)
from lightning_megatron.swap.blocks.sharded_features import LatentLinear, TensorDropout, shard_rows
from lightning_megatron.swap.blocks.transformer_decoder import ParallelDecoderLayer
from lightning_megatron.swap.blocks.transformer_encoder import ParallelEncoder, ParallelEncoderLayer
from lightning_megatron.swap.blocks.vocabulary import EmbeddingOverVocabulary, LinearOverVocabulary


@dataclass(frozen=True)
class BlockRequest:
    """Arguments of a block builder.

    Args:
        name: Dotted name of the block, for errors.
        module: Block that is replaced.
        mesh: Process groups of this rank, without sequence parallelism, because inputs of these
            blocks are complete sequences.
        layer: Number of the block for random streams.
        cuts_sequence: Whether the sequence is cut over tp between blocks of the plan.
        parent: Module around the block.
        device: Device of the block's values; None means the device of its parameters.
    """

    name: str
    module: nn.Module
    mesh: ParallelMesh
    layer: int
    cuts_sequence: bool = False
    parent: nn.Module | None = None
    device: torch.device | None = None


def column(request: BlockRequest) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear and keep them cut."""
    return _column(request, request.module, gather_output=False)


def column_gather(request: BlockRequest) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear and gather them."""
    return _column(request, request.module, gather_output=True)


def row(request: BlockRequest) -> nn.Module:
    """Cut the inputs of a torch.nn.Linear."""
    return _row(request, request.module)


def row_split(request: BlockRequest) -> nn.Module:
    """Cut the inputs of a torch.nn.Linear and split complete inputs."""
    return _row(request, request.module, split_input=True)


def _column(
    request: BlockRequest, source: nn.Module, *, gather_output: bool, what: str = "out_features"
) -> ColumnParallelLinear:
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    pads = ", or the kind 'vocab', which pads and gathers" if what == "out_features" else ""
    _check_divides(request, what, source.out_features, pads)
    has_bias = source.bias is not None
    kind = SequenceColumnLinear if request.cuts_sequence else ColumnParallelLinear
    return kind(
        source.in_features,
        source.out_features,
        request.mesh,
        bias=has_bias,
        gather_output=gather_output,
    )


def _row(
    request: BlockRequest, source: nn.Module, what: str = "in_features", split_input: bool = False
) -> RowParallelLinear:
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    _check_divides(request, what, source.in_features)
    kind = SequenceRowLinear if request.cuts_sequence else RowParallelLinear
    has_bias = source.bias is not None
    mesh = replace(request.mesh, sequence_parallel=True) if request.cuts_sequence else request.mesh
    return kind(
        source.in_features, source.out_features, mesh, bias=has_bias, split_input=split_input
    )


def _check_divides(request: BlockRequest, what: str, size: int, otherwise: str = "") -> None:
    tp = request.mesh.tp.size
    if size % tp:
        raise ParallelPlanError(
            f"{what} ({size}) of {request.name!r} must be a multiple of tp ({tp}), because each "
            f"rank holds an equal part. Use tp of {join_or(divisors(size))}{otherwise}, or the "
            "kind 'replicate'."
        )


def linear_over_vocabulary(request: BlockRequest) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear of any size, and gather them."""
    source = request.module
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    return LinearOverVocabulary(
        source.in_features, source.out_features, request.mesh, bias=source.bias is not None
    )


def embedding_over_vocabulary(request: BlockRequest) -> nn.Module:
    """Cut the rows of a torch.nn.Embedding."""
    source = request.module
    assert isinstance(source, nn.Embedding), "the registry gives embeddings only"
    settings = {
        "max_norm": source.max_norm is not None,
        "scale_grad_by_freq": source.scale_grad_by_freq,
        "sparse": source.sparse,
    }
    for setting, is_set in settings.items():
        if is_set:
            raise UnsupportedError(
                f"{setting} of the embedding {request.name!r} is not supported with rows cut over "
                f"tp, because it needs all rows or sparse gradients. Leave {setting} out, or give "
                "the embedding the kind 'replicate'."
            )
    return EmbeddingOverVocabulary(
        source.num_embeddings, source.embedding_dim, request.mesh, padding_idx=source.padding_idx
    )


def dropout(request: BlockRequest) -> nn.Module:
    """Make a torch.nn.Dropout draw different masks on every tensor-parallel rank."""
    source = request.module
    assert isinstance(source, nn.Dropout), "the registry gives dropouts only"
    return TensorDropout(source.p, request.mesh, request.layer)


def features(request: BlockRequest) -> nn.Module:
    """Cut the rows of all parameters of a module; each row belongs to a feature or head."""
    for name, parameter in request.module.named_parameters(recurse=False):
        _check_divides(request, f"rows of {name}", parameter.shape[0])
    return shard_rows(request.module, request.mesh)


def latent(request: BlockRequest) -> nn.Module:
    """Keep a torch.nn.Linear replicated, whose last outputs enter the tensor-parallel region."""
    assert isinstance(request.module, nn.Linear), "the registry gives linear layers only"
    assert request.parent is not None, "the plan of the model requires it"
    return LatentLinear(request.module, int(request.parent.qk_rope_head_dim), request.mesh)  # type: ignore[arg-type]


def sequence_layer_norm(request: BlockRequest) -> nn.Module:
    """Apply a torch.nn.LayerNorm to this rank's positions."""
    source = request.module
    assert isinstance(source, nn.LayerNorm), "the registry gives such norms only"
    return SequenceLayerNorm(request.name, _check_norm(request, source), request.mesh)


def sequence_rms_norm(request: BlockRequest) -> nn.Module:
    """Apply a torch.nn.RMSNorm to this rank's positions."""
    source = request.module
    assert isinstance(source, nn.RMSNorm), "the registry gives such norms only"
    return SequenceRMSNorm(request.name, _check_norm(request, source), request.mesh)


_Norm = TypeVar("_Norm", nn.LayerNorm, nn.RMSNorm)


def _check_norm(request: BlockRequest, source: _Norm) -> _Norm:
    _refuse(
        request,
        "norm",
        {"normalized_shape of more than the features": len(source.normalized_shape) > 1},
    )
    return source


def sequence_dropout(request: BlockRequest) -> nn.Module:
    """Apply a torch.nn.Dropout to this rank's positions, with a different mask on every rank."""
    source = request.module
    assert isinstance(source, nn.Dropout), "the registry gives dropouts only"
    return SequenceDropout(request.name, source.p, request.mesh, request.layer)


def attention(request: BlockRequest) -> nn.Module:
    """Cut a torch.nn.MultiheadAttention by heads."""
    return _attention(request, request.module, request.layer)


def _attention(
    request: BlockRequest, source: nn.Module, layer: int | None
) -> HeadParallelAttention:
    assert isinstance(source, nn.MultiheadAttention), "the registry gives attention only"
    settings = {
        "kdim and vdim other than embed_dim": not source._qkv_same_embed_dim,
        "add_bias_kv": source.bias_k is not None,
        "add_zero_attn": source.add_zero_attn,
    }
    _refuse(request, "attention", settings)
    _check_divides(request, "num_heads", source.num_heads)
    return HeadParallelAttention(
        source.embed_dim,
        source.num_heads,
        request.mesh,
        dropout=source.dropout,
        bias=source.in_proj_bias is not None,
        batch_first=source.batch_first,
        layer=layer,
    )


def encoder_layer(request: BlockRequest) -> nn.Module:
    """Cut a torch.nn.TransformerEncoderLayer by heads and inner features."""
    source = request.module
    assert isinstance(source, nn.TransformerEncoderLayer), "the registry gives encoder layers only"
    parts = {"self_attn": nn.MultiheadAttention, "linear1": nn.Linear, "linear2": nn.Linear}
    _refuse(
        request,
        "encoder layer",
        {
            **{
                f"{name} of type {type(getattr(source, name)).__name__}": type(
                    getattr(source, name)
                )
                is not expected
                for name, expected in parts.items()
            },
            "an activation that mixes features or has weights": not _is_elementwise(
                source.activation
            ),
        },
    )
    return ParallelEncoderLayer(
        _attention(request, source.self_attn, None),
        _column(request, source.linear1, gather_output=False, what="dim_feedforward"),
        _row(request, source.linear2, what="dim_feedforward"),
        source.norm1,
        source.norm2,
        source.activation,
        mesh=request.mesh,
        layer=request.layer,
        norm_first=source.norm_first,
        dropout=source.dropout.p,
        dropout1=source.dropout1.p,
        dropout2=source.dropout2.p,
    )


def decoder_layer(request: BlockRequest) -> nn.Module:
    """Cut a torch.nn.TransformerDecoderLayer by heads and inner features."""
    source = request.module
    assert isinstance(source, nn.TransformerDecoderLayer), "the registry gives decoder layers only"
    _refuse(
        request,
        "decoder layer",
        {
            "an activation that mixes features or has weights": not _is_elementwise(
                source.activation
            )
        },
    )
    return ParallelDecoderLayer(
        _attention(request, source.self_attn, None),
        _attention(request, source.multihead_attn, None),
        _column(request, source.linear1, gather_output=False, what="dim_feedforward"),
        _row(request, source.linear2, what="dim_feedforward"),
        (source.norm1, source.norm2, source.norm3),
        source.activation,
        mesh=request.mesh,
        layer=request.layer,
        norm_first=source.norm_first,
        dropout=source.dropout.p,
        dropouts=(source.dropout1.p, source.dropout2.p, source.dropout3.p),
    )


def encoder(request: BlockRequest) -> nn.Module:
    """Run the layers of a torch.nn.TransformerEncoder without nested tensors."""
    assert isinstance(request.module, nn.TransformerEncoder), "the registry gives encoders only"
    return ParallelEncoder(request.module)


def _refuse(request: BlockRequest, what: str, settings: dict[str, bool]) -> None:
    for setting, is_set in settings.items():
        if is_set:
            raise UnsupportedError(
                f"the {what} {request.name!r} cannot be cut over tp: {setting} is not supported, "
                "because the cut follows the heads and features of torch's own layer. Change this "
                f"setting, or give {request.name!r} the kind 'replicate'."
            )


def _is_elementwise(activation: object) -> bool:
    """Return whether a function is element-wise, according to a test on eight numbers."""
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    assert callable(activation), "torch.nn.TransformerEncoderLayer takes a function"
    probe = torch.linspace(-3.0, 3.0, 8, device="cpu")
    with torch.no_grad():
        whole = activation(probe)
        return whole.shape == probe.shape and torch.equal(whole[4:], activation(probe[4:]))
