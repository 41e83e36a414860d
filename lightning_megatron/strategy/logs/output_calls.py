"""Calls of loggers and of ``self.print`` during microbatches, merged for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyExperiment
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.logs.merge import Weight, stack_scalars, weighted_mean
from lightning_megatron.strategy.modules.serialization import pack, unpack
from lightning_megatron.strategy.modules.state_digest import PICKLING_ERRORS
from lightning_megatron.user_code import line_of_user

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Target:
    """Method of a logger, of its experiment, or of the module.

    Args:
        logger: Index among the loggers of the Trainer; None means the module.
    """

    logger: int | None
    path: tuple[tuple[bool, Any], ...]

    def within(self, key: Any, *, is_item: bool = False) -> Target:
        """Return the attribute or the item of this target."""
        return Target(self.logger, (*self.path, (is_item, key)))

    @property
    def text(self) -> str:
        """Return the target as the user writes it."""
        steps = (f"[{key!r}]" if is_item else f".{key}" for is_item, key in self.path)
        return f"self{'' if self.logger is None else '.logger'}{''.join(steps)}"


@dataclass(frozen=True)
class OutputCall:
    """Call of a method that writes outside of the module."""

    target: Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self, module: LightningModule) -> None:
        """Call the method on this rank."""
        target = self.target
        method: Any = module if target.logger is None else module.trainer.loggers[target.logger]
        for is_item, key in target.path:
            method = method[key] if is_item else getattr(method, key)
            if isinstance(method, DummyExperiment):
                return
        method(*self.args, **self.kwargs)


@dataclass
class OutputCalls:
    """Calls of one batch. Calls of the same line in several microbatches are one call.

    Args:
        entries: Calls with the indices and sizes of their microbatches (samples), by target, line
            of code and number of the call in its microbatch.
    """

    entries: dict[Any, list[tuple[OutputCall, int, int]]] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)

    def keep(
        self,
        target: Target,
        arguments: tuple[Any, Any],
        module: LightningModule,
        run: int,
        size: int,
    ) -> None:
        """Keep a call, with copies of its arguments.

        Args:
            run: Index of the microbatch.
            size: Size of the microbatch (samples).
        """
        line = line_of_user()
        try:
            copies = unpack(pack(arguments, module), module, _CPU)
        except PICKLING_ERRORS as error:
            raise UnsupportedError(
                f"the arguments of {target.text} must be values that pickle can copy, because the "
                f"call is made for the whole batch, after all of its microbatches: {line} passes "
                f"others ({type(error).__name__}: {error}). Pass tensors, arrays, numbers or text, "
                "or make the call in a hook such as on_train_batch_end."
            ) from error
        place = (target, line, run)
        self.counts[place] = self.counts.get(place, -1) + 1
        key = (target, line, self.counts[place])
        self.entries.setdefault(key, []).append((OutputCall(target, *copies), run, size))

    def merged(self, counts: Sequence[Weight] | None) -> list[OutputCall]:
        """Return one call for the calls of all microbatches by the same line, in their order.

        Numbers that differ are averaged, also in mappings; other arguments are those of the first
        microbatch.

        Args:
            counts: Token count of each microbatch, the weights of means; None means samples.
        """
        merged = []
        for entries in self.entries.values():
            calls = [call for call, _, _ in entries]
            weights = [size if counts is None else counts[run] for _, run, size in entries]
            kwargs = _merged([call.kwargs for call in calls], weights)
            columns = zip(*(call.args for call in calls), strict=False)
            args = tuple(_merged(list(column), weights) for column in columns)
            merged.append(OutputCall(calls[0].target, args, kwargs))
        return merged


class RecordedMember:
    """Method or object of a logger in a step, whose calls are recorded and made after the batch.

    Args:
        record: Function of the target, the positional and the keyword arguments of a call.
    """

    _target: Target
    _record: Callable[[Target, Any, Any], None]

    def __init__(self, target: Target, record: Callable[[Target, Any, Any], None]) -> None:
        vars(self).update(_target=target, _record=record)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Record a call."""
        self._record(self._target, args, kwargs)

    def __getattr__(self, name: str) -> RecordedMember:
        if name.startswith("__"):
            raise AttributeError(
                f"{self._target.text} has no {name} in a step whose microbatches or stages run "
                "one after the other, because its calls are made after the batch."
            )
        return RecordedMember(self._target.within(name), self._record)

    def __setattr__(self, name: str, value: Any) -> None:
        self._record(self._target.within("__setattr__"), (name, value), {})

    def __getitem__(self, key: Any) -> RecordedMember:
        return RecordedMember(self._target.within(key, is_item=True), self._record)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record(self._target.within("__setitem__"), (key, value), {})


def _merged(values: Sequence[Any], weights: Sequence[Weight]) -> Any:
    first = values[0]
    if all(isinstance(value, Mapping) for value in values):
        merged = {}
        for key in dict.fromkeys(key for value in values for key in value):
            holders = [number for number, value in enumerate(values) if key in value]
            held = [values[number][key] for number in holders]
            merged[key] = _merged(held, [weights[number] for number in holders])
        return merged
    if len(values) == 1 or not all(_is_number(value) for value in values):
        return first
    if all(bool(value == first) for value in values):
        return first
    mean = weighted_mean(stack_scalars([torch.as_tensor(value) for value in values]), weights)
    return mean.reshape(first.shape) if isinstance(first, Tensor) else mean.item()


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Number) and not isinstance(value, bool | complex)
