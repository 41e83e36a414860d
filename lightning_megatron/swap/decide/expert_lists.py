"""Experts in modules of users: which of them ep can divide, and whose code uses them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import nn

from lightning_megatron.experts.own_lists import stacks_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.settings import divisors, join_or
from lightning_megatron.swap.decide.kinds import EXPERTS
from lightning_megatron.user_code import is_compiled


def automatic_experts(root: nn.Module, mesh: ParallelMesh) -> dict[str, str]:
    """Return the kinds of the mixtures of a module that ep can divide, by name.

    A mixture is a list of equal modules, or a module with stacks of experts, beside a parameter
    that has a row or a column for each of them, such as that of a router.
    """
    if mesh.ep.size == 1:
        return {}
    return {
        name: EXPERTS
        for name, part in root.named_modules()
        if (type(part) is nn.ModuleList or stacks_of(part))
        and _has_router(root, name)
        and why_not_experts(root, name, mesh) is None
    }


def user_of_experts(root: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost module with experts that has a ``forward``; None without one."""
    return next(_users(root, name), None)


def _users(root: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that have a ``forward``: that of the name, and those around it."""
    for path in (name, *_around(name)):
        user = root.get_submodule(path)
        if path and type(user).forward is not nn.Module.forward:
            yield user


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the innermost to the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _has_router(root: nn.Module, name: str) -> bool:
    experts = root.get_submodule(name)
    stacks = stacks_of(experts)
    inside = set(map(id, stacks.values() or experts.parameters()))
    number = _number_of(experts)
    # A router of stacks may be in the module around the one that uses them.
    users = islice(_users(root, name), 2 if stacks else 1)
    beside = [parameter for user in users for parameter in user.parameters()]
    return number > 1 and any(
        number in parameter.shape for parameter in beside if id(parameter) not in inside
    )


def why_not_experts(root: nn.Module, name: str, mesh: ParallelMesh) -> str | None:
    """Return why ep cannot divide the experts of a list or of stacks; None if it can."""
    part = root.get_submodule(name)
    stacks = stacks_of(part)
    experts = [] if stacks else list(part.children())
    number = _number_of(part)
    if mesh.etp.ranks != mesh.tp.ranks:
        return f"etp ({mesh.etp.size}) must cut experts as tp ({mesh.tp.size}) does. Leave etp out"
    if number == 0 or number % mesh.ep.size:
        sizes = join_or(divisors(number)) if number else "1"
        return f"its number of experts ({number}) must be a multiple of ep. Use ep of {sizes}"
    if user_of_experts(root, name) is None:
        return "no module around it has a forward. Put the list and its code into a module"
    kinds = {_description(expert) for expert in experts}
    if not stacks and (len(kinds) > 1 or not next(iter(kinds))[1]):
        return "its modules must have parameters of the same names, shapes and settings"
    inside = set(map(id, stacks.values() or part.parameters()))
    owners = [
        id(parameter)
        for _, module in root.named_modules(remove_duplicate=False)
        for parameter in module._parameters.values()
        if id(parameter) in inside
    ]
    if len(owners) > len(inside):
        return "a parameter of it has a second name. Give every expert parameters of its own"
    around = [root.get_submodule(path) for path in _around(name)]
    if any(map(is_compiled, (*around, *part.modules()))):
        return "it is in compiled code. Compile no module around it"
    return None


def _number_of(experts: nn.Module) -> int:
    """Return the number of experts of a list, or of the stacks of a module."""
    stacks = stacks_of(experts)
    return len(next(iter(stacks.values()))) if stacks else sum(1 for _ in experts.children())


def _description(expert: nn.Module) -> tuple[type, tuple[object, ...]]:
    """Return what experts of one list have in common."""
    tensors = [
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in expert.named_parameters()
    ]
    return type(expert), tuple(tensors)
