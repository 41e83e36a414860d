"""Rules that map a block to its replacement, and the tensors of one to those of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap.blocks import builders


@dataclass(frozen=True)
class TensorRule:
    """Source tensors of a target parameter, which are joined along the first dimension.

    The rows that a rank keeps are not in the rule, but in the ShardSpec of the target parameter.
    """

    target: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class BlockRule:
    """Rule for swapping one kind of block.

    Args:
        source: Exact class of the block; subclasses may compute something else.
        build: Function that builds the target, whose sharded parameters have no values yet. Parts
            that are not sharded are those of the source.
        tensors: Sources of the values of the target's sharded parameters.
        shared: Names of the parameters that the target shares with the source.
    """

    kind: str
    source: type[nn.Module]
    build: Callable[[builders.BlockRequest], nn.Module]
    tensors: tuple[TensorRule, ...] = ()
    shared: tuple[str, ...] = ()


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
    BlockRule("column", nn.Linear, builders.column, _LINEAR),
    BlockRule("column_gather", nn.Linear, builders.column_gather, _LINEAR),
    BlockRule("row", nn.Linear, builders.row, _LINEAR),
    BlockRule("row_split", nn.Linear, builders.row_split, _LINEAR),
    BlockRule("vocab", nn.Linear, builders.linear_over_vocabulary, _LINEAR),
    BlockRule("vocab", nn.Embedding, builders.embedding_over_vocabulary, _same("weight")),
    BlockRule("latent", nn.Linear, builders.latent, shared=("weight", "bias")),
    BlockRule("dropout", nn.Dropout, builders.dropout),
    BlockRule("sequence", nn.LayerNorm, builders.sequence_layer_norm, _LINEAR),
    BlockRule("sequence", nn.RMSNorm, builders.sequence_rms_norm, _same("weight")),
    BlockRule("sequence", nn.Dropout, builders.sequence_dropout),
    BlockRule("auto", nn.MultiheadAttention, builders.attention, _ATTENTION),
    BlockRule("auto", nn.TransformerEncoderLayer, builders.encoder_layer, _ENCODER_LAYER),
    BlockRule("auto", nn.TransformerDecoderLayer, builders.decoder_layer, _DECODER_LAYER),
    BlockRule("auto", nn.TransformerEncoder, builders.encoder),
)


def rules_of(module: nn.Module) -> dict[str, BlockRule]:
    """Return the rules that swap a module, by kind."""
    rules = {rule.kind: rule for rule in RULES if type(module) is rule.source}
    features = _rule_for_features(module)
    return rules if features is None else {**rules, "features": features}


def _rule_for_features(module: nn.Module) -> BlockRule | None:
    """Return the rule for a module with one parameter row per feature or head."""
    parameters = dict(module.named_parameters(recurse=False))
    rows = {parameter.shape[:1] for parameter in parameters.values()}
    if len(rows) != 1 or not rows.pop() or len(parameters) != sum(1 for _ in module.parameters()):
        return None
    return BlockRule("features", type(module), builders.features, _same(*parameters))


def build_target(rule: BlockRule, request: builders.BlockRequest) -> nn.Module:
    """Return the target block, whose sharded parameters have no values yet.

    The source is not changed, and the target shares the parts that are not sharded.
    """
    device = request.device
    if device is None:
        device = next((p.device for p in request.module.parameters()), torch.device("cpu"))
    with device:
        target = rule.build(request)
    for tensor_rule in rule.tensors:
        _sources_of(target, request, tensor_rule)
    # Parts of the source keep their training mode.
    for module in set(target.modules()) - set(request.module.modules()):
        module.training = request.module.training
    return target


def fill_target(rule: BlockRule, request: builders.BlockRequest, target: nn.Module) -> None:
    """Give a target block this rank's part of the source's values; do not change the source."""
    for key in rule.shared:
        # The source may have been given its values after the target was built.
        target._parameters[key] = request.module._parameters[key]
    for tensor_rule in rule.tensors:
        sources = _sources_of(target, request, tensor_rule)
        if not sources:
            continue
        parameter = target.get_parameter(tensor_rule.target)
        full = torch.cat([p.detach() for p in sources]) if len(sources) > 1 else sources[0].detach()
        spec = shard_spec_of(parameter)
        # Only the storage changes, and with it the dtype. The parameter object keeps its
        # attributes.
        parameter.data = spec.shard(full, local_size=parameter.shape[spec.dim])
        parameter.requires_grad_(sources[0].requires_grad)


def _sources_of(
    target: nn.Module, request: builders.BlockRequest, rule: TensorRule
) -> list[Tensor]:
    """Return the source tensors of a target parameter; empty if source and target lack it."""
    parameter = _tensor(target, rule.target)
    sources = [_tensor(request.module, name) for name in rule.sources]
    present = [source for source in sources if source is not None]
    if parameter is None and not present:
        return []
    if (
        parameter is None
        or len(present) != len(sources)
        or len({p.requires_grad for p in present}) != 1
    ):
        raise UnsupportedError(
            f"the tensors {', '.join(rule.sources)} of {request.name!r} must all be present or all "
            "be absent, and all trained or all frozen, because they become one parameter, "
            f"{rule.target}. Leave the biases of the block as they were built, or give the block "
            "the kind 'replicate'."
        )
    return present


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    tensor: Any = reduce(getattr, name.split("."), module)
    return tensor


def source_names(rule: BlockRule, request: builders.BlockRequest) -> Mapping[str, str]:
    """Map full names of source tensors to the target parameters that consist of one of them."""
    return {
        f"{request.name}.{tensor_rule.sources[0]}": tensor_rule.target
        for tensor_rule in rule.tensors
        if len(tensor_rule.sources) == 1
    }
