"""Check of modules under context parallelism, before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.context_parallel.position_wise import foreign_parts, mixing_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.decide.hugging_face_models import ModelChoice, choose_models
from lightning_megatron.swap.decide.kinds import (
    ModuleSite,
    choose_kinds,
    sites_of,
    unique_sites,
)
from lightning_megatron.swap.families import find_family

#: Largest number of modules that an error names.
_NUM_SHOWN = 4


def check_cut(
    root: nn.Module, cp: int, plan: Mapping[str, str] | None
) -> tuple[GPTConfig | EncoderConfig, ...]:
    """Refuse a module that context parallelism does not support.

    The module must contain a model that can be cut along the sequence: a GPT, an Encoder, or a
    Hugging Face model that becomes one. The model cuts its input sequences and joins its results.
    Modules around the model therefore see complete sequences and may mix positions; every rank of
    cp computes them in full. All modules inside the model must belong to this package, or compute
    each position separately.

    Args:
        root: Root module; it may have been swapped in an earlier run.
        plan: The user's tensor_parallel_plan.

    Returns:
        Configurations of the models that are cut.
    """
    sites = sites_of(root)
    swappable = unique_sites(sites)
    models = choose_models(swappable, choose_kinds(sites, plan), needs_tables=False, tp=None)
    configs: list[GPTConfig | EncoderConfig] = [
        family.config(site.module.config.to_dict())  # type: ignore[union-attr, operator]
        for site, family in models.replaced
    ]
    for site in sites:
        if isinstance(site.module, GPT | Encoder):
            configs.append(site.module.config)
            _check_parts(site.name, site.module, cp)
    if not configs:
        raise UnsupportedError(
            f"cp ({cp}) above 1 needs a model that can be cut along the sequence, a "
            "lightning_megatron.GPT or Encoder, or a Hugging Face model of a supported family: "
            f"{type(root).__name__} has none. Its modules see whole sequences"
            f"{_listed(_reasons(root, sites, models))}. Use cp=1, with tp, pp or more data ranks "
            "instead."
        )
    return tuple(configs)


def _check_parts(path: str, model: GPT | Encoder, cp: int) -> None:
    for name, part, what in foreign_parts(model):
        raise UnsupportedError(
            f"with cp ({cp}) the modules inside {path!r} get parts of sequences, so they must "
            f"compute every position independently: '{path}.{name}' ({type(part).__name__}) "
            f"{what}. Declare it with lightning_megatron.position_wise if its output at a position "
            "depends only on its input at that position. Otherwise use cp=1, or call it outside of "
            "the model, where sequences are whole."
        )


def _reasons(root: nn.Module, sites: Sequence[ModuleSite], models: ModelChoice) -> Iterator[str]:
    """Describe modules that are not cut along the sequence."""
    inside: list[str] = []
    for model in models.own_code:
        if model.is_outermost:
            kind = type(model.site.module).__name__
            inside.append(model.site.name)
            yield f"{model.site.name!r} ({kind}) {_own_code_reason(kind, model.reason)}"
    for site in [ModuleSite("", root, "", root), *sites]:
        what = mixing_of(site.module)
        if what and site.name not in inside and not site.is_inside(inside):
            inside += [site.name] if site.name else []
            where = repr(site.name) if site.name else "the module itself"
            yield f"{where} ({type(site.module).__name__}) {what}"


def _own_code_reason(kind: str, reason: str) -> str:
    if reason:
        return f"has a setting that its family does not support: {reason.rstrip('.')}"
    if find_family(kind) is not None:
        return "keeps its own code by tensor_parallel_plan"
    return "is not a language model of a supported family"


def _listed(reasons: Iterator[str]) -> str:
    items = list(reasons)
    more = f"; and {len(items) - _NUM_SHOWN} more" if len(items) > _NUM_SHOWN else ""
    return f": {'; '.join(items[:_NUM_SHOWN])}{more}" if items else ""
