"""Keys of graphs: everything about the inputs of a chunk or of a step that graphs assume."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.nest import children
from lightning_megatron.pipeline.microbatch import Microbatch

#: Kind of the training steps. Other kinds are the names of steps, with the index of the dataloader
#: if there are several. Each kind has eager steps of its own before its capture, and shapes of its
#: own.
TRAINING = "training_step"
#: Leaves of a nest: path, then a plain value in words, or shape, dtype, strides and
#: ``requires_grad`` of a tensor with its index among the distinct tensors.
Described = tuple[tuple[str, Hashable], ...]
#: What is new and what was captured, in words.
Difference = tuple[str, str]


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
        inputs: The inputs by name.
    """

    mode: PassMode
    inputs: Described

    @classmethod
    def of(cls, mode: PassMode, inputs: Mapping[str, Any]) -> ChunkKey:
        """Return the key of a call.

        Args:
            mode: Mode of the call.
        """
        return cls(mode, _described(inputs, {}))

    def difference_from(self, other: ChunkKey) -> Difference:
        """Return the first input that differs from another key, and what that key has.

        Args:
            other: Key of the captured graphs.
        """
        words = {True: "training mode", False: "evaluation mode"}
        return _difference(self.inputs, other.inputs) or (
            f"a model in {words[self.mode.is_training]}",
            f"captured in {words[other.mode.is_training]}",
        )


@dataclass(frozen=True)
class BatchForm:
    """Everything about the microbatches of a step that a graph of the step assumes.

    Two steps with equal forms differ only in the values of tensors. The text of a form is the same
    on all ranks with equal microbatches.

    Args:
        parts: Number of samples of each microbatch, and its leaves.
    """

    parts: tuple[tuple[int, Described], ...]

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch]) -> BatchForm:
        """Return the form of the microbatches of a step."""
        order: dict[int, int] = {}
        return cls(tuple((part.num_samples, _described(part.data, order)) for part in microbatches))

    def difference_from(self, other: BatchForm) -> Difference:
        """Return the first difference from another form."""
        if len(self.parts) != len(other.parts):
            return f"{len(self.parts)} microbatches", f"captured for {len(other.parts)}"
        for (samples, values), (captured, captured_values) in zip(
            self.parts, other.parts, strict=True
        ):
            found = _difference(values, captured_values)
            if found is not None:
                return found
            if samples != captured:
                return f"microbatch of {samples} samples", f"captured for {captured}"
        return "the same microbatches", "captured"


def _described(nest: Any, order: dict[int, int]) -> Described:
    """Describe the leaves of a nest; ``order`` has the indices of the distinct tensors so far."""
    found: list[tuple[str, Hashable]] = []
    _add_leaves(nest, "", order, found)
    return tuple(found)


def _add_leaves(
    node: Any, path: str, order: dict[int, int], found: list[tuple[str, Hashable]]
) -> None:
    # Each microbatch of each step comes here: most leaves are of the first two kinds.
    if node is None:
        found.append((path, "None"))
    elif isinstance(node, Tensor):
        index = order.setdefault(id(node), len(order))
        strides = node.stride() if node.layout == torch.strided else ()
        found.append((path, (node.shape, node.dtype, strides, node.requires_grad, index)))
    elif isinstance(node, bool | int | float | str) or (parts := children(node)) is None:
        found.append((path, f"{type(node).__name__} {node!r}"))
    else:
        for suffix, value in parts:
            _add_leaves(value, path + suffix, order, found)


def _difference(now: Described, captured: Described) -> Difference | None:
    for (path, leaf), (other_path, other) in zip(now, captured, strict=False):
        if path != other_path:
            return f"microbatch with {path!r}", f"captured with {other_path!r} in its place"
        if leaf != other:
            name = path.removeprefix("['").removesuffix("']")
            place = f" {name}" if name.isidentifier() else path
            current, earlier = _compared(leaf, other)
            return f"microbatch{place} {current}", f"captured for {earlier}"
    if len(now) != len(captured):
        return f"microbatch of {len(now)} values", f"captured for {len(captured)}"
    return None


def _compared(leaf: Hashable, captured: Hashable) -> tuple[str, str]:
    """Describe two leaves in as many words as show their difference."""
    if not isinstance(leaf, tuple) or not isinstance(captured, tuple):
        return _shown(leaf), _shown(captured)
    place = next(place for place, value in enumerate(leaf) if value != captured[place])
    if place == 0:
        return _shown(leaf), _shown(captured)
    name = ("", "", " with strides", " with requires_grad", " as distinct tensor")[place]
    return f"{_shown(leaf)}{name} {leaf[place]}", f"{_shown(captured)}{name} {captured[place]}"


def _shown(leaf: Hashable) -> str:
    return str(tuple(leaf[0])) if isinstance(leaf, tuple) else str(leaf)[:80]
