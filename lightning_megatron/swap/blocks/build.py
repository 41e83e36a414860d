"""Builders of the blocks that replace torch.nn blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.plan.legal_values import divisors, join_or
from lightning_megatron.swap.blocks.attention import HeadParallelAttention
from lightning_megatron.swap.blocks.between import LatentLinear, with_part_of_rows
from lightning_megatron.swap.blocks.dropout import TensorDropout
from lightning_megatron.swap.blocks.sequence import (
    SequenceColumnLinear,
    SequenceDropout,
    SequenceLayerNorm,
    SequenceRMSNorm,
    SequenceRowLinear,
)
from lightning_megatron.swap.blocks.transformer_decoder import ParallelDecoderLayer
from lightning_megatron.swap.blocks.transformer_encoder import ParallelEncoder, ParallelEncoderLayer
from lightning_megatron.swap.blocks.vocabulary import EmbeddingOverVocabulary, LinearOverVocabulary


@dataclass(frozen=True)
class Site:
    """Arguments of a block builder.

    Args:
        name: Dotted name of the block, for errors.
        module: Block that is replaced.
        mesh: Process groups of this rank, without sequence parallelism, because these blocks get
            whole sequences.
        layer: Number of the block for random streams.
        cuts_sequence: Whether ranks share the sequence between blocks of the plan.
        parent: Module around the block.
    """

    name: str
    module: nn.Module
    mesh: ParallelMesh
    layer: int
    cuts_sequence: bool = False
    parent: nn.Module | None = None


def column(site: Site) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear and keep them cut."""
    return _column(site, site.module, gather_output=False)


def column_gather(site: Site) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear and gather them."""
    return _column(site, site.module, gather_output=True)


def row(site: Site) -> nn.Module:
    """Cut the inputs of a torch.nn.Linear."""
    return _row(site, site.module)


def row_split(site: Site) -> nn.Module:
    """Cut the inputs of a torch.nn.Linear and split complete inputs."""
    return _row(site, site.module, split_input=True)


def _column(
    site: Site, source: nn.Module, *, gather_output: bool, what: str = "out_features"
) -> ColumnParallelLinear:
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    pads = ", or the kind 'vocab', which pads and gathers" if what == "out_features" else ""
    _check_divides(site, what, source.out_features, pads)
    has_bias = source.bias is not None
    kind = SequenceColumnLinear if site.cuts_sequence else ColumnParallelLinear
    return kind(
        source.in_features,
        source.out_features,
        site.mesh,
        bias=has_bias,
        gather_output=gather_output,
    )


def _row(
    site: Site, source: nn.Module, what: str = "in_features", split_input: bool = False
) -> RowParallelLinear:
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    _check_divides(site, what, source.in_features)
    kind = SequenceRowLinear if site.cuts_sequence else RowParallelLinear
    has_bias = source.bias is not None
    mesh = replace(site.mesh, sequence_parallel=True) if site.cuts_sequence else site.mesh
    return kind(
        source.in_features, source.out_features, mesh, bias=has_bias, split_input=split_input
    )


def _check_divides(site: Site, what: str, size: int, otherwise: str = "") -> None:
    tp = site.mesh.tp.size
    if size % tp:
        raise ParallelPlanError(
            f"{what} ({size}) of {site.name!r} must be a multiple of tp ({tp}), because each rank "
            f"holds an equal part. Use tp of {join_or(divisors(size))}{otherwise}, or the kind "
            "'replicate'."
        )


def linear_over_vocabulary(site: Site) -> nn.Module:
    """Cut the outputs of a torch.nn.Linear of any size, and gather them."""
    source = site.module
    assert isinstance(source, nn.Linear), "the registry gives linear layers only"
    return LinearOverVocabulary(
        source.in_features, source.out_features, site.mesh, bias=source.bias is not None
    )


def embedding_over_vocabulary(site: Site) -> nn.Module:
    """Cut the rows of a torch.nn.Embedding."""
    source = site.module
    assert isinstance(source, nn.Embedding), "the registry gives embeddings only"
    settings = {
        "max_norm": source.max_norm is not None,
        "scale_grad_by_freq": source.scale_grad_by_freq,
        "sparse": source.sparse,
    }
    for setting, is_set in settings.items():
        if is_set:
            raise UnsupportedError(
                f"{setting} of the embedding {site.name!r} is not supported where its rows are cut "
                f"over tp: it needs all rows or dense all-reduces cannot carry it. Leave {setting} "
                "out or give it the kind 'replicate'."
            )
    return EmbeddingOverVocabulary(
        source.num_embeddings, source.embedding_dim, site.mesh, padding_idx=source.padding_idx
    )


def dropout(site: Site) -> nn.Module:
    """Draw different masks of a torch.nn.Dropout on every tensor-parallel rank."""
    source = site.module
    assert isinstance(source, nn.Dropout), "the registry gives dropouts only"
    return TensorDropout(source.p, site.mesh, site.layer)


def features(site: Site) -> nn.Module:
    """Cut the rows of all parameters of a module; each row belongs to a feature or head."""
    for name, parameter in site.module.named_parameters(recurse=False):
        _check_divides(site, f"rows of {name}", parameter.shape[0])
    return with_part_of_rows(site.module, site.mesh)


def latent(site: Site) -> nn.Module:
    """Let the last outputs of a torch.nn.Linear enter the tensor-parallel region."""
    assert isinstance(site.module, nn.Linear), "the registry gives linear layers only"
    assert site.parent is not None, "the plan of the model around it asks for it"
    return LatentLinear(site.module, int(site.parent.qk_rope_head_dim), site.mesh)  # type: ignore[arg-type]


def sequence_layer_norm(site: Site) -> nn.Module:
    """Apply a torch.nn.LayerNorm to this rank's positions."""
    source = site.module
    assert isinstance(source, nn.LayerNorm), "the registry gives such norms only"
    return SequenceLayerNorm(site.name, _of_features(site, source), site.mesh)


