"""Hugging Face models without a table of ours, cut by the plan that they bring themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.legal_values import divisors, one_of
from lightning_megatron.swap.peft_layers import is_of_peft
from lightning_megatron.swap.plan import Place
from lightning_megatron.swap.registry import rule_for

#: What the styles of Hugging Face's plans are here.
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
    "replicate": "replicate",
}
#: Names that a line of the log has.
_SHOWN = 8


def is_hugging_face(module: nn.Module) -> bool:
    """Tell whether a module is a whole model of Hugging Face."""
    return type(module).__module__.startswith("transformers.") and hasattr(module, "can_generate")


def own_plan(model: Any) -> dict[str, str]:
    """Return the plan of a Hugging Face model in kinds of ours, by patterns over its names.

    Returns:
        Nothing for models that bring no plan, for plans with a style that has no kind here or is meant for another kind
        of layer or for a parameter, and where peft has wrapped layers: a part of a plan would give wrong results.
    """
    styles: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if any(is_of_peft(module) for module in model.modules()) or not styles or not set(styles.values()) <= _KINDS.keys():
        return {}
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head and head is not None]
    plan = {pattern: _KINDS[style] for pattern, style in styles.items()}
    # An output head may have any number of rows, and share them with the embedding.
    plan |= {name: "vocab" for name in heads if any(fnmatchcase(name, pattern) for pattern in plan)}
    return plan if _fits(model, plan) else {}


def _fits(model: nn.Module, plan: Mapping[str, str]) -> bool:
    kinds = {name: kind for pattern, kind in plan.items() for name in _matching(model.named_modules(), pattern)}
    modules = dict(model.named_modules())
    return not any(any(_matching(model.named_parameters(), pattern)) for pattern in plan) and all(
        kind in ("replicate", "partial") or rule_for(kind, modules[name]) is not None for name, kind in kinds.items()
    )


def _matching(named: Iterator[tuple[str, object]], pattern: str) -> Iterator[str]:
    return (name for name, _ in named if fnmatchcase(name, pattern))


def planned_kinds(place: Place, plan: Mapping[str, str], places: Sequence[Place], tp: int) -> dict[str, str]:
    """Return the kinds of the blocks inside a model by name.

    Raises:
        ParallelPlanError: If its heads do not divide over tp.
    """
    config = place.module.config
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % tp:
            raise ParallelPlanError(
                f"{field} ({heads}) of {place.name!r} must be a multiple of tp ({tp}), because each rank holds whole "
                f"heads. Use tp of {one_of(divisors(heads))}."
            )
    inside = [one for one in places if one.name.startswith(f"{place.name}.") and one.closed_by is None]
    return {
        one.name: kind
        for one in inside
        for pattern, kind in plan.items()
        if fnmatchcase(one.name.removeprefix(f"{place.name}."), pattern)
    }


def whole_parts(model: nn.Module) -> str:
    """Name the modules whose parameters every tensor-parallel rank holds, the largest first, layers as ``*``."""
    sizes: dict[str, int] = {}
    for name, size in _whole(model):
        sizes[name] = sizes.get(name, 0) + size
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"Whole on every rank: {', '.join(ordered[:_SHOWN])}{more}." if ordered else ""


def _whole(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in model.named_modules():
        parameters = [p for p in module.parameters(recurse=False) if shard_spec_of(p).is_whole]
        if parameters:
            yield re.sub(r"\d+", "*", name), sum(p.numel() for p in parameters)
