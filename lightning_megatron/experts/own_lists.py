"""Experts that users wrote, in lists or stacked in parameters, divided over the ranks of ep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    BoundaryGradients,
    all_gather_sequence,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of
from lightning_megatron.nest import rebuild
from lightning_megatron.plan.shards import even_range
from lightning_megatron.shapes import Shaped

#: Attribute of a gathered weight of which tp leaves this rank a part.
_PART = "is_part_of_weight"


def is_gathered_part(tensor: Shaped[Tensor, "..."]) -> bool:
    """Return whether a tensor is this rank's part of an expert's weight, gathered over ep."""
    return hasattr(tensor, _PART)


def stacks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that stack experts, by key; empty if it has none.

    The experts are the first dimension of its parameters of three dimensions, and of smaller ones
    beside them, such as biases.
    """
    own = {key: one for key, one in module._parameters.items() if one is not None and one.dim() > 1}
    numbers = {one.shape[0] for one in own.values() if one.dim() > 2}
    is_of_torch = any(
        kind.__module__.startswith("torch.") and kind is not nn.Module
        for kind in type(module).__mro__[:-1]
    )
    if is_of_torch or len(numbers) != 1:
        return {}
    return {key: one for key, one in own.items() if one.shape[0] in numbers}


class DividedExperts:
    """Equal experts of a list or of stacks, each of which one rank of ep stores and updates.

    While the module runs whose code uses them, every rank has the weights of all experts, and
    computes the rows of its own samples. The code may loop over experts, skip some, or stack their
    weights, in any order: the result for each sample is that of one process. Autograd keeps the
    gathered weights until the backward pass, unless it recomputes the module, as in
    ``torch.utils.checkpoint``: they are then gathered again.

    A parameter gets the gradient of the rows of all ranks; none, if no rank uses it.

    Args:
        name: Dotted name of the list, or of the module with the stacks, for errors.
        experts: The list or the module. Its attribute ``mesh`` becomes the mesh of this rank.

    Communication: for each parameter of an expert, an all-gather over ep forward and a
        reduce-scatter backward, of all experts together.
    Source: Rajbhandari et al. 2020, section 5.3, for experts alone.
    """

    def __init__(self, name: str, experts: nn.Module, mesh: ParallelMesh) -> None:
        self.name = name
        self.experts: Any = experts
        experts.mesh = mesh  # type: ignore[assignment]
        #: What the outputs of a running module must depend on; None while it does not run.
        self._ends: list[Tensor] | None = None
        #: Modules that hold a parameter, one of each expert or the one with stacks, with its key.
        self._places: list[tuple[list[nn.Module], str]] = []
        self._is_list = isinstance(experts, nn.ModuleList)
        if not isinstance(experts, nn.ModuleList):
            self._places = [([experts], key) for key in stacks_of(experts)]
            return
        for path, first in experts[0].named_modules(remove_duplicate=False):
            modules = [expert.get_submodule(path) for expert in experts]
            keys = [key for key, parameter in first._parameters.items() if parameter is not None]
            self._places += [(modules, key) for key in keys]

    def divide(self, user: nn.Module) -> None:
        """Leave this rank only the parameters of its experts, and gather all while ``user`` runs.

        Args:
            user: Module whose ``forward`` uses the experts.
        """
        for modules, key in self._places:
            held = self._here(modules)
            for module in modules:
                if not self._is_list:
                    self._keep_share(module._parameters[key])
                    continue
                parameter = module._parameters[key]
                if parameter is None or module not in held:
                    module._parameters[key] = None
                    continue
                spec = shard_spec_of(parameter, self.experts.mesh.tp.rank)
                set_shard_spec(parameter, replace(spec, is_expert=True))
        user.register_forward_pre_hook(self._gather, prepend=True)
        user.register_forward_hook(self._release, always_call=True)
        for expert in self.experts if self._is_list else ():
            expert.register_forward_pre_hook(self._check)

    def _keep_share(self, stack: Any) -> None:
        """Leave this rank its experts of a stack, whose parameter stays the same object."""
        mesh = self.experts.mesh
        shape = tuple(stack.shape)
        share = replace(even_range(shape[0], mesh.ep.size, mesh.ep.rank), copy=mesh.tp.rank)
        # Not a view, which would keep the memory of all experts.
        stack.data = stack.data[share.start : share.stop].clone()
        set_shard_spec(stack, ShardSpec(shape, (share,), is_expert=True, over_ep=True))

    def _here(self, modules: Sequence[nn.Module]) -> Sequence[nn.Module]:
        if not self._is_list:
            return modules
        axis = self.experts.mesh.ep
        count = len(modules) // axis.size
        return modules[axis.rank * count : (axis.rank + 1) * count]

    def _gather(self, user: nn.Module, inputs: Any) -> None:
        self._ends = []
        for modules, key in self._places:
            held: list[Any] = [module._parameters[key] for module in self._here(modules)]
            *weights, end = _Gather.apply(self.experts.mesh.ep, *held)
            self._ends.append(end)
            if not self._is_list:
                vars(modules[0])[key] = torch.cat(weights)
                continue
            spec = shard_spec_of(held[0])
            for module, weight in zip(modules, weights, strict=True):
                if not spec.is_whole:
                    setattr(weight, _PART, True)
                # An attribute of the object hides a parameter of the same name.
                vars(module)[key] = weight

    def _release(self, user: nn.Module, inputs: Any, output: Any) -> Any:
        for modules, key in self._places:
            for module in modules:
                vars(module).pop(key, None)
        ends = self._ends
        self._ends = None
        return _tied(output, _End.apply(*ends)) if ends and torch.is_grad_enabled() else output

    def _check(self, expert: nn.Module, inputs: Any) -> None:
        if self._ends is None:
            raise UnsupportedError(
                f"an expert of {self.name!r} is called outside of the forward of the module around "
                "the list, but ep divides these experts, and a rank has the weights of all of them "
                "only in that forward. Call the module, as a whole within "
                "torch.utils.checkpoint.checkpoint, or use ep=1."
            )


