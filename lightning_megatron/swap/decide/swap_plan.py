"""All decisions about a module, which are made before any module is built or changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.own_lists import DividedExperts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap.blocks.builders import BlockRequest
from lightning_megatron.swap.blocks.cut_modules import gather_feature_inputs, gather_sequence_inputs
from lightning_megatron.swap.blocks.rules import BlockRule, build_target, fill_target, rules_of
from lightning_megatron.swap.blocks.whole_model import (
    NOTE,
    build_model,
    fill_model,
    is_cut,
    is_foreign,
)
from lightning_megatron.swap.decide.expert_lists import user_of_experts, why_not_experts
from lightning_megatron.swap.decide.hugging_face_models import (
    OwnCodeModel,
    choose_models,
    find_stages,
    whole_models,
)
from lightning_megatron.swap.decide.kinds import (
    EXPERTS,
    FULL_VIEWS,
    SWAPPED_AS,
    ModuleSite,
    choose_kinds,
    kinds_of_averages,
    sites_of,
    split_kind,
    unique_sites,
)
from lightning_megatron.swap.decide.stages import Stages
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.pretrained.replace import build_swapped_model

#: Kind of a module that is replaced as a whole model.
WHOLE_MODEL = "model"

#: Number of the first block. Smaller numbers belong to models, which number their layers
#: themselves.
_FIRST_LAYER = 1_000_000

#: Kinds of blocks whose inputs or outputs may be parts of sequences.
_SEQUENCE_KINDS = ("column", "column_gather", *FULL_VIEWS, "row", "row_split", "sequence")
#: Kinds of blocks that take parts of features, or gather them themselves.
_TAKE_PARTS = (*FULL_VIEWS, "row", "row_split", "dropout")

_RuledSite = tuple[ModuleSite, str, BlockRule]


@dataclass(frozen=True)
class Swap:
    """Replacement of one module, built without values and not yet installed.

    Args:
        kind: Kind of the block in the plan, or ``model``.
        fill: Function that fills the replacement with this rank's part of the module's values, and
            returns a text for the log.
        install: Function that puts the replacement into the module, which stays the same object;
            None if the replacement takes the module's place in its parent.
        shared: Names of the target's parameters that may share a weight with another replacement.
            They get the values of the module's parameters of the same names.
    """

    site: ModuleSite
    kind: str
    target: nn.Module
    fill: Callable[[], str]
    install: Callable[[], None] | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replacement:
    """Decision to replace one module.

    Args:
        build: Function that builds the replacement without values; it does not change the module.
    """

    site: ModuleSite
    build: Callable[[], Swap]


def build_block(
    site: ModuleSite,
    kind: str,
    rule: BlockRule,
    request: BlockRequest,
    gather: Callable[[nn.Module], None] | None,
) -> Swap:
    """Build the tensor-parallel block that replaces one of torch.nn.

    Args:
        gather: Function that makes the block gather its inputs, of which other blocks of the plan
            may return parts; None if it takes these, or there are none.
    """
    target = build_target(rule, request)
    if gather is not None:
        gather(target)

    def fill() -> str:
        fill_target(rule, request, target)
        return ""

    return Swap(site, kind, target, fill, shared=rule.sharded)


def build_whole_model(site: ModuleSite, mesh: ParallelMesh) -> Swap:
    """Build this rank's part of a GPT or an Encoder that was built in full."""
    target = build_model(site.name, site.module, mesh)

    def fill() -> str:
        fill_model(target, site.module, mesh.device)
        return NOTE if is_cut(mesh) else ""

    return Swap(site, WHOLE_MODEL, target, fill)


def build_family_model(
    site: ModuleSite, family: Family, mesh: ParallelMesh, shows_progress: bool
) -> Swap:
    """Build the layers that compute a Hugging Face model of a known family."""
    model = build_swapped_model(site.name, site.module, family, mesh, shows_progress)
    return Swap(site, WHOLE_MODEL, model.layers, model.fill, model.install)


