"""Changes of tensors, modes and hooks that captured graphs depend on are found and described."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_megatron.graphs.addresses import Addresses
from lightning_megatron.graphs.user_hooks import modules_with_user_hooks, user_hook_of
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.optimizer.flat_buffer import UseOrder
from lightning_megatron.optimizer.parameter_gather import ParameterGather


def net() -> Any:
    """Return a module with parameters, a buffer, and a gradient slot of one parameter."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    give_slot(module)
    return module


def give_slot(module: Any) -> None:
    set_slot(module[0].weight, GradientSlot(torch.zeros(3, 2), lambda: None))


def move(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.clone()


def replace_buffer(module: Any) -> None:
    module[1].running_mean = module[1].running_mean.double()


def add(module: Any) -> None:
    module.extra = nn.Parameter(torch.ones(1))


CHANGES: list[tuple[Callable[[Any], Any], str | None]] = [
    (move, "0.weight has moved"),
    (give_slot, "0.weight has its gradients at another address"),
    (lambda module: module[0].bias.requires_grad_(False), "0.bias is now frozen"),
    (replace_buffer, "1.running_mean is now [3] torch.float64, it was [3] torch.float32"),
    (add, "extra is new"),
    (lambda module: module[1].eval(), "1 is now in evaluation mode"),
    # New values at the same addresses are not a change.
    (lambda module: module.load_state_dict(net().state_dict()), None),
]


def test_a_change_of_a_module_is_described():
    for change, words in CHANGES:
        module = net()
        before = Addresses.of(module)
        change(module)
        assert Addresses.of(module).change_from(before) == words


def see(module: nn.Module, args: Any) -> None: ...


def test_added_and_removed_hooks_are_changes():
    module = net()
    before = Addresses.of(module)
    handle = module[0].register_forward_pre_hook(see)
    hooked = Addresses.of(module)
    assert (hooked.change_from(before) or "").startswith("0 now has the hook ")
    assert hooked.change_from(hooked) is None
    handle.remove()
    assert Addresses.of(module).change_from(hooked) == "0 no longer has its hook"


def test_hooks_of_users_are_found_and_hooks_of_the_package_are_not():
    def note(where, module, args, output): ...

    module = net()
    ParameterGather(UseOrder(), []).wait_before([module])
    assert modules_with_user_hooks(module) == {}
    module[0].register_forward_pre_hook(see)
    module[1].register_forward_hook(partial(note, "here"))
    hooks = modules_with_user_hooks(module).items()
    assert {name: hook.rpartition(".")[2] for name, hook in hooks} == {"0": "see", "1": "note"}
    assert user_hook_of(module) is None
