"""Keys of graphs: the kind of a step, and everything about a chunk's call that graphs assume."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatron.graphs.values import TENSOR, flatten

#: Shape, strides, dtype and ``requires_grad`` of a tensor.
_Described = tuple[tuple[int, ...], tuple[int, ...], str, bool]


@dataclass(frozen=True)
class PassMode:
    """Mode in which a chunk runs, which decides what it draws and what it keeps.

    Args:
        is_training: Whether the model is in training mode.
    """

    is_training: bool
    has_backward: bool


@dataclass(frozen=True)
class ChunkKey:
    """Key of a chunk's graphs: calls with equal keys differ only in the values of tensors.

    Args:
        mode: Mode of the call.
        inputs: Names of the inputs, each with the form of its nest and with its tensors.
    """

    mode: PassMode
    inputs: tuple[tuple[str, Hashable, tuple[_Described, ...]], ...]

    @classmethod
    def of(cls, mode: PassMode, inputs: Mapping[str, Any]) -> ChunkKey:
        """Return the key of a call.

        Args:
            mode: Mode of the call.
        """
        return cls(mode, tuple(_input(name, value) for name, value in inputs.items()))

    def difference_from(self, other: ChunkKey) -> tuple[str, str]:
        """Return the first input that differs from another key, and what that key has, in words.

        Args:
            other: Key of the captured graphs.
        """
        for (name, form, tensors), (_, other_form, others) in zip(
            self.inputs, other.inputs, strict=True
        ):
            if form != other_form:
                return f"microbatch {name} {_words(form)}", f"captured for {_words(other_form)}"
            for tensor, captured in zip(tensors, others, strict=True):
                if tensor != captured:
                    current, earlier = _compared(tensor, captured)
                    return (
                        f"microbatch {name} {current}",
                        f"captured for {earlier}",
                    )
        words = {True: "training mode", False: "evaluation mode"}
        captured_in = words[other.mode.is_training]
        return f"a model in {words[self.mode.is_training]}", f"captured in {captured_in}"


def _input(name: str, value: Any) -> tuple[str, Hashable, tuple[_Described, ...]]:
    flat = flatten(value)
    return name, flat.form, tuple(_described(tensor) for tensor in flat.tensors)


def _described(tensor: Tensor) -> _Described:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad


def _compared(tensor: _Described, captured: _Described) -> tuple[str, str]:
    """Describe two tensors in as many words as show their difference."""
    names = ("", " with strides", "", " with requires_grad")
    place = next(place for place in (0, 2, 1, 3) if tensor[place] != captured[place])
    if place == 0:
        return str(tensor[0]), str(captured[0])
    return (
        f"{tensor[0]}{names[place]} {tensor[place]}",
        f"{captured[0]}{names[place]} {captured[place]}",
    )


def _words(form: Hashable) -> str:
    """Describe the form of a nest in words, such as the value of a plain one."""
    if form is None or form == TENSOR:
        return "None" if form is None else "a tensor"
    if isinstance(form, tuple) and len(form) == 2:
        return repr(form[1])[:80]
    return "another nest"


@dataclass(frozen=True)
class StepKind:
    """Kind of the steps of a run.

    Each kind has eager steps of its own before its capture, and shapes of its own.

    Args:
        name: Name of the step, with the index of the dataloader if there are several.
    """

    name: str
    has_backward: bool = False


#: Kind of the training steps.
TRAINING = StepKind("training_step", has_backward=True)
