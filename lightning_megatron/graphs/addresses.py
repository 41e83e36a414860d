"""Addresses that graphs read and write, compared with those at the capture."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_megatron.graphs.user_hooks import modules_with_user_hooks
from lightning_megatron.layers.parameters.gradient_slot import slot_of

#: Address, shape, dtype and ``requires_grad`` of a tensor, with the address of its gradients.
_Entry = tuple[int, tuple[int, ...], str, bool, int]


@dataclass(frozen=True)
class Addresses:
    """Addresses of a module's parameters, gradients and buffers; modes and hooks of its parts.

    A graph uses the memory of its capture. It would compute with old values if a parameter has
    moved since, and skip the gradient of a parameter that was unfrozen since, or a hook that was
    registered since.

    Args:
        tensors: Address, shape, dtype and ``requires_grad``, by name.
        modes: Names of the parts that are in training mode.
        hooks: Name of a user's hook, by the name of its part.
    """

    tensors: dict[str, _Entry]
    modes: frozenset[str]
    hooks: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> Addresses:
        """Return the current addresses of a module.

        Args:
            module: Module whose parts graphs may have captured.
        """
        named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        named |= dict(module.named_buffers(remove_duplicate=False))
        modes = frozenset(name for name, part in module.named_modules() if part.training)
        entries = {name: _entry(tensor) for name, tensor in named.items()}
        return cls(entries, modes, modules_with_user_hooks(module))

    def change_from(self, earlier: Addresses) -> str | None:
        """Return what differs from earlier addresses, in words; None if nothing does.

        Args:
            earlier: Addresses at the capture.
        """
        for name in {**earlier.tensors, **self.tensors}:
            before = earlier.tensors.get(name)
            now = self.tensors.get(name)
            if before != now:
                return f"{name} {_difference(before, now)}"
        for name in sorted(earlier.modes ^ self.modes):
            mode = "training" if name in self.modes else "evaluation"
            return f"{name or 'the module'} is now in {mode} mode"
        for name in {**earlier.hooks, **self.hooks}:
            hook = self.hooks.get(name)
            if hook != earlier.hooks.get(name):
                has = f"now has the hook {hook}" if hook else "no longer has its hook"
                return f"{name or 'the module'} {has}"
        return None


def _entry(tensor: Tensor) -> _Entry:
    slot = slot_of(tensor)
    gradients = 0 if slot is None else sum(part.gradient.data_ptr() for part in slot.slots)
    shape = tuple(tensor.shape)
    return tensor.data_ptr(), shape, str(tensor.dtype), tensor.requires_grad, gradients


def _difference(before: _Entry | None, now: _Entry | None) -> str:
    if before is None:
        return "is new"
    if now is None:
        return "is gone"
    if before[1:3] != now[1:3]:
        return f"is now {list(now[1])} {now[2]}, it was {list(before[1])} {before[2]}"
    if before[3] != now[3]:
        return "is now trained" if now[3] else "is now frozen"
    return "has moved" if before[0] != now[0] else "has its gradients at another address"
