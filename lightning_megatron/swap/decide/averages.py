"""Averaged copies of modules, which are cut and placed like the modules that they average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.swap.decide.kinds import ModuleSite
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face


def originals_of_averages(sites: Sequence[ModuleSite]) -> dict[str, list[str]]:
    """Return the modules that each :class:`~torch.optim.swa_utils.AveragedModel` may have copied.

    They have the class and the values of its copy. Several modules have them if they were
    initialised alike, as norms are.

    Args:
        sites: All modules, with their positions.

    Returns:
        Names of the originals by the name of the copy, without copies that have no original.
    """
    originals = {
        f"{site.name}.module": [
            other.name
            for other in sites
            if not f"{other.name}.".startswith(f"{site.name}.")
            and _is_copy(site.module.module, other.module)
        ]
        for site in sites
        if isinstance(site.module, AveragedModel)
    }
    return {name: found for name, found in originals.items() if found}


def kinds_of_averages(sites: Sequence[ModuleSite], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of copies that the plan does not name: those of their originals.

    Args:
        sites: All modules, with their positions.
        kinds: Kinds by module name.
    """
    return {
        site.name: kinds[original + site.name.removeprefix(copy)]
        for copy, (original, *_) in originals_of_averages(sites).items()
        for site in sites
        if f"{site.name}.".startswith(f"{copy}.")
        and site.name not in kinds
        and original + site.name.removeprefix(copy) in kinds
    }


def _is_copy(copy: nn.Module, module: nn.Module) -> bool:
    if type(copy) is not type(module) or isinstance(copy, PipelinedModule) or is_hugging_face(copy):
        return False
    tensors = list(copy.parameters())
    others = list(module.parameters())
    return len(tensors) == len(others) and all(
        tensor.shape == other.shape and torch.equal(tensor.cpu(), other.cpu())
        for tensor, other in zip(tensors, others, strict=True)
    )
