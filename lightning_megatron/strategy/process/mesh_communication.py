"""Communication of Lightning and user code, over data-parallel ranks by default."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    barrier,
    broadcast_object,
    is_world,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private.processes import reduce_over_group


class MeshCommunication(ParallelStrategy):
    """Lightning's communication methods on the groups of a mesh.

    Subclasses create the mesh. Until then each rank communicates only with itself.
    """

    _mesh: ParallelMesh | None = None

    @property
    def is_in_stage(self) -> bool:
        """Return whether a step of several stages is running; stages do not run it in lockstep."""
        return False

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; inside a pipelined step, for the ranks of this stage."""
        if self._mesh is not None:
            barrier(self._mesh.data_cpu if self.is_in_stage else self._mesh.world_cpu)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a rank's object; inside a pipelined step, that of this stage's rank with its data.

        Args:
            src: Global rank of the sender. Inside a pipelined step, the sender is the rank of this
                stage with the same dp coordinate.

        Communication: one broadcast on the CPU over the world, or over the data ranks of the stage.
        """
        if self._mesh is None:
            return obj
        if self.is_in_stage:
            return broadcast_object(
                obj, self._mesh.dp_cpu, self._mesh.layout.coordinates(src)["dp"]
            )
        return broadcast_object(obj, self._mesh.world_cpu, src)

    def _axis_of(self, group: Any | None) -> MeshAxis | None:
        """Return the axis for a group, if any: the world group stands for the data axis."""
        if group is None or is_world(group):
            return self._mesh.dp if self._mesh is not None else None
        return group if isinstance(group, MeshAxis) else None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the ranks that read different data, in place, unless a group is given.

        Ranks of one tensor or pipeline group have the same value, which must count once.

        Args:
            tensor: Tensor to reduce; any other value is returned unchanged.
            group: :class:`MeshAxis` or process group. None and the world group select the data
                axis.

        Communication: one all-reduce over the axis or the group.
        """
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        axis = self._axis_of(group)
        if axis is None:
            return reduce_over_group(tensor, group, reduce_op)
        op = str(reduce_op or "sum").rpartition(".")[2].lower().replace("avg", "mean")
        if op == "mean" and not tensor.is_floating_point():
            return tensor.copy_(all_reduce_(tensor, axis, "sum") / axis.size)
        return all_reduce_(tensor, axis, op)  # type: ignore[arg-type]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._mesh is None:
            return decision
        vote = torch.tensor(int(decision))
        axis = self._mesh.data_cpu if self.is_in_stage else self._mesh.world_cpu
        return bool(all_reduce_(vote, axis, "min" if all else "max"))

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Stack a tensor over the ranks that read different data, along a new first dimension.

        The result equals that of ``ddp`` on the data ranks alone, even if only the last stage of a
        pipeline calls this method. A single process returns the tensor unchanged.

        Args:
            group: :class:`MeshAxis` or process group. None and the world group, which
                ``self.all_gather`` passes, select the data axis.

        Communication: one all-gather over the axis; one reduce-scatter in the backward pass.
        """
        if self._mesh is None or self._mesh.world.size == 1:
            return tensor
        axis = self._axis_of(group)
        if axis is None:
            return super().all_gather(tensor, group, sync_grads)
        with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
            return all_gather_sequence(tensor.unsqueeze(0), axis)
