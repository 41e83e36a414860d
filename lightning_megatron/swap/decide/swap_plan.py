"""All decisions about a module, which are made before any module is built or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap.blocks.rules import rules_of
from lightning_megatron.swap.blocks.whole_model import is_foreign
from lightning_megatron.swap.decide.hugging_face_models import (
    OwnCodeModel,
    choose_models,
    find_stages,
    whole_models,
)
from lightning_megatron.swap.decide.kinds import (
    ModuleSite,
    choose_kinds,
    kinds_of_averages,
    sites_of,
    unique_sites,
)
from lightning_megatron.swap.decide.replacements import (
    Replacement,
    build_family_model,
    build_whole_model,
    choose_blocks,
)
from lightning_megatron.swap.decide.stages import Stages


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
    *,
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
    replacements = [
        Replacement(site, partial(build_whole_model, site, mesh))
        for site in swappable
        if is_foreign(site.module, mesh)
    ]
    replacements += [
        Replacement(site, partial(build_family_model, site, family, mesh, shows_progress))
        for site, family in models.replaced
    ]
    replacements += choose_blocks(
        swappable,
        kinds,
        stage_modules,
        mesh,
        has_stages=stages is not None,
        deferred=[model.site.name for model in models.own_code],
        whole=whole,
    )
    partial_sums = [
        name for name, kind in kinds.items() if kind == "partial" and name in stage_modules
    ]
    order = {site.name: number for number, site in enumerate(sites)}
    return SwapPlan(
        module,
        mesh,
        tuple(sites),
        tuple(sorted(replacements, key=lambda one: order[one.site.name])),
        models.own_code,
        stages,
        stage_modules,
        tuple(partial_sums) if mesh.tp.size > 1 else (),
        tuple(site.name for site in swappable if _is_built_here(site.module, mesh)),
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


def _is_built_here(module: nn.Module, mesh: ParallelMesh) -> bool:
    return getattr(module, "mesh", None) is mesh and not is_foreign(module, mesh)