def build_experts(site: ModuleSite, root: nn.Module, mesh: ParallelMesh) -> Swap:
    """Prepare to divide experts, which stay where they are, over ep."""
    experts: Any = site.module
    user = user_of_experts(root, site.name)
    problem = why_not_experts(root, site.name, mesh)
    if problem is not None:
        raise ParallelPlanError(
            f"ep ({mesh.ep.size}) cannot divide {site.name!r}: {problem}, or leave the kind "
            "'experts' out of tensor_parallel_plan. Each rank stores an equal share of the experts."
        )
    assert user is not None, "a list without one cannot be divided"

    def install() -> None:
        DividedExperts(site.name, experts, mesh).divide(user)
        setattr(experts, SWAPPED_AS, EXPERTS)

    return Swap(site, EXPERTS, experts, lambda: "", install)


def choose_blocks(
    sites: Sequence[ModuleSite],
    kinds: Mapping[str, str],
    stage_modules: Set[str],
    mesh: ParallelMesh,
    *,
    has_stages: bool,
    deferred: Sequence[str],
    whole: Sequence[str],
) -> list[Replacement]:
    """Decide which torch.nn blocks of this rank's stage are replaced.

    Args:
        deferred: Names of models without values, which are read before blocks are filled.
    """
    chosen = _choose(sites, kinds, mesh)
    if not has_stages:
        _check_layout([site for site, _, _ in chosen if not site.is_inside(whole)], mesh)
    cuts_sequence = any(kind == "sequence" for _, kind, _ in chosen)
    has_full_views = any(split_kind(kind)[0] in FULL_VIEWS for _, kind, _ in chosen)
    # Blocks of all stages are numbered, so that the number of a block does not depend on its stage.
    replacements = []
    for number, (site, kind, rule) in enumerate(chosen):
        if site.name not in stage_modules:
            continue
        name, sizes = split_kind(kind)
        request = BlockRequest(
            site.name,
            site.module,
            # Inputs and outputs of a plain module are complete sequences, and the batch may be
            # the first or the second dimension.
            replace(mesh, sequence_parallel=False),
            _FIRST_LAYER + number,
            cuts_sequence and name in _SEQUENCE_KINDS,
            site.parent,
            sizes,
            _device_of_values(site, deferred),
        )
        gather = None
        if cuts_sequence and name not in _SEQUENCE_KINDS:
            gather = gather_sequence_inputs
        elif has_full_views and name not in _TAKE_PARTS:
            gather = gather_feature_inputs
        build = partial(build_block, site, kind, rule, request, gather)
        replacements.append(Replacement(site, build))
    return replacements


def _is_divided(site: ModuleSite, kinds: Mapping[str, str], mesh: ParallelMesh) -> bool:
    """Return whether ep divides a list, and no earlier fit has done so."""
    is_new = not hasattr(site.module, SWAPPED_AS)
    return mesh.ep.size > 1 and kinds.get(site.name) == EXPERTS and is_new


def _device_of_values(site: ModuleSite, deferred: Sequence[str]) -> torch.device:
    device = next((p.device for p in site.module.parameters()), torch.device("cpu"))
    has_no_values = device.type == "meta" and site.is_inside(deferred)
    return torch.device("cpu") if has_no_values else device


def _choose(
    sites: Sequence[ModuleSite], kinds: Mapping[str, str], mesh: ParallelMesh
) -> list[_RuledSite]:
    chosen: list[_RuledSite] = []
    encoders: list[tuple[ModuleSite, nn.TransformerEncoder]] = []
    whole = ""
    for site in sites:
        kind = kinds.get(site.name, "replicate")
        rule = site.rules.get(split_kind(kind)[0])
        if kind == "sequence" and not mesh.sequence_parallel:
            continue
        if whole and site.name.startswith(whole):
            continue
        if isinstance(site.module, nn.TransformerDecoderLayer) and rule is not None:
            if not all(
                kind == "auto" for name, kind in kinds.items() if name.startswith(f"{site.name}.")
            ):
                # The plan shards the parts of this layer one by one.
                continue
            whole = f"{site.name}."
        if isinstance(site.module, nn.TransformerEncoder):
            encoders.append((site, site.module))
        elif rule is not None:
            chosen.append((site, kind, rule))
    if mesh.tp.size == 1:
        return []
    layers = {id(site.module) for site, _, _ in chosen}
    for site, encoder in encoders:
        # An encoder with a swapped layer is always replaced, because torch's encoder may pack
        # padded batches into nested tensors, which sharded layers do not support.
        if not any(id(layer) in layers for layer in encoder.layers):
            continue
        if "auto" not in site.rules:
            raise UnsupportedError(
                f"the layers of {site.name!r} cannot be cut over tp, because "
                f"{type(encoder).__name__} may read their weights directly, as "
                "torch.nn.TransformerEncoder does. Use torch.nn.TransformerEncoder, or give "
                f"{site.name!r} the kind 'replicate'."
            )
        chosen.append((site, "auto", site.rules["auto"]))
    return chosen


