"""Decisions for Hugging Face models: which are replaced, and which keep their own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_megatron.swap.decide.kinds import ModuleSite
from lightning_megatron.swap.decide.model_plan import OwnPlan, own_plan
from lightning_megatron.swap.families import Family, find_family
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face, is_pretrained


@dataclass(frozen=True)
class OwnCodeModel:
    """Hugging Face model that keeps its own code.

    Args:
        site: Model with its position.
        reason: Setting that the table of the model's family does not support; empty if the model
            has no family or the plan excludes it.
        plan: Tensor-parallel plan that the model defines; None if it is not asked for one.
        is_outermost: Whether no other such model contains it.
    """

    site: ModuleSite
    reason: str = ""
    plan: OwnPlan | None = None
    is_outermost: bool = True


@dataclass(frozen=True)
class ModelChoice:
    """Hugging Face models of a module.

    Args:
        replaced: Models that become a GPT or an Encoder, with their families.
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
        """Return the kinds that the models' own plans give to modules, by name."""
        return {
            f"{model.site.name}.{name}": kind
            for model in self.own_code
            if model.plan is not None
            for name, kind in model.plan.kinds.items()
        }


def choose_models(
    sites: Sequence[ModuleSite],
    kinds: Mapping[str, str],
    *,
    needs_tables: bool,
    tp: int | None,
) -> ModelChoice:
    """Decide which Hugging Face models are replaced.

    A model of a known family is replaced, unless the plan excludes or cuts it, or it has a setting
    that the family's table does not support. All others keep their own code.

    Args:
        sites: Modules that can be swapped, with their positions.
        kinds: Kinds of the user's plan, by module name.
        needs_tables: Whether a model of a known family must be replaced, whatever its settings. An
            unsupported setting then raises an error when the replacement is built.
        tp: Size of tensor parallelism for which models that keep their own code give their plans;
            None asks for no plans.

    Raises:
        ParallelPlanError: If an attention of a model with a plan cannot be sharded over ``tp``.
    """
    known = list(_known_models(sites, kinds))
    # Hugging Face's own module supports every setting.
    reasons = {
        site.name: "" if needs_tables else family.refusal_of(_settings(site.module))
        for site, family in known
    }
    replaced = [(site, family) for site, family in known if not reasons[site.name]]
    own = _own_code_models(sites, [site.name for site, _ in replaced], reasons, tp)
    return ModelChoice(tuple(replaced), tuple(own))


def _settings(model: Any) -> dict[str, Any]:
    settings: dict[str, Any] = model.config.to_dict()
    return settings


def _known_models(
    sites: Sequence[ModuleSite], kinds: Mapping[str, str]
) -> Iterator[tuple[ModuleSite, Family]]:
    """List the outermost models with a family that the plan neither excludes nor cuts."""
    seen: list[str] = []
    taken: list[str] = []
    for site in sites:
        if not is_hugging_face(site.module) or site.is_inside(taken):
            continue
        family = find_family(type(site.module).__name__)
        is_nested = site.is_inside(seen)
        seen.append(site.name)
        inside = {kind for name, kind in kinds.items() if f"{name}.".startswith(f"{site.name}.")}
        is_free = inside <= {"auto"} and not (is_nested and _is_read_from_outside(site.module))
        if family is not None and is_free:
            taken.append(site.name)
            yield site, family


def _is_read_from_outside(model: Any) -> bool:
    """Return whether a model inside a larger one has values but lacks its class's head.

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
            plan = own_plan(site.module, tp, site.name)
        yield OwnCodeModel(site, reasons.get(site.name, ""), plan, is_outermost)
