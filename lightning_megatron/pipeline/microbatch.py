"""Cut a batch, whatever nest of containers it is, into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from lightning_megatron.errors import ParallelPlanError


@dataclass(frozen=True)
class Microbatch:
    """Hold the part of a batch that one forward pass sees.

    Args:
        data: The part, in the same containers as the batch.
        num_samples: Samples in it; its loss weighs by this (samples).
    """

    data: Any
    num_samples: int


def split_batch(batch: Any, microbatch_size: int) -> list[Microbatch]:
    """Cut every tensor of ``batch`` along its first dimension.

    Tensors, and lists or tuples of plain values, whose first dimension is the batch are cut; everything else is passed
    to every microbatch as it is. The last microbatch is smaller when the batch does not divide. A batch that is a list
    of :class:`Microbatch`, as a collate function may return, is taken as cut already.

    Args:
        batch: Any nest of tensors, mappings, sequences, named tuples and dataclasses.
        microbatch_size: Samples in a microbatch (samples).

    Raises:
        ParallelPlanError: If no tensor tells the batch's size, or two tensors disagree on it.
    """
    if isinstance(batch, Sequence) and batch and all(isinstance(part, Microbatch) for part in batch):
        return list(batch)
    sizes = {path: tensor.shape[0] for path, tensor in _tensors(batch, "batch") if tensor.dim()}
    if not sizes:
        raise ParallelPlanError(
            f"a batch must hold a tensor whose first dimension counts its samples: {type(batch).__name__} has none. "
            "Microbatches are cut along it. Return a list of Microbatch from the collate function to cut the batch "
            "yourself."
        )
    total = next(iter(sizes.values()))
    if any(size != total for size in sizes.values()):
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise ParallelPlanError(
            f"all tensors of a batch must have the same first dimension: {listed}. Microbatches are cut along it. "
            "Return a list of Microbatch from the collate function to cut such a batch yourself."
        )
    starts = range(0, total, microbatch_size)
    return [
        Microbatch(_cut(batch, start, min(start + microbatch_size, total), total), min(microbatch_size, total - start))
        for start in starts
    ]


def _tensors(node: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _tensors(value, f"{path}[{key!r}]")
    elif _is_sequence(node):
        for index, value in enumerate(node):
            yield from _tensors(value, f"{path}[{index}]")
    elif is_dataclass(node) and not isinstance(node, type):
        for item in fields(node):
            yield from _tensors(getattr(node, item.name), f"{path}.{item.name}")


def _cut(node: Any, start: int, stop: int, total: int) -> Any:
    if isinstance(node, Tensor):
        return node[start:stop] if node.dim() else node
    if isinstance(node, Mapping):
        return _rebuilt_mapping(node, lambda value: _cut(value, start, stop, total))
    if _is_sequence(node):
        if len(node) == total and not any(True for _ in _tensors(node, "")):
            return node[start:stop]
        parts = [_cut(value, start, stop, total) for value in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(
            node, **{f.name: _cut(getattr(node, f.name), start, stop, total) for f in fields(node) if f.init}
        )
    return node


def _rebuilt_mapping(node: Mapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    parts = {key: function(value) for key, value in node.items()}
    return parts if type(node) is dict else type(node)(parts)  # type: ignore[call-arg]


def _is_sequence(node: Any) -> bool:
    return isinstance(node, (list, tuple))
