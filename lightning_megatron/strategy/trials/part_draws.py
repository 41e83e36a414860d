"""Random numbers that user code draws for sharded features, of which each rank of tp draws its own;
and a mode that replaces random numbers by constants.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.groups.random import RandomStreams, derive_seed
from lightning_megatron.user_code import MODULE_CALL, Line, runs_package, runs_torch

_CHECKPOINT_FILE = torch.utils.checkpoint.checkpoint.__code__.co_filename
_BACKWARD = (Tensor.backward, torch.autograd.backward)
#: Largest number of lines that a message names.
_NUM_SHOWN = 4


@dataclass(frozen=True)
class Place:
    """Place in user code that calls a random torch function, equal in each call and recomputation.

    Args:
        modules: Identities of the modules that are being called there, the innermost one first.
    """

    lines: tuple[Line, ...]
    modules: tuple[int, ...]

    def __str__(self) -> str:
        """Name the line of the user's code."""
        return str(self.lines[0])


@dataclass(frozen=True)
class UserDraw:
    """Random torch function that user code called in a trial.

    Args:
        size: Number of values that it drew (elements).
    """

    place: Place
    function: Hashable
    size: int
    has_generator: bool


class DrawRecord(TorchFunctionMode):
    """Mode that records the random torch functions that user code calls in a trial.

    Draws of this package's own layers are not recorded, because they select their streams.
    """

    def __init__(self, values: ConstantRandomValues) -> None:
        super().__init__()
        self._values = values
        #: The calls, in order.
        self.draws: list[UserDraw] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, and record it if it draws."""
        kwargs = kwargs or {}
        before = self._values.num_drawn
        result = func(*args, **kwargs)
        size = self._values.num_drawn - before
        place = _place_of(sys._getframe(1)) if size else None
        if place is not None:
            values = (*args, *kwargs.values())
            has_generator = any(isinstance(value, torch.Generator) for value in values)
            self.draws.append(UserDraw(place, func, size, has_generator))
        return result


class PartDraws:
    """Streams of the random functions that user code calls on this rank's part of the features.

    A function that draws more numbers if all features are on every rank draws for the features of
    one rank. If it drew from torch's default generator, whose numbers are equal on all ranks of tp,
    all ranks would, for example, drop the same of their features.
    """

    def __init__(self, random: RandomStreams) -> None:
        self._random = random
        self._layers: dict[Place, int] = {}
        self._functions: set[Hashable] = set()

    def find(
        self, module: nn.Module, cut: Sequence[UserDraw], whole: Sequence[UserDraw], error: str
    ) -> tuple[list[Place], list[str]]:
        """Find the functions that draw for sharded features.

        Args:
            error: Error that ended the step with all features; empty if it ran.

        Returns:
            The new places of these functions, and why draws cannot have their own streams.
        """
        in_whole = _by_place(whole)
        names = {id(part): name for name, part in module.named_modules()}
        found: list[Place] = []
        reasons: list[str] = []
        for place, draws in _by_place(cut).items():
            others = in_whole.get(place, [])
            if error and len(others) < len(draws):
                reasons.append(f"{place}, which could not be tried with all features ({error})")
            if place in self._layers or _total(draws) >= _total(others):
                continue
            found.append(place)
            # The stream depends on the module and not on the stage that has it.
            where = next((names[key] for key in place.modules if key in names), "")
            code = (str(line.number) for line in place.lines)
            self._layers[place] = derive_seed("user code", where, *code)
            pairs = zip(draws, others, strict=False)
            if len(others) == len(draws) and any(draw.size == other.size for draw, other in pairs):
                reasons.append(f"{place}, which also draws for all features")
            elif any(draw.has_generator for draw in draws):
                reasons.append(f"{place}, which passes a generator")
        self._functions |= {draw.function for draw in cut if draw.place in self._layers}
        return found, reasons

    def streams(self) -> AbstractContextManager[Any]:
        """Return a context for steps, in which these functions draw from the rank's own stream."""
        if not self._layers:
            return nullcontext()
        return _OwnStreams(self._random, self._layers, frozenset(self._functions))


def listed(items: Sequence[object]) -> str:
    """List some items in a sentence."""
    more = ", ..." if len(items) > _NUM_SHOWN else ""
    return f"{', '.join(map(str, items[:_NUM_SHOWN]))}{more}"


class _OwnStreams(TorchFunctionMode):
    """Mode in which some calls of random functions draw from the stream of this rank of tp.

    Args:
        layers: Number of the layer for random streams, by place of the call.
        functions: Functions that are called at these places.
    """

    def __init__(
        self,
        random: RandomStreams,
        layers: Mapping[Place, int],
        functions: frozenset[Hashable],
    ) -> None:
        super().__init__()
        self._random = random
        self._layers = layers
        self._functions = functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, with the rank's own stream at one of the places."""
        kwargs = kwargs or {}
        if func in _BACKWARD and kwargs.get("inputs") is None:
            return self._backward(*args, **kwargs)
        place = _place_of(sys._getframe(1)) if func in self._functions else None
        layer = None if place is None else self._layers.get(place)
        if layer is None:
            return func(*args, **kwargs)
        self._random.seek(layer)
        with self._random.fork("tensor"):
            return func(*args, **kwargs)

    def _backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        grad_tensors: Any = None,
        inputs: None = None,
    ) -> None:
        """Run a backward pass in this mode, which is off while it handles a function.

        Code that the backward pass runs again must draw the same numbers. The mode does not handle
        a backward pass of edges.
        """
        outputs = [tensors] if isinstance(tensors, Tensor) else tensors
        gradients = gradient if grad_tensors is None else grad_tensors
        with self:
            torch.autograd.backward(
                [get_gradient_edge(output) for output in outputs],
                gradients,
                retain_graph,
                create_graph,
            )


def _place_of(frame: FrameType | None) -> Place | None:
    """Return the place of a call; None if a layer of this package makes it."""
    lines: list[Line] = []
    modules: list[int] = []
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            modules.append(id(frame.f_locals["self"]))
            if lines:
                break
        elif frame.f_code.co_filename == _CHECKPOINT_FILE:
            # Autograd, and not the user's method, calls a recomputation.
            break
        elif frame.f_code.co_name != "__torch_function__" and not runs_torch(frame):
            if runs_package(frame):
                break
            lines.append(Line.of(frame))
        frame = frame.f_back
    return Place(tuple(lines), tuple(modules)) if lines else None


def _by_place(draws: Sequence[UserDraw]) -> dict[Place, list[UserDraw]]:
    places: dict[Place, list[UserDraw]] = {}
    for draw in draws:
        places.setdefault(draw.place, []).append(draw)
    return places


def _total(draws: Sequence[UserDraw]) -> int:
    return sum(draw.size for draw in draws)


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
        bound = {one.name: one.default_value for one in func._schema.arguments}
        bound |= dict(zip(names, args, strict=False)) | kwargs
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