def sequence_rms_norm(site: Site) -> nn.Module:
    """Apply a torch.nn.RMSNorm to this rank's positions."""
    source = site.module
    assert isinstance(source, nn.RMSNorm), "the registry gives such norms only"
    return SequenceRMSNorm(site.name, _of_features(site, source), site.mesh)


_Norm = TypeVar("_Norm", nn.LayerNorm, nn.RMSNorm)


def _of_features(site: Site, source: _Norm) -> _Norm:
    _refuse(
        site,
        "norm",
        {"normalized_shape of more than the features": len(source.normalized_shape) > 1},
    )
    return source


def sequence_dropout(site: Site) -> nn.Module:
    """Draw masks of a torch.nn.Dropout for this rank's positions."""
    source = site.module
    assert isinstance(source, nn.Dropout), "the registry gives dropouts only"
    return SequenceDropout(site.name, source.p, site.mesh, site.layer)


def attention(site: Site) -> nn.Module:
    """Cut a torch.nn.MultiheadAttention by heads."""
    return _attention(site, site.module, site.layer)


def _attention(site: Site, source: nn.Module, layer: int | None) -> HeadParallelAttention:
    assert isinstance(source, nn.MultiheadAttention), "the registry gives attention only"
    settings = {
        "kdim and vdim other than embed_dim": not source._qkv_same_embed_dim,
        "add_bias_kv": source.bias_k is not None,
        "add_zero_attn": source.add_zero_attn,
    }
    _refuse(site, "attention", settings)
    _check_divides(site, "num_heads", source.num_heads)
    return HeadParallelAttention(
        source.embed_dim,
        source.num_heads,
        site.mesh,
        dropout=source.dropout,
        bias=source.in_proj_bias is not None,
        batch_first=source.batch_first,
        layer=layer,
    )


def encoder_layer(site: Site) -> nn.Module:
    """Cut a torch.nn.TransformerEncoderLayer by heads and inner features."""
    source = site.module
    assert isinstance(source, nn.TransformerEncoderLayer), "the registry gives encoder layers only"
    parts = {"self_attn": nn.MultiheadAttention, "linear1": nn.Linear, "linear2": nn.Linear}
    _refuse(
        site,
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
        _attention(site, source.self_attn, None),
        _column(site, source.linear1, gather_output=False, what="dim_feedforward"),
        _row(site, source.linear2, what="dim_feedforward"),
        source.norm1,
        source.norm2,
        source.activation,
        mesh=site.mesh,
        layer=site.layer,
        norm_first=source.norm_first,
        dropout=source.dropout.p,
        dropout1=source.dropout1.p,
        dropout2=source.dropout2.p,
    )


def decoder_layer(site: Site) -> nn.Module:
    """Cut a torch.nn.TransformerDecoderLayer by heads and inner features."""
    source = site.module
    assert isinstance(source, nn.TransformerDecoderLayer), "the registry gives decoder layers only"
    _refuse(
        site,
        "decoder layer",
        {
            "an activation that mixes features or has weights": not _is_elementwise(
                source.activation
            )
        },
    )
    return ParallelDecoderLayer(
        _attention(site, source.self_attn, None),
        _attention(site, source.multihead_attn, None),
        _column(site, source.linear1, gather_output=False, what="dim_feedforward"),
        _row(site, source.linear2, what="dim_feedforward"),
        (source.norm1, source.norm2, source.norm3),
        source.activation,
        mesh=site.mesh,
        layer=site.layer,
        norm_first=source.norm_first,
        dropout=source.dropout.p,
        dropouts=(source.dropout1.p, source.dropout2.p, source.dropout3.p),
    )


def encoder(site: Site) -> nn.Module:
    """Run the layers of a torch.nn.TransformerEncoder without nested tensors."""
    assert isinstance(site.module, nn.TransformerEncoder), "the registry gives encoders only"
    return ParallelEncoder(site.module)


def _refuse(site: Site, what: str, settings: dict[str, bool]) -> None:
    for setting, is_set in settings.items():
        if is_set:
            raise UnsupportedError(
                f"the {what} {site.name!r} cannot be cut over tp: {setting} is not supported, "
                "because heads and features are cut by the layout of torch's own layer. Change it, "
                f"or give {site.name!r} the kind 'replicate'."
            )


def _is_elementwise(activation: object) -> bool:
    """Return whether a function is element-wise, found by a trial on eight numbers."""
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return False
    assert callable(activation), "torch.nn.TransformerEncoderLayer takes a function"
    probe = torch.linspace(-3.0, 3.0, 8, device="cpu")
    with torch.no_grad():
        whole = activation(probe)
        return whole.shape == probe.shape and torch.equal(whole[4:], activation(probe[4:]))
