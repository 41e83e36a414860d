"""Step outputs of microbatches, merged into the output of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

#: Weight of a value in a mean, in samples or tokens: a number, or a scalar on a device that the
#: host does not read.
Weight = int | float | Tensor


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that a training step returned, alone or under ``loss``."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and loss is None:
        raise ValueError(
            "a mapping that training_step returns must have the key 'loss', whose value is the "
            "loss to minimise: it has no such key. Add it."
        )
    if loss is not None and not isinstance(loss, Tensor):
        raise ValueError(
            "training_step must return the loss as a tensor, a mapping with the key 'loss', or "
            f"None: it is a {type(loss).__name__}. Return one of these."
        )
    return loss


def token_count_in(output: Any) -> Weight | None:
    """Return a step's token count, from ``num_tokens`` in its output; None without one.

    Returns:
        A number, read from the tensor if that is on the CPU; for a tensor on another device, a
        scalar tensor that stays there.
    """
    count = output.get("num_tokens") if isinstance(output, Mapping) else None
    if count is None:
        return None
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.detach().reshape(())
        if count.device.type != "cpu":
            return count
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count < math.inf:
        shown = tuple(count.shape) if isinstance(count, Tensor) else repr(count)
        raise ValueError(
            "num_tokens must be a number of tokens or a tensor with one element, 0 or more: "
            f"{shown}. It is the weight of the microbatch's loss. Return the number of labels in "
            "the mean, such as (labels != -100).sum()."
        )
    return count


def token_counts_in(outputs: Sequence[Any]) -> list[Weight] | None:
    """Return the token counts of all microbatches, 0 for a skipped one; None without counts.

    Args:
        outputs: Outputs of the step, one per microbatch; None for a skipped microbatch.
    """
    counts = [token_count_in(output) for output in outputs]
    missing = [
        number
        for number, count in enumerate(counts)
        if count is None and outputs[number] is not None
    ]
    if all(count is None for count in counts):
        return None
    if missing:
        raise ValueError(
            "a step must return num_tokens for every microbatch or for none: it is missing for "
            f"{len(missing)} of {len(outputs)}, first for microbatch {missing[0]}. Means over "
            "tokens and over samples cannot be mixed. Return 0 for a microbatch without a valid "
            "token."
        )
    return [0 if count is None else count for count in counts]


def total_weight(weights: Sequence[Weight]) -> Weight:
    """Sum weights to a number, or to a float64 scalar tensor without a host synchronisation."""
    return (
        stack_scalars(weights).sum()
        if any(isinstance(weight, Tensor) for weight in weights)
        else sum(weights)
    )


def stack_scalars(values: Sequence[Weight]) -> Tensor:
    """Stack scalars in float64, on their device if any, without a host synchronisation.

    Shapes: ``(values,)``.
    """
    devices = [
        value.device for value in values if isinstance(value, Tensor) and value.device.type != "cpu"
    ]
    device = devices[0] if devices else torch.device("cpu")
    return torch.stack([scalar_on(value, device) for value in values])


def scalar_on(value: Weight, device: torch.device) -> Tensor:
    """Return a float64 scalar on the device, without a host synchronisation."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or device.type == "cpu"):
        return value.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.full(
        (), value.item() if isinstance(value, Tensor) else value, dtype=torch.float64, device=device
    )


def weighted_mean(values: Tensor, weights: Sequence[Weight]) -> Tensor:
    """Average one value of each microbatch, without a host synchronisation.

    A value of weight 0 is ignored, even if it is NaN. Without any weight the mean is 0.

    Shapes: values ``(microbatches,)``, floating point; result ``()``.
    """
    if any(isinstance(weight, Tensor) for weight in weights):
        vector = torch.stack([scalar_on(weight, values.device) for weight in weights])
        total = vector.sum()
        return torch.where(vector > 0, values * vector, 0.0).sum() / torch.where(
            total > 0, total, 1.0
        )
    if len(set(weights)) == 1 and weights[0]:
        return values.mean()
    # A weight tensor would need a copy to the device, for which the host waits.
    weighted = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    return torch.stack(weighted).sum() / sum(weights) if weighted else values.new_zeros(())


def merge_outputs(outputs: Sequence[Any], weights: Sequence[Weight]) -> Any:
    """Merge the step outputs of all microbatches.

    Scalars are averaged over samples or tokens. Tensors and lists with one entry per sample are
    concatenated. Mappings and tuples are merged entry by entry. Equal values are returned once.
    Anything else becomes a list with one entry per microbatch.

    Args:
        outputs: Outputs of the microbatches, in order.
    """
    if not outputs:
        return None
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, weights)
    if all(isinstance(output, Mapping) and output.keys() == first.keys() for output in outputs):
        return {key: merge_outputs(list(map(itemgetter(key), outputs)), weights) for key in first}
    if all(isinstance(output, list) for output in outputs):
        return [item for output in outputs for item in output]
    if all(isinstance(output, tuple) and len(output) == len(first) for output in outputs):
        parts = [merge_outputs(column, weights) for column in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    plain = all(output is None or isinstance(output, (str, int, float, bool)) for output in outputs)
    return first if plain and all(output == first for output in outputs) else list(outputs)


def _merge_tensors(tensors: Sequence[Tensor], weights: Sequence[Weight]) -> Any:
    first = tensors[0]
    if all(tensor.dim() == 0 for tensor in tensors):
        merged = weighted_mean(torch.stack(list(tensors)).double(), weights)
        return merged.to(first.dtype if first.is_floating_point() else torch.float32)
    if all(tensor.dim() and tensor.shape[1:] == first.shape[1:] for tensor in tensors):
        return torch.cat(list(tensors))
    return list(tensors)
