"""Division of a batch, which may be a nest of any containers, into microbatches, and its number of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.nest import leaves, rebuild

_REMEDY = (
    "Use microbatch_size='batch' to keep the batch whole, or return a list of Microbatch from the "
    "collate function."
)


@dataclass(frozen=True)
class Microbatch:
    """Part of a batch that one forward pass processes.

    Args:
        data: Part of the batch, in the same containers.
        num_samples: Number of samples in the part, by which its loss is weighted (samples).
    """

    data: Any
    num_samples: int


def is_cut(batch: Any) -> bool:
    """Return whether a batch is already a list of :class:`Microbatch`, from a collate function."""
    return (
        isinstance(batch, Sequence)
        and bool(batch)
        and all(isinstance(part, Microbatch) for part in batch)
    )


def split_batch(batch: Any, microbatch_size: int | Callable[[int], int] | None) -> list[Microbatch]:
    """Cut every tensor of ``batch`` along its first dimension.

    Tensors, arrays, and lists or tuples of plain values are cut if their first dimension is the
    batch. All other values are passed to every microbatch unchanged. The last microbatch is smaller
    if the batch does not divide evenly. A batch that fits into one microbatch is not copied. A list
    of :class:`Microbatch` is returned as it is.

    Args:
        batch: Nest of tensors, mappings, sequences, named tuples and dataclasses.
        microbatch_size: Samples in a microbatch, or a function that computes it from the samples of
            the batch; None leaves the batch whole (samples).

    Raises:
        ParallelPlanError: If the batch must be cut and has no tensor, or two tensors differ in
            size.
    """
    if is_cut(batch):
        return list(batch)
    if microbatch_size is None:
        return [Microbatch(batch, count_samples(batch))]
    total = _agreed_size(batch)
    size = microbatch_size(total) if callable(microbatch_size) else microbatch_size
    if size >= total:
        return [Microbatch(batch, total)]
    parts = [range(start, min(start + size, total)) for start in range(0, total, size)]
    return [Microbatch(_cut(batch, part.start, part.stop, total), len(part)) for part in parts]


def join_parts(
    batch: Any, microbatches: Sequence[Microbatch], groups: Sequence[range]
) -> list[Microbatch]:
    """Join each group of consecutive microbatches into one microbatch.

    Args:
        batch: Batch that was cut; not a list of :class:`Microbatch`, whose parts cannot be joined.
        microbatches: First microbatches of the batch.
        groups: Ranges of the microbatches to join.
    """
    total = _agreed_size(batch)
    joined = []
    for group in groups:
        start = sum(part.num_samples for part in microbatches[: group.start])
        num_samples = sum(microbatches[number].num_samples for number in group)
        data = batch if num_samples == total else _cut(batch, start, start + num_samples, total)
        joined.append(Microbatch(data, num_samples))
    return joined


def tensors_in(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with their paths, such as ``batch['labels']``."""
    return [(path, leaf) for path, leaf in leaves(batch, "batch") if isinstance(leaf, Tensor)]


def count_ignored(batch: Any) -> int:
    """Count the integers of a batch that are -100, the label that torch's losses ignore."""
    integers = (torch.int32, torch.int64)
    tensors = [tensor for _, tensor in tensors_in(batch) if tensor.dtype in integers]
    return sum(int((tensor == -100).sum()) for tensor in tensors)


def count_samples(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor; 1 for a scalar or without a tensor."""
    leaf = next((leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    return 1 if leaf is None or leaf.dim() == 0 else leaf.shape[0]


def copy_containers(batch: Any) -> Any:
    """Copy the containers of a batch, but not its tensors, so that a step may modify the copy."""
    return rebuild(batch, copy_containers)


def copy_batch(batch: Any) -> Any:
    """Copy a batch with its tensors and arrays, so that a step may write into the copy.

    A tensor that occurs twice is one tensor in the copy, too.
    """
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, (Tensor, np.ndarray)):
            return rebuild(value, copy)
        if id(value) not in copies:
            copies[id(value)] = value.copy() if isinstance(value, np.ndarray) else _clone(value)
        return copies[id(value)]

    return copy(batch)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _agreed_size(batch: Any) -> int:
    sizes = {path: tensor.shape[0] for path, tensor in tensors_in(batch) if tensor.dim()}
    if not sizes:
        raise ParallelPlanError(
            "a batch must hold a tensor whose first dimension counts its samples: "
            f"{type(batch).__name__} has none. Microbatches are cut along this dimension. "
            f"{_REMEDY}"
        )
    total = next(iter(sizes.values()))
    if any(size != total for size in sizes.values()):
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise ParallelPlanError(
            f"all tensors of a batch must have the same first dimension: {listed}. Microbatches "
            "are cut along this dimension, so it must count samples, not time steps or classes. "
            f"{_REMEDY}"
        )
    return total


def _cut(node: Any, start: int, stop: int, total: int) -> Any:
    if isinstance(node, Tensor):
        return node[start:stop] if node.dim() else node
    if isinstance(node, np.ndarray):
        return node[start:stop] if node.ndim and len(node) == total else node
    if _is_one_per_sample(node, total):
        return node[start:stop]
    return rebuild(node, lambda value: _cut(value, start, stop, total))


def _is_one_per_sample(node: Any, total: int) -> bool:
    """Return whether a list or tuple has one plain value, such as a string, for every sample."""
    is_list = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
    return is_list and len(node) == total and not tensors_in(node)


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch, from its first integer tensor of two dimensions.

    Returns:
        The number of tokens, or 0 if the batch has no such tensor.
    """
    if isinstance(batch, torch.Tensor):
        return batch.numel() if batch.ndim >= 2 and not batch.is_floating_point() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return next((tokens for item in batch if (tokens := count_tokens(item))), 0)
    return 0
