"""Configurations of the models in a module, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.models.layered import LayeredConfig, LayeredModule
from lightning_megatron.swap.decide.hugging_face_models import choose_models
from lightning_megatron.swap.decide.kinds import choose_kinds, sites_of, unique_sites


def known_configs(root: nn.Module, plan: Mapping[str, str] | None) -> tuple[LayeredConfig, ...]:
    """Return the configurations of the models of this package that a module has or will have.

    Args:
        root: Root module; it may have been swapped in an earlier run.
        plan: The user's tensor_parallel_plan.

    Raises:
        ParallelPlanError: If the plan does not fit the module.
    """
    sites = sites_of(root)
    models = choose_models(
        unique_sites(sites), choose_kinds(sites, plan), needs_tables=False, tp=None
    )
    replaced = [
        family.config(site.module.config.to_dict())  # type: ignore[union-attr, operator]
        for site, family in models.replaced
    ]
    configs = [site.module.config for site in sites if isinstance(site.module, LayeredModule)]
    return (*configs, *replaced)
