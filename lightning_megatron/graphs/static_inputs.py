"""Inputs of a captured step: microbatches in tensors that keep their addresses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.nest import leaves, rebuild
from lightning_megatron.pipeline.microbatch import Microbatch, copy_containers

#: Types of values that are part of the form of a microbatch, because a graph repeats what Python
#: computed from them.
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


@dataclass(frozen=True)
class BatchForm:
    """Everything about the microbatches of a step that a graph of the step assumes.

    Two steps with equal forms differ only in the values of tensors. The text of a form is the same
    on all ranks with equal microbatches.

    Args:
        parts: Number of samples of each microbatch, and its leaves: path, then shape, strides,
            dtype and index among the distinct tensors, or a plain value.
    """

    parts: tuple[tuple[int, tuple[tuple[str, Hashable], ...]], ...]

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch]) -> BatchForm:
        """Return the form of the microbatches of a step."""
        order: dict[int, int] = {}
        parts = []
        for part in microbatches:
            values: list[tuple[str, Hashable]] = []
            for path, leaf in leaves(part.data):
                if isinstance(leaf, Tensor):
                    index = order.setdefault(id(leaf), len(order))
                    values.append((path, (*_described(leaf), index)))
                else:
                    values.append((path, f"{type(leaf).__name__} {leaf!r}"))
            parts.append((part.num_samples, tuple(values)))
        return cls(tuple(parts))

    def difference_from(self, other: BatchForm) -> str:
        """Return the first difference from another form, in words."""
        if len(self.parts) != len(other.parts):
            return f"{len(self.parts)} microbatches, captured for {len(other.parts)}"
        for (samples, values), (other_samples, other_values) in zip(
            self.parts, other.parts, strict=True
        ):
            for (path, leaf), (other_path, other_leaf) in zip(values, other_values, strict=False):
                if path != other_path:
                    return f"microbatch with {path!r}, captured with {other_path!r} in its place"
                if leaf != other_leaf:
                    return f"microbatch{_name_of(path)} {_compared(leaf, other_leaf)}"
            if len(values) != len(other_values) or samples != other_samples:
                return (
                    f"microbatch of {samples} samples in {len(values)} values, captured for "
                    f"{other_samples} in {len(other_values)}"
                )
        return "the same microbatches"


def reason_against(microbatches: Sequence[Microbatch], device: torch.device) -> str | None:
    """Return why a graph cannot process some microbatches; None if it can.

    Args:
        microbatches: Microbatches of a step.
        device: Device of the graphs.
    """
    for part in microbatches:
        for path, leaf in leaves(part.data):
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    return (
                        f"microbatch{path} is a {type(leaf).__name__}, whose values a graph would "
                        "keep as they were at the capture; give tensors"
                    )
            elif type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return f"microbatch{path} is a {type(leaf).__name__} with layout {leaf.layout}"
            elif leaf.requires_grad:
                return f"microbatch{path} needs a gradient, which a graph would not return"
            elif leaf.device.type != device.type:
                return (
                    f"microbatch{path} is on {leaf.device}, and Python would read it at the "
                    f"capture only; move it to {device}"
                )
    return None


class StaticInputs:
    """Copy of a step's microbatches, whose tensors are overwritten before each replay.

    Args:
        microbatches: Microbatches of the step that is captured.
    """

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        # Validation may be captured first, and tensors of its inference mode cannot be written
        # later.
        with torch.inference_mode(False), torch.no_grad():
            copies = {id(tensor): tensor.detach().clone() for tensor in _distinct(microbatches)}
        self._tensors = list(copies.values())
        self._parts = [
            Microbatch(_with_tensors(part.data, copies), part.num_samples) for part in microbatches
        ]
        self._groups = _by_dtype(self._tensors)

    @property
    def microbatches(self) -> list[Microbatch]:
        """Return the microbatches in new containers, from which a step may remove entries."""
        return [Microbatch(copy_containers(part.data), part.num_samples) for part in self._parts]

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors (bytes)."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.no_grad()
    def fill(self, microbatches: Sequence[Microbatch]) -> None:
        """Copy the tensors of microbatches of the same form."""
        given = list(_distinct(microbatches))
        for group in self._groups:
            targets = [self._tensors[index] for index in group]
            sources = [given[index] for index in group]
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _with_tensors(node: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return a nest with other tensors, given by the identities of its own."""
    if isinstance(node, Tensor):
        return tensors[id(node)]
    return rebuild(node, lambda value: _with_tensors(value, tensors))


def _distinct(microbatches: Sequence[Microbatch]) -> Iterator[Tensor]:
    """Yield each tensor once, in the order of the leaves."""
    visited = set()
    for part in microbatches:
        for _, leaf in leaves(part.data):
            if isinstance(leaf, Tensor) and id(leaf) not in visited:
                visited.add(id(leaf))
                yield leaf


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each dtype, which one launch can copy."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _described(tensor: Tensor) -> tuple[Hashable, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), str(tensor.dtype), tuple(strides)


def _name_of(path: str) -> str:
    """Return the path of a leaf in a microbatch; of an entry of a mapping its name alone."""
    name = path.removeprefix("['").removesuffix("']")
    return f" {name}" if name.isidentifier() else path


def _compared(leaf: Hashable, captured: Hashable) -> str:
    if not isinstance(leaf, tuple) or not isinstance(captured, tuple):
        return f"{_shown(leaf)}, captured for {_shown(captured)}"
    if leaf[0] != captured[0]:
        return f"{leaf[0]}, captured for {captured[0]}"
    return (
        f"{leaf[0]} {leaf[1]} with strides {leaf[2]}, captured for {captured[1]} with {captured[2]}"
    )


def _shown(leaf: Hashable) -> str:
    return str(leaf[0] if isinstance(leaf, tuple) else leaf)[:80]
