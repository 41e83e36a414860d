"""Buffers of the user's modules, synchronised over data ranks; averages and metrics, with methods
that a run replaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, broadcast_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private.loops import replace_method


class SharedBuffers:
    """Synchronisation of buffers from the first data rank, like DDP's ``broadcast_buffers``.

    Buffers that forward passes change are sent again after every optimizer step. Buffers that never
    change are sent once. Buffers of this package's modules are the same on all ranks and are never
    sent. The ranks compare which buffers have changed before batches 0, 1, 3, 7, 15 and so on, and
    before evaluations and saves. A buffer that starts to change in between may differ between ranks
    until the next comparison. A module without buffers causes no communication.

    Args:
        mesh: The groups of this rank; buffers are synchronised over ``mesh.data``.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._owners = _owners(module) if mesh.data.size > 1 else []
        self._num_sends = 0
        self._last_marks = self._marks()
        self._moving: set[int] = set()
        # ``_may_differ``: a forward pass may have changed buffers since they were last sent.
        # ``_has_stepped``: the optimizer has stepped after that forward pass.
        self._may_differ = True
        self._has_stepped = True

    def begin_batch(self, will_step: bool) -> None:
        """Send buffers before the first training batch after an optimizer step, as ``ddp`` does.

        Args:
            will_step: Whether the optimizer steps after this batch.
        """
        if self._has_stepped:
            self.share()
        self._may_differ = True
        self._has_stepped = will_step

    def share(self, *, look: bool = False) -> None:
        """Send the first data rank's buffers if a forward pass may have changed them; a collective.

        Communication: one broadcast over the data axis for each dtype of buffers; one gather of
        objects on the CPU when the ranks compare.
        """
        if not self._owners or not self._may_differ:
            return
        if look or (self._num_sends + 1).bit_count() == 1:
            self._find_changes()
        buffers = [
            owner._buffers[key]
            for index, (owner, key) in enumerate(self._owners)
            if self._is_sent(index)
        ]
        self._send(buffer for buffer in buffers if buffer is not None)
        if self._num_sends == 0:
            self._last_marks = self._marks()
        self._num_sends += 1
        self._may_differ = False

    def _is_sent(self, index: int) -> bool:
        owner, key = self._owners[index]
        # Every rank computes non-persistent buffers itself, so they need no first broadcast.
        return index in self._moving or (
            self._num_sends == 0 and key not in owner._non_persistent_buffers_set
        )

    def _find_changes(self) -> None:
        previous_marks = self._last_marks
        self._last_marks = self._marks()
        changed = [
            index for index, mark in enumerate(self._last_marks) if mark != previous_marks[index]
        ]
        for names in all_gather_objects(changed, self._mesh.data_cpu):
            self._moving.update(names)

    def _marks(self) -> list[tuple[int, float]]:
        """Return a fingerprint of the buffers that changes with every replacement or write."""
        buffers = [owner._buffers[key] for owner, key in self._owners]
        if not buffers:
            return []
        sums = [
            torch.zeros(()).double() if buffer is None else buffer.detach().double().sum().cpu()
            for buffer in buffers
        ]
        return list(zip(map(id, buffers), torch.stack(sums).nan_to_num().tolist(), strict=True))

    @torch.no_grad()
    def _send(self, buffers: Iterable[Tensor]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for group in by_type.values():
            flat = broadcast_(torch.cat([buffer.reshape(-1) for buffer in group]), self._mesh.data)
            parts = flat.split([buffer.numel() for buffer in group])
            for buffer, part in zip(group, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


def _owners(module: nn.Module) -> list[tuple[nn.Module, str]]:
    package = __name__.partition(".")[0]
    owners = [
        part
        for part in module.modules()
        if type(part).__module__.partition(".")[0] != package and not isinstance(part, Metric)
    ]
    return [
        (part, key)
        for part in owners
        for key, buffer in part._buffers.items()
        if buffer is not None
    ]


class BatchStatistics:
    """Batch and instance norms of a module whose statistics need the whole batch."""

    def __init__(self, module: nn.Module) -> None:
        named = module.named_modules()
        self._norms = [
            (name, part) for name, part in named if isinstance(part, (_BatchNorm, _InstanceNorm))
        ]

    def check(self, num_microbatches: int) -> None:
        """Refuse microbatches if a norm needs the whole batch.

        Args:
            num_microbatches: Number of microbatches in a batch (microbatches).
        """
        if num_microbatches == 1:
            return
        names = [name for name, norm in self._norms if _takes_statistics(norm)]
        if names:
            raise UnsupportedError(
                f"batch statistics need the whole batch, which is cut into {num_microbatches} "
                f"microbatches: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''} "
                "would use the statistics of each microbatch. Use microbatch_size='batch', call "
                "eval() on these norms in the train() of the module, use norms without batch "
                "statistics such as GroupNorm, or use job.check_microbatches=False if statistics "
                "of microbatches are intended."
            )


def _takes_statistics(norm: nn.Module) -> bool:
    tracks = getattr(norm, "running_mean", None) is not None
    if isinstance(norm, _BatchNorm):
        return norm.training or not tracks
    # An instance norm normalises each sample alone. Only its running means depend on the batch.
    return norm.training and tracks


def check_synchronised_norms(module: nn.Module, mesh: ParallelMesh) -> None:
    """Refuse a SyncBatchNorm over all ranks if some share data or run another stage."""
    if mesh.data.size == mesh.world.size:
        return
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
            raise UnsupportedError(
                f"a SyncBatchNorm over all {mesh.world.size} ranks needs tp=1 and pp=1: with tp "
                f"({mesh.tp.size}) and pp ({mesh.pp.size}) {name!r} would count each sample once "
                "for each rank of tp, and would wait for stages that do not have this norm. Use "
                "BatchNorm, or convert_sync_batchnorm(..., "
                "process_group=self.device_mesh.data.group) in configure_model."
            )


def check_averages(module: nn.Module, undo: ExitStack) -> None:
    """Let every ``AveragedModel`` compare its weights with those that it averages.

    Torch pairs them in their order, so that it would average wrong ones or none.
    """
    for name, part in module.named_modules():
        if isinstance(part, AveragedModel):
            replace_method(undo, part, "update_parameters", partial(_update, name, part))


def _update(name: str, average: AveragedModel, model: nn.Module) -> None:
    shapes = _shapes(average.module)
    averaged = _shapes(model)
    if shapes != averaged:
        raise UnsupportedError(
            f"the AveragedModel {name!r} cannot average this module with tp or pp above 1: on this "
            f"rank the average has weights of the shapes {shapes}, and the module {averaged}. They "
            f"were divided in different ways. Give {f'{name}.module'!r} the kinds of the module in "
            "tensor_parallel_plan and pipeline_plan ('first' or 'last'), or use Lightning's "
            "EMAWeightAveraging callback, which averages the whole module."
        )
    type(average).update_parameters(average, model)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in module.parameters() if not weight.is_meta]


def reduce_metrics_over_data(module: nn.Module, mesh: ParallelMesh, undo: ExitStack) -> None:
    """Let torchmetrics reduce over the data ranks until ``undo`` is closed.

    A sum over all ranks would also count the copies on tensor, context and pipeline ranks. A metric
    with its own process group keeps it.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            undo.callback(setattr, metric, "process_group", None)
            metric.process_group = mesh.dp.group
            if mesh.dp.size == 1:
                # Without a group torchmetrics would reduce over all ranks.
                available = metric.distributed_available_fn
                undo.callback(setattr, metric, "distributed_available_fn", available)
                metric.distributed_available_fn = _never


def _never() -> bool:
    return False
