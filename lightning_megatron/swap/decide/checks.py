"""Checks that replacing a module loses neither hooks nor compiled code."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.swap.decide.kinds import ModuleSite
from lightning_megatron.swap.hugging_face.peft_layers import is_input_hook

#: Attribute in which torch.compile stores the wrapped module.
_COMPILED = "_orig_mod"


def check_nothing_is_lost(site: ModuleSite, target: nn.Module, *, stays: bool = False) -> None:
    """Refuse to replace a module that has hooks or was compiled.

    Args:
        site: Module that is replaced, with its position.
        target: Replacement; modules of the original that it contains are kept.
        stays: Whether the module stays the same object and only its computation is replaced.

    Raises:
        UnsupportedError: If a removed module or parameter has hooks, or a removed module was
            compiled or lies inside a compiled one.
    """
    if _COMPILED in site.name.split("."):
        around = site.name.split(f".{_COMPILED}")[0]
        raise UnsupportedError(
            f"{around!r} was compiled, but its module {site.name!r} must be replaced, and the "
            "compiled code would still run the old module. " + _remedy(target)
        )
    kept = set(target.modules())
    staying = {id(parameter) for parameter in target.parameters()}
    for path, gone in site.module.named_modules():
        name = f"{site.name}.{path}".rstrip(".")
        hooks = [
            hook
            for kind in (
                gone._forward_hooks,
                gone._forward_pre_hooks,
                gone._backward_hooks,
                gone._backward_pre_hooks,
            )
            for hook in kind.values()
            # A replaced Hugging Face model needs no hooks of recomputed blocks.
            if not (stays and is_input_hook(hook))
        ]
        inside_encoder = isinstance(site.module, nn.TransformerEncoder) and gone is not site.module
        keeps_hooks = stays and gone is site.module
        if gone not in kept and not inside_encoder and not keeps_hooks and hooks:
            raise UnsupportedError(
                f"{name!r} has hooks, which would be lost, because another module replaces it. "
                f"Register them after the strategy has set up the module, or give {site.name!r} "
                "the kind 'replicate'."
            )
        if gone not in kept:
            _check_parameters(name, gone, staying)
        if gone not in kept and gone._compiled_call_impl is not None:
            raise UnsupportedError(
                (
                    f"{name!r} was compiled, and its compiled code would be lost, because another "
                    "module replaces it. "
                )
                + _remedy(target)
            )


def _check_parameters(name: str, gone: nn.Module, staying: Set[int]) -> None:
    """Refuse hooks on parameters that are replaced."""
    for key, parameter in gone._parameters.items():
        if parameter is None or id(parameter) in staying:
            continue
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"the parameter '{name}.{key}' has gradient hooks, which would be lost, because "
                "this rank's part of the parameter replaces it. Register them in on_fit_start; "
                "they then receive the gradient of this part."
            )


def _remedy(target: nn.Module) -> str:
    such_as = (
        ", such as the blocks of model.model.layers" if isinstance(target, PipelinedModule) else ""
    )
    return f"Compile the new modules in on_fit_start{such_as}."
