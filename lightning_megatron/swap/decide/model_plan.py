"""Tensor-parallel plans that Hugging Face models define, for models without a family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.settings import divisors, join_or
from lightning_megatron.swap.blocks.rules import BlockRule, rules_of
from lightning_megatron.swap.hugging_face.peft_layers import is_peft_module

#: Kinds that correspond to the styles in Hugging Face's plans.
_KINDS: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    "embedding_rowwise": "vocab",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "partial",
    "mla_kv_a_proj": "latent",
    "replicate": "replicate",
}
#: Maximum number of names in a line of the log.
_NUM_SHOWN = 8

#: Rules that can swap each module of a model, by kind.
_Rules = Mapping[nn.Module, Mapping[str, BlockRule]]


@dataclass(frozen=True)
class DeclaredPlan:
    """Supported part of the plan that a Hugging Face model defines.

    Args:
        kinds: Kind by the module's name within the model.
    """

    kinds: Mapping[str, str]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe the supported part of the plan."""
        if not self.kinds:
            return f"no known plan ({'; '.join(self.left)}): give one as tensor_parallel_plan"
        left = f", but for {'; '.join(self.left[:_NUM_SHOWN])}" if self.left else ""
        return f"its own plan{left}{', ...' if len(self.left) > _NUM_SHOWN else ''}"


def supported_plan(model: Any, tp: int, called: str = "model") -> DeclaredPlan:
    """Return the supported part of the plan that a Hugging Face model defines.

    Modules with the same parent, such as the projections of an attention, are sharded together or
    not at all, because one of them consumes the sharded outputs of another. They are not sharded if
    the plan's entry for one of them is not supported, or if their parent cannot be sharded, for
    example because it has a parameter of all features that the plan does not name.
    """
    styles: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not styles:
        return DeclaredPlan({}, ("it defines none",))
    if any(is_peft_module(module) for module in model.modules()):
        return DeclaredPlan({}, ("peft has wrapped its layers",))
    modules = dict(model.named_modules())
    rules = {module: rules_of(module) for module in modules.values()}
    blocks: dict[str, dict[str, str]] = {}
    left: dict[str, str] = {}
    unknown: set[str] = set()
    for pattern, style in styles.items():
        kind = _KINDS.get(style)
        named = [name for name in modules if fnmatchcase(name, pattern)]
        if not named and any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            left[f"{pattern!r} is {style!r}"] = ""
        for name in named:
            parent = name.rpartition(".")[0]
            if kind not in ("replicate", "partial", *rules[modules[name]]):
                left[f"{pattern!r} is {style!r}"] = ""
                unknown |= {parent, name}
            else:
                blocks.setdefault(parent, {})[name] = kind
    kinds: dict[str, str] = {}
    for parent, block in blocks.items():
        reason = "" if parent in unknown and _leaves_parts(block) else None
        if reason is None and _leaves_parts(block):
            reason = _reason_against_sharding(
                modules[parent], parent, block, model.config, tp, called
            )
        if reason is None:
            kinds |= block | _head_parameters(modules[parent], parent, block, model.config, rules)
        elif reason:
            left[re.sub(r"\d+", "*", f"{parent!r} {reason}")] = ""
    _share_vocabularies(model, modules, rules, kinds, left)
    return DeclaredPlan(kinds, tuple(left))


def _leaves_parts(block: Mapping[str, str]) -> bool:
    """Return whether a module of a block passes sharded features to another."""
    return not {"column", "row", "latent"}.isdisjoint(block.values())


