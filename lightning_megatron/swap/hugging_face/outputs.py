"""Outputs of replaced models: those of Hugging Face's classes, with logits gathered on access."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, get_args

from torch import Tensor, nn


class _LateLogits:
    """Logits that the first read gathers.

    Args:
        gather: Function that returns the logits; None after the backward pass of the loss.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self.gather: Callable[[], Tensor] | None = gather

    def __repr__(self) -> str:
        """Return a text, because a gather takes part on all ranks."""
        return "gathered at the first read"

    def read(self) -> Tensor:
        """Return the logits.

        Raises:
            RuntimeError: If the first read is after the backward pass.
        """
        if self.gather is None:
            raise RuntimeError(
                "logits must be read before the backward pass of the loss, which uses their memory "
                "for the gradient. Read output.logits in training_step."
            )
        return self.gather()


class _LateOutput(OrderedDict[str, Any]):
    """Base of an output of Hugging Face's class whose logits are gathered at the first read."""

    @property
    def logits(self) -> Any:
        """Return the logits ``(B, S, V)`` of the true vocabulary."""
        logits = vars(self).get("logits")
        if isinstance(logits, _LateLogits):
            logits = self["logits"] = logits.read()
        return logits

    @logits.setter
    def logits(self, value: Any) -> None:
        vars(self)["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        """Return an entry by name or position, or entries by a slice."""
        if isinstance(key, str):
            if key not in self:
                raise KeyError(key)
            return getattr(self, key)
        names = list(self)[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    # Those of OrderedDict would return entries without ``__getitem__``.
    get = Mapping.get  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return a text without gathering logits, because a gather takes part on all ranks."""
        entries = ", ".join(f"{name}={vars(self)[name]!r}" for name in self)
        return f"{type(self).__name__}({entries})"

    def __reduce__(self) -> Any:
        """Return a copy's class, which is Hugging Face's, and its arguments."""
        kind: Any = type(self).__mro__[2]
        return kind, tuple(getattr(self, field.name) for field in fields(kind))


def output_class(model: nn.Module) -> type[Any]:
    """Return the class of the outputs of the Hugging Face model that a model replaces."""
    model_class: Any = type(model)
    kind: type[Any] = _returned_class(model_class)
    return kind


def late_output(kind: Any, loss: Tensor | None, gather: Callable[[], Tensor], **others: Any) -> Any:
    """Return an output of a class of Hugging Face, with logits gathered at the first read.

    Args:
        gather: Function that returns the logits ``(B, S, V)``, which all tensor-parallel ranks call
            or none.
    """
    logits = _LateLogits(gather)
    output = _late_class(kind)(loss=loss, logits=logits, **others)
    if loss is not None and loss.requires_grad:
        # The backward pass of a fused loss writes the gradient over this rank's logits. The loss
        # must not refer to the output, or the logits of every microbatch would stay in memory until
        # a garbage collection.
        loss.register_hook(partial(_release_graph, weakref.ref(logits)))
    return output


@cache
def _late_class(kind: Any) -> Any:
    # The class has the name and the fields of Hugging Face's, so that pickles and texts agree.
    return type(kind.__name__, (_LateOutput, kind), {"__doc__": kind.__doc__})


@cache
def _returned_class(model_class: Any) -> Any:
    """Return the dataclass that a Hugging Face class's forward pass is annotated to return."""
    package = __name__.partition(".")[0]
    for kind in model_class.__mro__:
        if "forward" not in vars(kind) or kind.__module__.partition(".")[0] == package:
            continue
        returned = signature(vars(kind)["forward"], eval_str=True).return_annotation
        for candidate in (returned, *get_args(returned)):
            if isinstance(candidate, type) and is_dataclass(candidate):
                return candidate
    raise AssertionError(f"{model_class.__name__} states the class of its outputs")


def _release_graph(logits: weakref.ref[_LateLogits], _: Tensor) -> None:
    released = logits()
    if released is not None:
        released.gather = None