def _check_layout(sites: Sequence[ModuleSite], mesh: ParallelMesh) -> None:
    if sites and mesh.pp.size > 1 and mesh.tp.size > 1:
        raise UnsupportedError(
            f"pp ({mesh.pp.size}) above 1 needs a pipeline_plan, because {sites[0].name!r} is a "
            "block of a model without known pipeline stages. Use pp=1, or name the list of "
            "blocks in pipeline_plan."
        )


@dataclass(frozen=True)
class SwapPlan:
    """Decisions for a module, which is unchanged.

    Args:
        replacements: Modules of this rank that are replaced, in the order of definition.
        own_code: Hugging Face models that keep their own code, nested ones included.
        partial: Names of modules on this rank whose gradients are parts of sums.
        built_here: Names of models that were built on ``mesh``, whose ranks have different layers.
    """

    root: nn.Module
    mesh: ParallelMesh
    sites: tuple[ModuleSite, ...]
    replacements: tuple[Replacement, ...]
    own_code: tuple[OwnCodeModel, ...]
    stages: Stages | None
    stage_modules: frozenset[str]
    partial: tuple[str, ...]
    built_here: tuple[str, ...]


def decide(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: Mapping[str, str] | None,
    pipeline_plan: Mapping[str, str] | None,
    shows_progress: bool,
    needs_tables: bool,
) -> SwapPlan:
    """Decide how to replace and divide a module on this rank; do not change it."""
    _check_root(module, mesh)
    sites = sites_of(module)
    swappable = unique_sites(sites)
    kinds = choose_kinds(sites, plan)
    kinds |= kinds_of_averages(sites, kinds)
    whole = whole_models(sites, pipeline_plan, mesh.layout)
    models = choose_models(
        swappable,
        kinds,
        whole,
        needs_tables=needs_tables or mesh.ep.size > 1 or mesh.cp.size > 1,
        tp=mesh.tp.size if plan is None and mesh.tp.size > 1 else None,
    )
    kinds |= models.kinds
    stages = find_stages(module, sites, kinds, pipeline_plan, mesh, models.replaced_names, whole)
    stage_modules = frozenset(
        site.name for site in sites if stages is None or stages.is_on_stage(site.name)
    )
    replacements = choose_blocks(
        swappable,
        kinds,
        stage_modules,
        mesh,
        has_stages=stages is not None,
        deferred=[model.site.name for model in models.own_code],
        whole=whole,
    )
    for site, family in models.replaced:
        build = partial(build_family_model, site, family, mesh, shows_progress)
        replacements.append(Replacement(site, build))
    for site in swappable:
        if is_foreign(site.module, mesh):
            replacements.append(Replacement(site, partial(build_whole_model, site, mesh)))
        elif _is_divided(site, kinds, mesh) and site.name in stage_modules:
            replacements.append(Replacement(site, partial(build_experts, site, module, mesh)))
    order = {site.name: number for number, site in enumerate(sites)}
    partial_sums = [
        name for name in order if name in stage_modules and kinds.get(name) == "partial"
    ]
    built_here = [site.name for site in swappable if getattr(site.module, "mesh", None) is mesh]
    return SwapPlan(
        module,
        mesh,
        tuple(sites),
        tuple(sorted(replacements, key=lambda one: order[one.site.name])),
        models.own_code,
        stages,
        stage_modules,
        tuple(partial_sums) if mesh.tp.size > 1 else (),
        tuple(built_here),
    )


def _check_root(module: nn.Module, mesh: ParallelMesh) -> None:
    if "auto" in rules_of(module) or is_foreign(module, mesh):
        raise UnsupportedError(
            f"the root ({type(module).__name__}) cannot be swapped in place, because nothing holds "
            "it. Make it a child of another module, such as an attribute of a LightningModule."
        )
    for name, parameter in module.named_parameters() if mesh.world.size > 1 else ():
        if is_lazy(parameter):
            raise UnsupportedError(
                f"the lazy parameter {name!r} must have a shape before its value is sent to other "
                "ranks. Run one batch through the module in configure_model, or give the layer its "
                "sizes."
            )
