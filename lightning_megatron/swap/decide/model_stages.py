"""Pipeline stages that Hugging Face models without a family define themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.swap.decide.kinds import ModuleSite
from lightning_megatron.swap.decide.stages import Stages, check_pipeline_plan, plan_stages
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face

#: Arguments that request outputs of all blocks, which no stage has.
_OF_ALL_STAGES = ("output_hidden_states", "output_attentions", "output_router_logits")


def find_stages(
    root: nn.Module,
    sites: Sequence[ModuleSite],
    kinds: Mapping[str, str],
    plan: Mapping[str, str] | None,
    mesh: ParallelMesh,
    replaced: Sequence[str],
) -> Stages | None:
    """Return the stages of a model that keeps its own code; None for a single stage.

    Args:
        root: Root module.
        sites: All modules in it, with their positions.
        kinds: Kinds of the tensor-parallel cuts, by module name.
        plan: The user's pipeline_plan; None uses the stages that a Hugging Face model defines.
        mesh: Process groups of this rank.
        replaced: Names of the models that are replaced, which have stages of their own.

    Raises:
        ParallelPlanError: If the plan does not fit the module, or has too few blocks for the
            stages.
        UnsupportedError: If stages share a parameter that is not a tied embedding, or the
            configuration of a Hugging Face model requests outputs of all blocks.
    """
    if plan is not None:
        check_pipeline_plan(sites, plan)
    if mesh.pp.size == 1:
        return None
    models = [site for site in sites if is_hugging_face(site.module)]
    models = [
        one for one in models if not any(one.name.startswith(f"{other.name}.") for other in models)
    ]
    if plan is None:
        found = {one.name: own_stages(one.module) for one in models}
        known = [name for name, own in found.items() if own]
        if (
            replaced
            or len(known) != 1
            or any(isinstance(site.module, PipelinedModule) for site in sites)
        ):
            return None
        plan = {f"{known[0]}.{name}": kind for name, kind in found[known[0]].items()}
    stages = plan_stages(root, sites, plan, kinds, mesh)
    for name in replaced:
        if stages.blocks.name.startswith(f"{name}."):
            raise ParallelPlanError(
                f"pipeline_plan is for models that keep their own code: {stages.blocks.name!r} is "
                f"in {name!r}, which is replaced by a model of this package with its own stages. "
                "Leave pipeline_plan out, or keep the model's own code by a tensor_parallel_plan "
                "such as {'*': 'replicate'}."
            )
    around = [one.module for one in models if stages.blocks.is_inside([one.name])]
    if not around:
        return stages
    _check_configuration(around[0])
    return replace(stages, prepare=partial(_prepare_calls, around[0]))


def own_stages(model: Any) -> dict[str, str]:
    """Return a Hugging Face model's own stages as kinds by name; empty if it has none."""
    names = list(getattr(model, "pp_plan", None) or {})
    modules = dict(model.named_modules())
    lists = [name for name in names if isinstance(modules.get(name), nn.ModuleList)]
    if len(lists) != 1:
        return {}
    # The plan lists the modules of the base model in the order in which they run. Modules around
    # the base model, such as a head, run after it.
    base = lists[0].rpartition(".")[0]
    inner = [name for name in names if name.rpartition(".")[0] == base and name in modules]
    sides = ["first" if inner.index(name) < inner.index(lists[0]) else "last" for name in inner]
    return dict(zip(inner, sides, strict=True)) | {lists[0]: "blocks"}


def _prepare_calls(model: nn.Module) -> None:
    """Turn off caches of a Hugging Face model on a stage, and refuse outputs of all blocks."""
    takes_cache = "use_cache" in signature(type(model).forward).parameters
    model.register_forward_pre_hook(_without_cache if takes_cache else _checked, with_kwargs=True)


def _checked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in (*_OF_ALL_STAGES, "use_cache", "past_key_values"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            _refuse(name, "the call")


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    _checked(module, args, kwargs)
    return args, {**kwargs, "use_cache": False}


def _check_configuration(model: Any) -> None:
    for name in _OF_ALL_STAGES:
        if getattr(model.config, name, False):
            _refuse(name, f"the configuration of {type(model).__name__}")


def _refuse(name: str, where: str) -> None:
    raise UnsupportedError(
        f"{name}, set by {where}, cannot be used with pp above 1, because each stage has only the "
        f"results of its own blocks. Leave {name} out, or use pp=1."
    )
