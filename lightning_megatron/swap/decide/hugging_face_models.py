"""Decisions for Hugging Face models: whether they are replaced, and how others are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.context_parallel.position_wise import foreign_parts, mixing_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import ModelConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap.decide.kinds import ModuleSite, choose_kinds, sites_of, unique_sites
from lightning_megatron.swap.decide.model_plan import DeclaredPlan, supported_plan
from lightning_megatron.swap.decide.stages import Stages, plan_stages
from lightning_megatron.swap.families import Family, find_family
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face, is_pretrained

#: Arguments that request outputs of all blocks; a pipeline stage has only those of its blocks.
_ALL_BLOCKS_ARGUMENTS = ("output_hidden_states", "output_attentions", "output_router_logits")

#: Modules that run before the blocks, but are defined after them and missing in Hugging Face's
#: plans: Gemma's vectors of tokens for each layer.
_BEFORE_BLOCKS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)

#: Attributes of attentions that read the keys and values of an earlier layer, or keep theirs.
_READS_KEYS = "is_kv_shared_layer"
_KEEPS_KEYS = "store_full_length_kv"

#: Largest number of modules that an error names.
_NUM_SHOWN = 4

#: Reason for which a model is not replaced.
_WHOLE = "it is frozen, and stands beside the model that is cut into stages."


@dataclass(frozen=True)
class OwnCodeModel:
    """Hugging Face model that is not replaced and keeps its own code.

    Args:
        reason: Setting that the model's family does not support; empty if the model has no family
            or the plan excludes it.
        plan: Tensor-parallel plan that the model defines; None if no plan is needed.
        is_outermost: Whether no other model that keeps its own code contains this one.
    """

    site: ModuleSite
    reason: str = ""
    plan: DeclaredPlan | None = None
    is_outermost: bool = True


@dataclass(frozen=True)
class ModelChoice:
    """Hugging Face models of a module.

    Args:
        own_code: Models that keep their own code, nested ones included.
    """

    replaced: tuple[tuple[ModuleSite, Family], ...]
    own_code: tuple[OwnCodeModel, ...]

    @property
    def replaced_names(self) -> list[str]:
        """Return the names of the models that are replaced."""
        return [site.name for site, _ in self.replaced]

    @property
    def kinds(self) -> dict[str, str]:
        """Return the kinds that plans of the models themselves give to modules, by name."""
        return {
            f"{model.site.name}.{name}": kind
            for model in self.own_code
            if model.plan is not None
            for name, kind in model.plan.kinds.items()
        }


def whole_models(
    sites: Sequence[ModuleSite], plan: Mapping[str, str] | None, layout: ParallelLayout
) -> list[str]:
    """Return the names of the frozen Hugging Face models beside a model that is cut into stages.

    Every stage has all blocks of such a model, for example of the teacher in a distillation, so
    that its calls need no other stage. With a pipeline_plan it is on the first or last stage. The
    copy in an ``AveragedModel`` gets weights of the model that is cut, so it does not count.

    Args:
        plan: The user's pipeline_plan; a model that it names is not among the results.
        layout: Layout, without context parallelism if there are such models.
    """
    if layout.pp == 1 or layout.cp > 1:
        return []
    named = [site for site in sites for key in plan or () if fnmatchcase(site.name, key)]
    averages = [site.name for site in sites if isinstance(site.module, AveragedModel)]
    models = _outermost(sites)
    frozen = []
    for model in models:
        is_trained = any(parameter.requires_grad for parameter in model.module.parameters())
        is_named = any(site.name == model.name or site.is_inside([model.name]) for site in named)
        if not (model.is_inside(averages) or is_trained or is_named):
            frozen.append(model.name)
    has_stages = any(
        isinstance(site.module, PipelinedModule) or computed_by(site.module) is not None
        for site in sites
    )
    return frozen if has_stages or named or len(frozen) < len(models) else []


def _outermost(sites: Sequence[ModuleSite]) -> list[ModuleSite]:
    models = [site for site in sites if is_hugging_face(site.module)]
    names = [model.name for model in models]
    return [model for model in models if not model.is_inside(names)]


def choose_models(
    sites: Sequence[ModuleSite],
    kinds: Mapping[str, str],
    whole: Sequence[str] = (),
    *,
    needs_tables: bool,
    tp: int | None,
) -> ModelChoice:
    """Decide which Hugging Face models are replaced.

    A model of a known family is replaced, unless the plan excludes or cuts it, it stays whole on
    every stage, or it has a setting that the family does not support. All other models keep their
    own code.

    Args:
        kinds: Kinds of the user's plan, by module name.
        needs_tables: Whether every model of a known family must be replaced. An unsupported setting
            then raises an error when the replacement is built.
        tp: Tensor-parallel size for the plans of models that keep their own code; None means that
            no plans are needed.
    """
    known = [
        (site, family) for site, family in _known_models(sites, kinds) if site.name not in whole
    ]
    # Hugging Face's own module supports every setting.
    reasons = {
        site.name: "" if needs_tables else family.unsupported_reason(_settings(site.module))
        for site, family in known
    }
    replaced = [(site, family) for site, family in known if not reasons[site.name]]
    reasons |= dict.fromkeys(whole, _WHOLE)
    remaining = _own_code_models(sites, [site.name for site, _ in replaced], reasons, tp)
    return ModelChoice(tuple(replaced), tuple(remaining))


def _settings(model: Any) -> dict[str, Any]:
    settings: dict[str, Any] = model.config.to_dict()
    return settings


def _known_models(
    sites: Sequence[ModuleSite], kinds: Mapping[str, str]
) -> Iterator[tuple[ModuleSite, Family]]:
    """List the outermost models with a family that the plan neither excludes nor cuts."""
    visited: list[str] = []
    taken: list[str] = []
    for site in sites:
        if not is_hugging_face(site.module) or site.is_inside(taken):
            continue
        family = find_family(type(site.module).__name__)
        is_nested = site.is_inside(visited)
        visited.append(site.name)
        inside = {kind for name, kind in kinds.items() if f"{name}.".startswith(f"{site.name}.")}
        is_free = inside <= {"auto"} and not (is_nested and _is_read_from_outside(site.module))
        if family is not None and is_free:
            taken.append(site.name)
            yield site, family


def _is_read_from_outside(model: Any) -> bool:
    """Return whether a model inside a larger one has values, but not the head of its class.

    The larger model reads the tensors of such a model and may share them.
    """
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    return model.base_model is model and has_values


def _own_code_models(
    sites: Sequence[ModuleSite], replaced: Sequence[str], reasons: Mapping[str, str], tp: int | None
) -> Iterator[OwnCodeModel]:
    outermost: list[str] = []
    planned: list[str] = []
    for site in sites:
        if site.name in replaced or site.is_inside(replaced) or not is_pretrained(site.module):
            continue
        is_outermost = not site.is_inside(outermost)
        if is_outermost:
            outermost.append(site.name)
        plan = None
        if tp is not None and is_hugging_face(site.module) and not site.is_inside(planned):
            planned.append(site.name)
            plan = supported_plan(site.module, tp, site.name)
        yield OwnCodeModel(site, reasons.get(site.name, ""), plan, is_outermost)


def find_stages(
    root: nn.Module,
    sites: Sequence[ModuleSite],
    kinds: Mapping[str, str],
    plan: Mapping[str, str] | None,
    mesh: ParallelMesh,
    replaced: Sequence[str],
    whole: Sequence[str] = (),
) -> Stages | None:
    """Return the stages of a model that keeps its own code; None for a single stage.

    Args:
        replaced: Names of the models that are replaced, which have stages of their own.
    """
    models = [site for site in _outermost(sites) if site.name not in whole]
    if plan is None:
        has_stages = any(isinstance(site.module, PipelinedModule) for site in sites)
        if mesh.pp.size == 1 or has_stages or replaced:
            return None
        plans = {site.name: _declared_stages(site.module) for site in models}
        known = [name for name, declared in plans.items() if declared]
        if len(known) != 1:
            return None
        plan = {f"{known[0]}.{name}": kind for name, kind in plans[known[0]].items()}
        stages = plan_stages(root, sites, plan, kinds, mesh, whole)
    else:
        # A plan of the user assigns all modules outside of the blocks to stages.
        stages = plan_stages(root, sites, plan, kinds, mesh)
    if stages is None:
        return None
    _check_shared_keys(stages, mesh.layout)
    for name in replaced:
        if stages.blocks.is_inside([name]):
            raise ParallelPlanError(
                f"pipeline_plan is for models that keep their own code: {stages.blocks.name!r} is "
                f"in {name!r}, which is replaced by a model of this package with its own stages. "
                "Leave pipeline_plan out, or keep the model's own code by a tensor_parallel_plan "
                "such as {'*': 'replicate'}."
            )
    for site in models:
        if stages.blocks.is_inside([site.name]):
            return replace(stages, prepare=_prepare_for_stages(site.module))
    return stages


def _declared_stages(model: Any) -> dict[str, str]:
    """Return the stages that a Hugging Face model defines, as kinds by name; empty without any."""
    names = list(getattr(model, "pp_plan", None) or {})
    modules = dict(model.named_modules())
    lists = [name for name in names if isinstance(modules.get(name), nn.ModuleList)]
    if len(lists) != 1:
        return {}
    # The plan lists the modules of the base model in the order in which they run. Modules around
    # the base model, such as a head, run after it.
    base = lists[0].rpartition(".")[0]
    inner = [name for name in names if name.rpartition(".")[0] == base and name in modules]
    stages = ["first" if inner.index(name) < inner.index(lists[0]) else "last" for name in inner]
    left_out = [f"{base}.{key}" for key in _BEFORE_BLOCKS if f"{base}.{key}" in modules]
    return (
        dict(zip(inner, stages, strict=True))
        | dict.fromkeys(left_out, "first")
        | {lists[0]: "blocks"}
    )


def _check_shared_keys(stages: Stages, layout: ParallelLayout) -> None:
    """Refuse stages that divide layers which read the keys and values of an earlier layer."""
    blocks: Any = stages.blocks.module
    attentions = [getattr(block, "self_attn", None) for block in blocks]
    readers = [n for n, part in enumerate(attentions) if getattr(part, _READS_KEYS, False)]
    owners = [n for n, part in enumerate(attentions) if getattr(part, _KEEPS_KEYS, False)]
    first = min(owners, default=0)
    if not readers or not any(first < part.start for part in stages.partition.ranges if part):
        return
    num_before = layout.pp * layout.vpp - 1
    remedy = "pp=1"
    if first >= num_before:
        counts = [first // num_before + (n < first % num_before) for n in range(num_before)]
        remedy = (
            f"stage_layers={[*counts, len(blocks) - first]}, which keeps them together, or pp=1"
        )
    raise UnsupportedError(
        f"layers {readers[0]} to {readers[-1]} of {stages.blocks.name!r} cannot be on other "
        f"pipeline stages than layers {first} to {readers[0] - 1}, because they read the keys and "
        "values of these layers (num_kv_shared_layers), which stages do not send to each other: "
        f"stage_layers is {stages.partition}. Use {remedy}."
    )


def _prepare_for_stages(model: Any) -> Callable[[], None]:
    """Refuse a configuration that requests outputs of all blocks; do not change the model.

    Returns:
        Function that turns off the model's cache, and makes its calls refuse such requests.
    """
    for name in _ALL_BLOCKS_ARGUMENTS:
        if getattr(model.config, name, False):
            _refuse_on_stage(name, f"the configuration of {type(model).__name__}")
    takes_cache = "use_cache" in signature(type(model).forward).parameters

    def prepare() -> None:
        model.register_forward_pre_hook(
            _without_cache if takes_cache else _checked, with_kwargs=True
        )

    return prepare


def _checked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in (*_ALL_BLOCKS_ARGUMENTS, "use_cache", "past_key_values", "cache"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            _refuse_on_stage(name, "the call")


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    _checked(module, args, kwargs)
    positions = kwargs.get("position_ids")
    inputs = [*args, *map(kwargs.get, ("input_ids", "inputs_embeds", "attention_mask"))]
    inputs = [value for value in inputs if value is not None]
    settings: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    fills_cache = kwargs.get("use_cache") is None and getattr(settings, "use_cache", False)
    if fills_cache and positions is not None and len(inputs) == 1:
        # Without a cache and a mask, these models separate sequences by their positions.
        mask = torch.ones(inputs[0].shape[:2], dtype=torch.long, device=positions.device)
        kwargs = {**kwargs, "attention_mask": mask}
    return args, {**kwargs, "use_cache": False}


def _refuse_on_stage(name: str, where: str) -> NoReturn:
    raise UnsupportedError(
        f"{name}, set by {where}, cannot be used with pp above 1, because each stage has only the "
        f"results of its own blocks. Leave {name} out, or use pp=1."
    )


def known_configs(root: nn.Module, plan: Mapping[str, str] | None) -> tuple[ModelConfig, ...]:
    """Return the configurations of the models of this package that a module has or will have.

    Args:
        root: Root module; it may have been swapped in an earlier run.
        plan: The user's tensor_parallel_plan.
    """
    sites = sites_of(root)
    configs = [site.module.config for site in sites if isinstance(site.module, LayeredModule)]
    return (*configs, *_configs_of(_models_of(sites, plan)))


def _models_of(sites: Sequence[ModuleSite], plan: Mapping[str, str] | None) -> ModelChoice:
    kinds = choose_kinds(sites, plan)
    return choose_models(unique_sites(sites), kinds, needs_tables=False, tp=None)


def _configs_of(models: ModelChoice) -> list[GPTConfig | EncoderConfig]:
    return [family.config(_settings(site.module)) for site, family in models.replaced]


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
    models = _models_of(sites, plan)
    configs = _configs_of(models)
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
