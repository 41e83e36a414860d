"""References to parameters that an optimizer keeps in its attributes, beside its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

#: Attributes that every optimizer has, which hold groups, states and functions.
_OWN = frozenset({"param_groups", "state", "defaults"})


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """List an optimizer and those in its attributes, such as the one that a Lookahead wraps."""
    found = [optimizer]
    for owner in found:
        for value in vars(owner).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            found += [
                part
                for part in inner
                if isinstance(part, Optimizer) and all(part is not known for known in found)
            ]
    return found


def replace_parameters(
    optimizer: Optimizer, main_of: Callable[[nn.Parameter], nn.Parameter]
) -> None:
    """Replace the parameters in lists, tuples, sets and dictionaries of an optimizer's attributes.

    Groups and states do not change.

    Args:
        optimizer: Optimizer, which changes.
        main_of: Function from a parameter to the one that takes its place.
    """
    for name, value in list(vars(optimizer).items()):
        if name not in _OWN and isinstance(value, (nn.Parameter, list, tuple, set, dict)):
            setattr(optimizer, name, _replaced(value, main_of))


def _replaced(value: Any, main_of: Callable[[nn.Parameter], nn.Parameter]) -> Any:
    """Return a value with other parameters; lists and dictionaries change in place."""
    if isinstance(value, nn.Parameter):
        return main_of(value)
    if isinstance(value, dict):
        pairs = [(_replaced(key, main_of), _replaced(v, main_of)) for key, v in value.items()]
        value.clear()
        value.update(pairs)
    elif type(value) is list:
        value[:] = [_replaced(part, main_of) for part in value]
    elif type(value) in (tuple, set):
        return type(value)(_replaced(part, main_of) for part in value)
    return value