def _tied(output: Any, end: Tensor) -> Any:
    """Add zero to the numbers of an output, which then depend on the gathered weights."""
    if isinstance(output, Tensor):
        return output + end if output.is_floating_point() else output
    return rebuild(output, lambda value: _tied(value, end))


class _Gather(torch.autograd.Function):
    """All-gather of one parameter of every expert, and reduce-scatter of its gradients.

    The last result is zero. It makes ranks whose samples use no expert take part in the backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis = axis
        ctx.held = len(held), held[0].shape, held[0].dtype, held[0].device
        stack = torch.stack(held)
        return *all_gather_sequence(stack, axis).unbind(), stack.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count, shape, dtype, device = ctx.held
        wide = torch.promote_types(dtype, torch.float32)
        # The last number of a row tells how many ranks use the expert.
        rows = torch.zeros(len(grads) - 1, shape.numel() + 1, dtype=wide, device=device)
        for row, grad in zip(rows, grads, strict=False):
            if grad is not None:
                row[:-1].copy_(grad.reshape(-1))
                row[-1] = 1
        sums = reduce_scatter_sequence(rows, ctx.axis)
        here = grads[ctx.axis.rank * count : (ctx.axis.rank + 1) * count]
        results = [
            row[:-1].view(shape).to(dtype) if grad is not None or row[-1] > 0 else None
            for row, grad in zip(sums, here, strict=True)
        ]
        return None, *results


class _End(torch.autograd.Function):
    """Zero, whose gradients are not numbers of the module."""

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients:
        """Describe this call as one that gives no gradients."""
        return BoundaryGradients((), takes_parts=True)

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        ctx.count = len(ends)
        return ends[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0],) * ctx.count