def _reason_against_sharding(
    module: nn.Module, name: str, block: Mapping[str, str], config: Any, tp: int, called: str
) -> str | None:
    """Return why a block cannot be sharded, although its modules can be; None if it can."""
    if {"column", "row"} - set(block.values()):
        return "has no pair of column and row layers"
    if "latent" in block.values() and not hasattr(module, "qk_rope_head_dim"):
        return "has a latent layer of another form"
    config = getattr(module, "config", config)
    if any(
        hasattr(module, known)
        for known in ("head_dim", "num_heads", "num_attention_heads", "num_key_value_groups")
    ):
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % tp:
                if heads == 1:
                    return f"has one head ({field}), which cannot be cut"
                raise ParallelPlanError(
                    f"{field} ({heads}) of {called!r} must be a multiple of tp ({tp}), because "
                    f"each rank holds whole heads. Use tp of {join_or(divisors(heads))}."
                )
    layers = [
        part
        for path, part in module.named_modules(prefix=name)
        if path in block and isinstance(part, nn.Linear)
    ]
    widths = {layer.out_features for layer in layers}
    widths -= {layer.in_features for layer in layers}
    for key, owner, parameter in _unplanned_parameters(module, name, block):
        if owner is module or isinstance(owner, (nn.ParameterList, nn.ParameterDict)):
            return f"has a parameter {key!r} that its plan does not name"
        if re.search(r"(^|\.)\d+(\.|$)", key):
            return f"has a list of modules ({key!r}) that its plan does not name"
        if parameter.dim() == 1 and parameter.shape[0] in widths:
            return f"has a parameter of all features ({key!r}) that its plan does not name"
    return None


def _unplanned_parameters(
    module: nn.Module, name: str, block: Mapping[str, str]
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """List a block's parameters outside its plan: name in the block, owner, parameter."""
    for path, owner in module.named_modules():
        full = f"{name}.{path}" if path else name
        if not any(full == known or full.startswith(f"{known}.") for known in block):
            for key, parameter in owner.named_parameters(recurse=False):
                yield (f"{path}.{key}" if path else key), owner, parameter


def _head_parameters(
    module: nn.Module, name: str, block: Mapping[str, str], config: Any, rules: _Rules
) -> dict[str, str]:
    """Shard parameters with one row per head, such as norms of queries and keys."""
    if not _leaves_parts(block):
        return {}
    config = getattr(module, "config", config)
    heads = {
        getattr(config, field, None) for field in ("num_attention_heads", "num_key_value_heads")
    }
    owners = {
        owner: key.rpartition(".")[0]
        for key, owner, _ in _unplanned_parameters(module, name, block)
    }
    kinds = {}
    for owner, key in owners.items():
        has_row_per_head = all(p.dim() > 1 and p.shape[0] in heads for p in owner.parameters())
        if has_row_per_head and "features" in rules[owner]:
            kinds[f"{name}.{key}"] = "features"
    return kinds


def _share_vocabularies(
    model: Any,
    modules: Mapping[str, nn.Module],
    rules: _Rules,
    kinds: dict[str, str],
    left: dict[str, str],
) -> None:
    """Shard either all or none of the modules that share the weight of a vocabulary layer."""
    head = model.get_output_embeddings()
    for name, module in modules.items():
        if head is not None and module is head and name in kinds:
            kinds[name] = "vocab"
    for name in [name for name, kind in kinds.items() if kind == "vocab"]:
        weight = modules[name].weight
        shared = [key for key, part in modules.items() if _has(part, weight)]
        if all("vocab" in rules[modules[key]] for key in shared):
            kinds |= dict.fromkeys(shared, "vocab")
            continue
        odd = next(key for key in shared if "vocab" not in rules[modules[key]])
        kind = type(modules[odd]).__name__
        left[f"{name!r} shares its weight with {odd!r}, a {kind}, which is not cut"] = ""
        for key in shared:
            kinds.pop(key, None)


def _has(module: nn.Module, weight: Any) -> bool:
    return any(parameter is weight for parameter in module._parameters.values())


def describe_unsharded(model: nn.Module) -> str:
    """Describe the modules that are not sharded over tp, the largest first."""
    sizes: dict[str, int] = {}
    for name, size in _unsharded_modules(model):
        sizes[name] = sizes.get(name, 0) + size
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(ordered) - _NUM_SHOWN} more" if len(ordered) > _NUM_SHOWN else ""
    return f"Whole on every rank: {', '.join(ordered[:_NUM_SHOWN])}{more}." if ordered else ""


def _unsharded_modules(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        # The bias of a row layer is whole, although its weight is sharded.
        if parameters and all(shard_spec_of(parameter).is_whole for parameter in parameters):
            yield re.sub(r"\d+", "*", name), sum(p.numel() for p in parameters)
