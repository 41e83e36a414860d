"""What the microbatches of a batch returned, joined as if the batch had been one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that a training step returned, alone or under ``loss``.

    Raises:
        ValueError: If the step returned something else.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and loss is None:
        raise ValueError(
            "training_step returned a mapping without the key 'loss'. Add it: its value is the loss to minimise."
        )
    if loss is not None and not isinstance(loss, Tensor):
        raise ValueError(
            "training_step must return the loss as a tensor, a mapping with the key 'loss', or None: "
            f"{type(loss).__name__}."
        )
    return loss


def weighted_mean(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Average one value of each microbatch over the samples; the host does not wait for the device.

    Shapes: values ``(microbatches,)``, floating point; result ``()``.

    Args:
        values: One for each microbatch.
        sizes: Samples in each microbatch (samples).
    """
    if len(set(sizes)) == 1:
        return values.mean()
    # Weights in a tensor would be copied to the device, and the host waits for such a copy.
    weighted = [value * size for value, size in zip(values, sizes, strict=True)]
    return torch.stack(weighted).sum() / sum(sizes)


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join what a step returned for every microbatch.

    Scalars are averaged over the samples; tensors and lists with one entry for each sample are joined; mappings and
    tuples entry by entry; equal values are returned once. Anything else becomes a list with one entry for each
    microbatch.

    Args:
        outputs: One for each microbatch, in order.
        sizes: Samples in each microbatch (samples).
    """
    if not outputs:
        return None
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes)
    if all(isinstance(output, Mapping) and output.keys() == first.keys() for output in outputs):
        return {key: merge_outputs([output[key] for output in outputs], sizes) for key in first}
    if all(isinstance(output, list) for output in outputs):
        return [item for output in outputs for item in output]
    if all(isinstance(output, tuple) and len(output) == len(first) for output in outputs):
        parts = [merge_outputs(column, sizes) for column in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    plain = all(output is None or isinstance(output, (str, int, float, bool)) for output in outputs)
    return first if plain and all(output == first for output in outputs) else list(outputs)


def _merge_tensors(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    first = tensors[0]
    if all(tensor.dim() == 0 for tensor in tensors):
        merged = weighted_mean(torch.stack(list(tensors)).double(), sizes)
        return merged.to(first.dtype if first.is_floating_point() else torch.float32)
    if all(tensor.dim() and tensor.shape[1:] == first.shape[1:] for tensor in tensors):
        return torch.cat(list(tensors))
    return list(tensors)
