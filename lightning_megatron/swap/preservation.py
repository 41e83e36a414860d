"""Shared weights, hooks and compiled code, which a replacement must keep or refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.swap.decide.swap_plan import WHOLE_MODEL, Swap
from lightning_megatron.swap.hugging_face.peft_layers import is_input_hook
from lightning_megatron.user_code import refuses_graphs

#: Attribute in which torch.compile stores the wrapped module.
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class _Target:
    """Parameter that gets the values of a source parameter."""

    block: nn.Module
    name: str
    kind: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.block.get_parameter(self.name)

    def adopt(self, parameter: nn.Parameter) -> None:
        path, _, key = self.name.rpartition(".")
        setattr(self.block.get_submodule(path), key, parameter)


def share_weights(root: nn.Module, swaps: Sequence[Swap], stage_modules: Set[str]) -> None:
    """Share weights among replacements as among the replaced modules; do not change ``root``.

    A model that is replaced in full may share weights only among its own modules.
    """
    targets = {
        f"{swap.site.name}.{name}": _Target(swap.target, name, swap.kind)
        for swap in swaps
        for name in swap.shared
    }
    models = [swap.site.name for swap in swaps if swap.kind == WHOLE_MODEL]
    names: dict[int, list[str]] = {}
    for path, owner in root.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and (not path or path in stage_modules):
                names.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    for shared in names.values():
        if len(shared) > 1:
            _check_models(shared, models)
            _share(shared, targets)


def _check_models(shared: Sequence[str], models: Sequence[str]) -> None:
    sides = set()
    for key in shared:
        sides.add(next((name for name in models if key.startswith(f"{name}.")), ""))
    if len(sides) > 1:
        raise ParallelPlanError(
            f"{' and '.join(repr(key) for key in shared)} share one weight across the border of a "
            "model that is replaced as a whole. They would become separate weights. Use "
            "GPTConfig(tie_embeddings=True) or separate weights."
        )


def _share(shared: Sequence[str], targets: Mapping[str, _Target]) -> None:
    moved = [targets[key] for key in shared if key in targets]
    if not moved:
        return
    first = moved[0].parameter
    same = all(
        shard_spec_of(target.parameter) == shard_spec_of(first)
        and target.parameter.shape == first.shape
        for target in moved
    )
    if len(moved) < len(shared) or not same:
        kinds = ", ".join(
            f"{key!r} is {targets[key].kind if key in targets else 'replicate'!r}" for key in shared
        )
        raise ParallelPlanError(
            f"modules that share one weight must cut it alike: {kinds}. Otherwise their parts "
            "would not be equal. Give all of them the kind 'replicate', or 'vocab' where an "
            "embedding and an output layer share a weight."
        )
    for target in moved[1:]:
        target.adopt(first)


def check_nothing_is_lost(swap: Swap) -> None:
    """Refuse to replace a module that has hooks or was compiled.

    Hooks are legal on modules and parameters that become part of the replacement, and on a module
    that stays the same object and only gets other layers.
    """
    site = swap.site
    target = swap.target
    stays = swap.install is not None
    if _COMPILED in site.name.split("."):
        compiled = site.name.split(f".{_COMPILED}")[0]
        raise UnsupportedError(
            f"{compiled!r} was compiled, but its module {site.name!r} must be replaced, and the "
            "compiled code would still run the old module. " + _remedy(target)
        )
    kept = set(target.modules())
    staying = {id(parameter) for parameter in target.parameters()}
    for path, module in site.module.named_modules():
        if module in kept:
            continue
        name = f"{site.name}.{path}".rstrip(".")
        is_root = module is site.module
        # Layers of an encoder have replacements of their own.
        keeps_hooks = stays if is_root else isinstance(site.module, nn.TransformerEncoder)
        if not keeps_hooks and _has_hooks(module, stays):
            raise UnsupportedError(
                f"{name!r} has hooks, which would be lost, because another module replaces it. "
                f"Register them after the strategy has set up the module, or give {site.name!r} "
                "the kind 'replicate'."
            )
        if not (is_root and stays) and refuses_graphs(module):
            raise UnsupportedError(
                f"{name!r} has is_capturable = False, which would be lost, because another module "
                "replaces it. Set it on the replacement, for example in on_fit_start."
            )
        _check_parameters(name, module, staying)
        if module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{name!r} was compiled, and its compiled code would be lost, because another "
                "module replaces it. " + _remedy(target)
            )


def _has_hooks(module: nn.Module, stays: bool) -> bool:
    forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    backward = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    # A replaced Hugging Face model needs no hooks of recomputed blocks.
    return any(not (stays and is_input_hook(hook)) for hook in (*forward, *backward))


def _check_parameters(name: str, module: nn.Module, staying: Set[int]) -> None:
    """Refuse hooks on parameters that are replaced."""
    for key, parameter in module._parameters.items():
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
