"""Rules for swappable blocks: their replacements and the sources of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap.blocks import build


@dataclass(frozen=True)
class TensorRule:
    """Source tensors, joined along the first dimension, of a target parameter.

    The rule does not contain the rows that a rank keeps; the target parameter's ShardSpec does.

    Args:
        target: Dotted name in the target block.
        sources: Dotted names in the source block.
    """

    target: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class BlockRule:
    """Rule for swapping one kind of block.

    Args:
        kind: Kind of the plan that requests the rule.
        source: Exact class of the block; subclasses may compute something else.
        build: Function that builds the target with unfilled parameters, and shares parts that are
            not sharded.
        tensors: Sources of the values of the target's sharded parameters.
    """

    kind: str
    source: type[nn.Module]
    build: Callable[[build.Site], nn.Module]
    tensors: tuple[TensorRule, ...] = ()


def _same(*names: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(name, (name,)) for name in names)


_LINEAR = _same("weight", "bias")
_ATTENTION = _same("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
_ENCODER_LAYER = (
    *_same(*(f"self_attn.{rule.target}" for rule in _ATTENTION)),
    *_same("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
)
_DECODER_LAYER = (
    *_ENCODER_LAYER,
    *_same(*(f"multihead_attn.{rule.target}" for rule in _ATTENTION)),
)

RULES: tuple[BlockRule, ...] = (
    BlockRule("column", nn.Linear, build.column, _LINEAR),
    BlockRule("column_gather", nn.Linear, build.column_gather, _LINEAR),
    BlockRule("row", nn.Linear, build.row, _LINEAR),
    BlockRule("row_split", nn.Linear, build.row_split, _LINEAR),
    BlockRule("vocab", nn.Linear, build.linear_over_vocabulary, _LINEAR),
    BlockRule("vocab", nn.Embedding, build.embedding_over_vocabulary, _same("weight")),
    BlockRule("latent", nn.Linear, build.latent),
    BlockRule("dropout", nn.Dropout, build.dropout),
    BlockRule("sequence", nn.LayerNorm, build.sequence_layer_norm, _LINEAR),
    BlockRule("sequence", nn.RMSNorm, build.sequence_rms_norm, _same("weight")),
    BlockRule("sequence", nn.Dropout, build.sequence_dropout),
    BlockRule("auto", nn.MultiheadAttention, build.attention, _ATTENTION),
    BlockRule("auto", nn.TransformerEncoderLayer, build.encoder_layer, _ENCODER_LAYER),
    BlockRule("auto", nn.TransformerDecoderLayer, build.decoder_layer, _DECODER_LAYER),
    BlockRule("auto", nn.TransformerEncoder, build.encoder),
)


def rule_for(kind: str, module: nn.Module) -> BlockRule | None:
    """Return the rule that swaps a module as this kind, or None."""
    if kind == "features":
        return _rule_for_features(module)
    return next((rule for rule in RULES if rule.kind == kind and type(module) is rule.source), None)


def _rule_for_features(module: nn.Module) -> BlockRule | None:
    """Return the rule for a module with one parameter row per feature or head."""
    own = dict(module.named_parameters(recurse=False))
    rows = {parameter.shape[:1] for parameter in own.values()}
    if len(rows) != 1 or not rows.pop() or len(own) != sum(1 for _ in module.parameters()):
        return None
    return BlockRule("features", type(module), build.features, _same(*own))


def swapped(rule: BlockRule, site: build.Site) -> nn.Module:
    """Return the target block for a site, with this rank's part of the source's values.

    The source is not changed, and the target shares the parts that are not sharded.
    """
    device = next((p.device for p in site.module.parameters()), torch.device("cpu"))
    with device:
        target = rule.build(site)
    for tensor_rule in rule.tensors:
        _fill(target, site, tensor_rule)
    # Parts taken over from the source keep their training mode.
    for module in set(target.modules()) - set(site.module.modules()):
        module.training = site.module.training
    return target


def _fill(target: nn.Module, site: build.Site, rule: TensorRule) -> None:
    parameter = _tensor(target, rule.target)
    sources = [_tensor(site.module, name) for name in rule.sources]
    present = [source for source in sources if source is not None]
    if parameter is None and not present:
        return
    if (
        parameter is None
        or len(present) != len(sources)
        or len({p.requires_grad for p in present}) != 1
    ):
        raise UnsupportedError(
            f"the tensors {', '.join(rule.sources)} of {site.name!r} must all exist and all be "
            f"trained or none, because they become {rule.target}. Build the block without changing "
            "its biases, or give it the kind 'replicate'."
        )
    full = torch.cat([p.detach() for p in present]) if len(present) > 1 else present[0].detach()
    spec = shard_spec_of(parameter)
    # Only the storage changes, and with it the dtype. The parameter object keeps its attributes.
    parameter.data = spec.shard(full, local_size=parameter.shape[spec.dim])
    parameter.requires_grad_(present[0].requires_grad)


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    found: Any = reduce(getattr, name.split("."), module)
    return found


def source_names(rule: BlockRule, site: build.Site) -> Mapping[str, str]:
    """Map full names of source tensors to target parameters that are made of one tensor only."""
    return {
        f"{site.name}.{tensor_rule.sources[0]}": tensor_rule.target
        for tensor_rule in rule.tensors
        if len(tensor_rule.sources) == 1
    }
