"""Detection of later batches whose microbatches have unequal numbers of labels or mask entries."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import Microbatch, tensors_in

#: Number of first batches that are always examined, and the interval of later ones (batches). The
#: interval applies only if an examination communicates or makes the host wait for a device.
_NUM_FIRST_BATCHES = 8
_INTERVAL = 16
_IGNORED = -100


@dataclass
class _Watch:
    """State of one kind of step.

    Args:
        tried: Tensors of the batch that were uneven in a batch that was tried, by path and value.
        num_batches: Number of batches so far (batches).
    """

    tried: set[tuple[str, int]] = field(default_factory=set)
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    num_batches: int = 0
    is_armed: bool = False


class UnevenMasks:
    """Batches whose microbatches are uneven for the first time.

    A batch is uneven if its microbatches have different shares of labels of -100, which torch's
    losses ignore, or of zeros in a tensor of two dimensions, which may be a mask of tokens. A mean
    over the other tokens is then not the mean of the microbatches' means. The trial of an even
    batch cannot see this.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._watches: dict[tuple[Any, ...], _Watch] = {}

    def begin(self, key: tuple[Any, ...], batch: Any, parts: Sequence[Microbatch]) -> None:
        """Record the tensors that are uneven in a batch that is tried."""
        watch = self._watches.setdefault(key, _Watch())
        watch.tried |= {
            name for name, flag in _uneven(batch, parts, frozenset()).items() if flag.item()
        }

    def is_new(self, key: tuple[Any, ...], batch: Any, parts: Sequence[Microbatch]) -> bool:
        """Return whether this batch must be tried again, the same on all ranks.

        The examination of a batch on a device, or with several data ranks, costs time. It is done
        for the first batches and then periodically, and for every batch as soon as some batch
        since the last examination was uneven.

        Communication: at examined batches, one gather of names over the data axis on the CPU.
        """
        watch = self._watches.setdefault(key, _Watch())
        data = self._mesh.data_cpu
        watch.num_batches += 1
        flags = _uneven(batch, parts, watch.tried)
        is_free = data.size == 1 and all(flag.device.type == "cpu" for flag in flags.values())
        is_due = watch.num_batches < _NUM_FIRST_BATCHES or watch.num_batches % _INTERVAL == 0
        if not (is_free or is_due or watch.is_armed):
            for name, flag in flags.items():
                watch.pending[name] = watch.pending[name] | flag if name in watch.pending else flag
            return False
        now = {name for name, flag in flags.items() if flag.item()}
        before = {name for name, flag in watch.pending.items() if flag.item()}
        watch.pending.clear()
        found_by_rank = all_gather_objects((now, before), data)
        uneven = {name for rank_uneven, _ in found_by_rank for name in rank_uneven}
        watch.is_armed = not uneven and (
            watch.is_armed or any(rank_pending for _, rank_pending in found_by_rank)
        )
        watch.tried |= uneven
        return bool(uneven)


def _uneven(
    batch: Any, parts: Sequence[Microbatch], known: Set[tuple[str, int]]
) -> dict[tuple[str, int], Tensor]:
    """Return a flag on the device for each tensor and value: whether its shares are unequal."""
    total = sum(part.num_samples for part in parts)
    flags = {}
    for path, tensor in tensors_in(batch):
        if not tensor.dim() or len(parts) < 2:
            continue
        tensor = tensor[:total]
        is_label = tensor.dtype in (torch.int32, torch.int64)
        if is_label and (path, _IGNORED) not in known:
            flags[path, _IGNORED] = _is_uneven(tensor == _IGNORED, parts)
        if tensor.dim() == 2 and (path, 0) not in known:
            flags[path, 0] = _is_uneven(tensor == 0, parts)
    return flags


def _is_uneven(marks: Tensor, parts: Sequence[Microbatch]) -> Tensor:
    """Return whether the share of True entries differs between microbatches, as a scalar tensor.

    All microbatches but the last have the same size.
    """
    size = parts[0].num_samples
    last = parts[-1].num_samples
    per_sample = marks.flatten(1).sum(1) if marks.dim() > 1 else marks.long()
    per_microbatch = per_sample[: (len(parts) - 1) * size].view(-1, size).sum(1)
    is_last_different = per_sample[-last:].sum() * size != per_microbatch[0] * last
    return (per_microbatch != per_microbatch[0]).any() | is_last_different
