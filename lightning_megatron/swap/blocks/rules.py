"""Rules that map a block to its replacement, and the tensors of one to those of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap.blocks import builders


@dataclass(frozen=True)
class BlockRule:
    """Rule for swapping one kind of block.

    Args:
        source: Exact class of the block; subclasses may compute something else.
        build: Function that builds the target, whose sharded parameters have no values yet. Parts
            that are not sharded are those of the source.
        sharded: Dotted names of the target's sharded parameters, which get rows of the source's
            tensors of the same names. The rows that a rank keeps are in the target's ShardSpec.
        shared: Names of the parameters that the target shares with the source.
    """

    kind: str
    source: type[nn.Module]
    build: Callable[[builders.BlockRequest], nn.Module]
    sharded: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


_LINEAR = ("weight", "bias")
_ATTENTION = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
_ENCODER_LAYER = (
    *(f"self_attn.{name}" for name in _ATTENTION),
    "linear1.weight",
    "linear1.bias",
    "linear2.weight",
    "linear2.bias",
)
_DECODER_LAYER = (*_ENCODER_LAYER, *(f"multihead_attn.{name}" for name in _ATTENTION))

RULES: tuple[BlockRule, ...] = (
    BlockRule("column", nn.Linear, builders.column, _LINEAR),
    BlockRule("column_gather", nn.Linear, partial(builders.column, gather_output=True), _LINEAR),
    BlockRule("column_full", nn.Linear, builders.full_column, _LINEAR),
    BlockRule("qkv", nn.Linear, partial(builders.full_column, shares=(1, 1, 1)), _LINEAR),
    BlockRule("gate_up", nn.Linear, partial(builders.full_column, shares=(1, 1)), _LINEAR),
    BlockRule("row", nn.Linear, builders.row, _LINEAR),
    BlockRule("row_split", nn.Linear, partial(builders.row, split_input=True), _LINEAR),
    BlockRule("vocab", nn.Linear, builders.linear_over_vocabulary, _LINEAR),
    BlockRule("vocab", nn.Embedding, builders.embedding_over_vocabulary, ("weight",)),
    BlockRule("latent", nn.Linear, builders.latent, shared=_LINEAR),
    BlockRule("dropout", nn.Dropout, builders.dropout),
    BlockRule("sequence", nn.LayerNorm, builders.sequence_norm, _LINEAR),
    BlockRule("sequence", nn.RMSNorm, builders.sequence_norm, ("weight",)),
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
    return BlockRule("features", type(module), builders.features, tuple(parameters))


def build_target(rule: BlockRule, request: builders.BlockRequest) -> nn.Module:
    """Return the target block, whose sharded parameters have no values yet.

    The source is not changed, and the target shares the parts that are not sharded.
    """
    device = request.device
    if device is None:
        device = next((p.device for p in request.module.parameters()), torch.device("cpu"))
    with device:
        target = rule.build(request)
    for name in rule.sharded:
        if (_tensor(target, name) is None) != (_tensor(request.module, name) is None):
            raise UnsupportedError(
                f"{name!r} of {request.name!r} must be as its class built it: its replacement has "
                "a parameter of this name where it has none, or the reverse. Leave the biases of "
                "the block as they were built, or give the block the kind 'replicate'."
            )
    # Parts of the source keep their training mode.
    for module in set(target.modules()) - set(request.module.modules()):
        module.training = request.module.training
    return target


def fill_target(rule: BlockRule, request: builders.BlockRequest, target: nn.Module) -> None:
    """Give a target block this rank's part of the source's values; do not change the source."""
    for key in rule.shared:
        # The source may have been given its values after the target was built.
        target._parameters[key] = request.module._parameters[key]
    for name in rule.sharded:
        source = _tensor(request.module, name)
        if source is None:
            continue
        parameter = target.get_parameter(name)
        spec = shard_spec_of(parameter)
        # Only the storage changes, and with it the dtype. The parameter object keeps its
        # attributes.
        parameter.data = spec.shard(source.detach(), local_size=parameter.shape[spec.dim])
        parameter.requires_grad_(source.requires_grad)


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    tensor: Any = reduce(getattr, name.split("."), module)
    return tensor
