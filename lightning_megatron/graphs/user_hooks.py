"""Modules that no graph may hold: users refuse it, or have hooks, which a replay would not call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.user_code import refuses_graphs

#: Attributes of a module with the hooks of each kind.
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OWN = __name__.partition(".")[0]


def user_hook_of(module: nn.Module) -> str | None:
    """Return the name of a hook that a user has put on a module; None without one.

    Hooks of this package do not count, because the code that replays a graph does their work.

    Args:
        module: The module itself; its parts are not searched.
    """
    return next((_name(hook) for hook in _hooks(module) if not _is_own(hook)), None)


def reason_against_graphs(module: nn.Module) -> str | None:
    """Return why no graph may hold a module; None if a graph may.

    A module refuses graphs by the attribute ``is_capturable = False``, or by a hook of a user.

    Args:
        module: The module itself; its parts are not searched.
    """
    if refuses_graphs(module):
        return "is_capturable is False"
    hook = user_hook_of(module)
    return None if hook is None else f"hook {hook}"


def modules_with_user_hooks(root: nn.Module) -> dict[str, str]:
    """Return the name of the first hook of a user, by the name of its module.

    Args:
        root: Module to search, with all its parts.
    """
    hooks = {}
    for name, module in root.named_modules():
        hook = user_hook_of(module)
        if hook is not None:
            hooks[name] = hook
    return hooks


def find_refusal(root: nn.Module) -> str | None:
    """Return why a user's module or hook prevents one graph of a module; None if nothing does.

    Args:
        root: Module to search, with all its parts.
    """
    for name, module in root.named_modules():
        reason = reason_against_graphs(module)
        if reason is not None:
            return (
                f"{name or 'the module'} must run eagerly ({reason}). Use mode segments, which "
                "runs this part eagerly, or remove the hook or the attribute."
            )
    return None


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for kind in _KINDS:
        yield from getattr(module, kind).values()


def _is_own(hook: Callable[..., Any]) -> bool:
    place = getattr(_plain(hook), "__module__", None) or type(hook).__module__
    return place.partition(".")[0] == _OWN


def _name(hook: Callable[..., Any]) -> str:
    return str(getattr(_plain(hook), "__qualname__", type(hook).__qualname__))


def _plain(hook: Any) -> Any:
    """Return the function inside of partial functions."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook
