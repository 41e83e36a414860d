"""Deterministic random operators, to compare a step on a batch with its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Constant draw from the uniform distribution: small enough for masks of few tokens, large enough
#: to keep most layers if layers are dropped at random.
_CONSTANT = 0.125
#: Arguments that disable dropout in operators with dropout.
_DROPOUT_OFF: Mapping[str, Any] = {
    "dropout_p": 0.0,
    "dropout": 0.0,
    "train": False,
    "training": False,
}


class ConstantRandomValues(TorchDispatchMode):
    """Mode that replaces torch's random values by shape-independent ones; dropout is off.

    A forward pass over a batch and passes over its parts then see the same numbers. Draws of
    kernels that are not registered with torch, and those of Python and NumPy, do not change.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Machine epsilon of the least precise floating-point result; 0 before the first one.
        self.spacing = 0.0
        #: Number of values that random operators would have drawn (elements).
        self.num_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        result = self._drawn(func, args, options) if is_drawn else func(*args, **options)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.spacing = max(self.spacing, torch.finfo(value.dtype).eps)
        return result

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        # The dispatcher omits arguments that equal their defaults.
        defaults = {
            argument.name: argument.default_value
            for argument in func._schema.arguments
            if argument.has_default_value()
        }
        bound = defaults | dict(zip(names, args, strict=False)) | kwargs
        off = {name: value for name, value in _DROPOUT_OFF.items() if name in names}
        if off:
            positional = [off.get(name, value) for name, value in zip(names, args, strict=False)]
            result = func(
                *positional,
                **kwargs,
                **{name: off[name] for name in off if name not in names[: len(args)]},
            )
            self.num_drawn += _numel(result) if _drops(bound) else 0
            return result
        constant = _CONSTANTS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        value = None if constant is None else constant(bound)
        result = func(*args, **kwargs)
        self.num_drawn += _numel(result)
        if isinstance(value, Tensor):
            result.copy_(value.to(result.dtype))
        elif value is not None:
            result.fill_(value)
        return result


def _drops(bound: Mapping[str, Any]) -> bool:
    """Return whether an operator with dropout would draw a mask."""
    chance = bound.get("dropout_p", bound.get("dropout", bound.get("p", 0.0)))
    return chance > 0.0 and bound.get("train", bound.get("training", True)) is not False


def _numel(result: Any) -> int:
    first = result[0] if isinstance(result, (tuple, list)) else result
    return int(first.numel()) if isinstance(first, Tensor) else 0


def _uniform(bound: Mapping[str, Any]) -> float:
    low = bound.get("from", 0.0)
    high = bound.get("to", 1.0)
    return low + _CONSTANT * (high - low)


def _integer(bound: Mapping[str, Any]) -> int:
    low = bound.get("low") or bound.get("from") or 0
    high = bound.get("high", bound.get("to"))
    return 1 if high is None else low + int(_CONSTANT * (high - low))


def _bernoulli(bound: Mapping[str, Any]) -> Any:
    chance = bound.get("p", bound["self"])
    return chance > _CONSTANT


def _permutation(bound: Mapping[str, Any]) -> Tensor:
    # A rotation pairs each sample with its neighbour; the identity would pair each with itself and
    # hide how a step mixes samples.
    return torch.arange(bound["n"]).roll(1)


def _choices(bound: Mapping[str, Any]) -> Tensor:
    chances = bound["self"]
    count = bound["num_samples"]
    if bound.get("replacement", False):
        return chances.argmax(-1, keepdim=True).expand(*chances.shape[:-1], count)
    return chances.topk(count).indices


_CONSTANTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "rand": lambda bound: _CONSTANT,
    "rand_like": lambda bound: _CONSTANT,
    "randn": lambda bound: _CONSTANT,
    "randn_like": lambda bound: _CONSTANT,
    "uniform": _uniform,
    "normal": lambda bound: bound.get("mean", 0.0) + _CONSTANT * bound.get("std", 1.0),
    "bernoulli": _bernoulli,
    "exponential": lambda bound: -math.log1p(-_CONSTANT) / bound.get("lambd", 1.0),
    "geometric": lambda bound: 1,
    "cauchy": lambda bound: bound.get("median", 0.0),
    "log_normal": lambda bound: math.exp(bound.get("mean", 1.0)),
    "random": _integer,
    "randint": _integer,
    "randint_like": _integer,
    "randperm": _permutation,
    "multinomial": _choices,
    "poisson": lambda bound: bound["self"].round(),
    "binomial": lambda bound: (bound["count"] * bound["prob"]).round(),
    "_standard_gamma": lambda bound: bound["self"],
    "_sample_dirichlet": lambda bound: bound["self"] / bound["self"].sum(-1, keepdim=True),
}
