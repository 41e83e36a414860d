"""Builders of the blocks that replace torch.nn blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.plan.settings import divisors, join_or
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.cut_modules import (
    EmbeddingOverVocabulary,
    FullColumnLinear,
    LatentLinear,
    LinearOverVocabulary,
    SequenceColumnLinear,
    SequenceDropout,
    SequenceLayerNorm,
    SequenceRMSNorm,
    SequenceRowLinear,
    TensorDropout,
    shard_rows,
)
from lightning_megatron.swap.blocks.transformer_layers import (
    ParallelDecoderLayer,
    ParallelEncoder,
    ParallelEncoderLayer,
)


@dataclass(frozen=True)
class BlockRequest:
    """Arguments of a block builder.

    Args:
        name: Dotted name of the block, for errors.
        module: Block that is replaced.
        mesh: Process groups of this rank, without sequence parallelism, because inputs of these
            blocks are complete sequences.
        layer: Number of the block for random streams; None inside a block that selects the streams
            itself.
        cuts_sequence: Whether the sequence is cut over tp between blocks of the plan.
        parent: Module around the block.
        sizes: Numbers of heads and groups that the kind names.
        device: Device of the block's values; None means the device of its parameters.
    """

    name: str
    module: Any
    mesh: ParallelMesh
    layer: int | None
    cuts_sequence: bool = False
    parent: Any = None
    sizes: tuple[int, ...] = ()
    device: torch.device | None = None


def column(
    request: BlockRequest, *, gather_output: bool = False, what: str = "out_features"
) -> ColumnParallelLinear:
    """Cut the outputs of a torch.nn.Linear, and keep them cut or gather them."""
    source = request.module
    pads = ", or the kind 'vocab', which pads and gathers" if what == "out_features" else ""
    _check_divides(request, what, source.out_features, pads)
    kind = SequenceColumnLinear if request.cuts_sequence else ColumnParallelLinear
    return kind(
        source.in_features,
        source.out_features,
        request.mesh,
        bias=source.bias is not None,
        gather_output=gather_output,
    )


def full_column(request: BlockRequest, *, shares: tuple[int, ...] = (1,)) -> FullColumnLinear:
    """Cut the outputs of a torch.nn.Linear, of which user code sees all.

    Args:
        shares: Relative sizes of the layers that are fused in this one. Numbers of heads and of
            groups of keys and values give those of queries, keys and values.
    """
    source = request.module
    if request.sizes:
        heads, groups = request.sizes
        shares = (heads, groups, groups)
    if source.out_features % sum(shares):
        raise ParallelPlanError(
            f"out_features ({source.out_features}) of {request.name!r} must be a multiple of "
            f"{sum(shares)}, because the sizes of the layers fused in it are as "
            f"{' : '.join(map(str, shares))}. Name the numbers of heads and of groups of keys and "
            "values, as in 'qkv(8, 2)', or use the kind 'column_full'."
        )
    unit = source.out_features // sum(shares)
    sections = [unit * share for share in shares]
    what = "out_features" if len(sections) == 1 else "a fused part of out_features"
    for size in sections:
        _check_divides(request, what, size)
    return FullColumnLinear(
        source.in_features, sections, request.mesh, bias=source.bias is not None
    )


def row(
    request: BlockRequest, *, split_input: bool = False, what: str = "in_features"
) -> RowParallelLinear:
    """Cut the inputs of a torch.nn.Linear, which are complete if it splits them."""
    source = request.module
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
    return LinearOverVocabulary(
        source.in_features, source.out_features, request.mesh, bias=source.bias is not None
    )


def embedding_over_vocabulary(request: BlockRequest) -> nn.Module:
    """Cut the rows of a torch.nn.Embedding."""
    source = request.module
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
    return TensorDropout(request.module.p, request.mesh, request.layer)


def features(request: BlockRequest) -> nn.Module:
    """Cut the rows of all parameters of a module; each row belongs to a feature or head."""
    for name, parameter in request.module.named_parameters(recurse=False):
        _check_divides(request, f"rows of {name}", parameter.shape[0])
    return shard_rows(request.module, request.mesh)


def latent(request: BlockRequest) -> nn.Module:
    """Keep a torch.nn.Linear replicated, whose last outputs enter the tensor-parallel region."""
    return LatentLinear(request.module, int(request.parent.qk_rope_head_dim), request.mesh)


def sequence_norm(request: BlockRequest) -> nn.Module:
    """Apply a norm over the features to this rank's positions."""
    is_wide = len(request.module.normalized_shape) > 1
    _refuse(request, "norm", {"normalized_shape of more than the features": is_wide})
    if isinstance(request.module, nn.LayerNorm):
        return SequenceLayerNorm(request.name, request.module, request.mesh)
    return SequenceRMSNorm(request.name, request.module, request.mesh)


def sequence_dropout(request: BlockRequest) -> nn.Module:
    """Apply a torch.nn.Dropout to this rank's positions, with a different mask on every rank."""
    return SequenceDropout(request.name, request.module.p, request.mesh, request.layer)


def attention(request: BlockRequest) -> HeadParallelAttention:
    """Cut a torch.nn.MultiheadAttention by heads."""
    source = request.module
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
        layer=request.layer,
    )


_MIXES = "an activation that mixes features or has weights"


def encoder_layer(request: BlockRequest) -> nn.Module:
    """Cut a torch.nn.TransformerEncoderLayer by heads and inner features."""
    source = request.module
    parts = {"self_attn": nn.MultiheadAttention, "linear1": nn.Linear, "linear2": nn.Linear}
    settings = {_MIXES: not _is_elementwise(source.activation)}
    for name, expected in parts.items():
        kind = type(getattr(source, name))
        settings[f"{name} of type {kind.__name__}"] = kind is not expected
    _refuse(request, "encoder layer", settings)
    return ParallelEncoderLayer(*_parts(request, "self_attn"))


def decoder_layer(request: BlockRequest) -> nn.Module:
    """Cut a torch.nn.TransformerDecoderLayer by heads and inner features."""
    source = request.module
    _refuse(request, "decoder layer", {_MIXES: not _is_elementwise(source.activation)})
    return ParallelDecoderLayer(*_parts(request, "self_attn", "multihead_attn"))


def _parts(request: BlockRequest, *attentions: str) -> tuple[Any, ...]:
    """Return the arguments of a layer that equals the one of torch.nn."""
    source = request.module
    return (
        source,
        {
            name: attention(replace(request, module=getattr(source, name), layer=None))
            for name in attentions
        },
        column(replace(request, module=source.linear1), what="dim_feedforward"),
        row(replace(request, module=source.linear2), what="dim_feedforward"),
        request.mesh,
        request.layer,
    )


def encoder(request: BlockRequest) -> nn.Module:
    """Run the layers of a torch.nn.TransformerEncoder without nested tensors."""
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
