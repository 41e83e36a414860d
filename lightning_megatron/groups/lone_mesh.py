"""Mesh of one rank whose other ranks do not exist, for passes over tensors without elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron.groups.axis import CollectiveLauncher, MeshAxis, Work
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.mesh import ParallelMesh, random_streams
from lightning_megatron.groups.mesh_groups import groups_of_rank
from lightning_megatron.groups.peer_memory import PeerMemory, PeerRegion, PeerUse
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import LossChunk


class _Complete:
    """Collective that is complete at once."""

    def __init__(self, note_wait: Callable[[], None]) -> None:
        self._note_wait = note_wait

    def wait(self) -> None:
        """Note the wait, though nothing is in flight."""
        self._note_wait()

    def is_completed(self) -> bool:
        return True


class LeftOut:
    """Recorder that runs no collective, so that their results keep the memory they were given.

    Args:
        journal: Journal of all axes, which notes each collective just before it starts.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        #: Function that gets kind and axis of each collective, number of an asynchronous one or 0,
        #: and what it writes; and "wait" with the number of the awaited one.
        self.listener: Callable[[str, str, int, Sequence[Tensor]], None] = lambda *_: None
        self._started = 0

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Leave out a collective."""
        self._tell(0, written)

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        """Leave out an asynchronous collective."""
        self._started += 1
        axis = self._tell(self._started, written)
        return _Complete(partial(self.listener, "wait", axis, self._started, ()))

    def _tell(self, number: int, written: Sequence[Tensor]) -> str:
        call = self._journal.last
        assert call is not None, "a collective is noted before it starts"
        axis = call.axis.split()[0]
        self.listener(call.kind, axis, number, written)
        return axis


class _OwnMemory(PeerMemory):
    """Symmetric memory of which only this rank's buffer exists."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @override
    def reason_unavailable(
        self, group: Any, device: torch.device, missing: str | None = None
    ) -> str | None:
        return f"ranks are on {device.type}" if device.type != "cuda" else None

    @override
    def _grow(self, group: Any, num_bytes: int, device: torch.device, use: PeerUse) -> PeerRegion:
        pointers = torch.empty(self._num_ranks, dtype=torch.int64, device=device)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._regions[use] = PeerRegion(memory, pointers)
        return self._regions[use]


def functions_of_groups(device: torch.device) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return functions of torch with which the groups of a lone mesh work, by owner and name."""
    backend = "nccl" if device.type == "cuda" else "gloo"

    def get_backend(group: object) -> str:
        return backend

    return [
        (dist, "get_backend", get_backend),
        (dist, "all_gather_object", _gather_own),
        (dist, "P2POp", _transfer),
    ]


def _gather_own(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _transfer(operation: Any, tensor: Tensor, *_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(tensor=tensor)


def lone_mesh(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    *,
    sequence_parallel: bool = False,
    context: ContextLinks | None = None,
    loss_chunk: LossChunk = None,
) -> ParallelMesh:
    """Return the mesh of a rank without any process group; its collectives do nothing.

    The results of collectives have their shapes, and no values: use it only for passes over tensors
    without elements.
    """
    launcher = CollectiveLauncher()
    journal = Journal()
    launcher.recorder = LeftOut(journal)
    # With a group layers call their collectives; those of Python objects need none.
    group: Any = object()
    axes: dict[str, Any] = {}
    for name, ranks in groups_of_rank(layout, rank).items():
        axes[name] = MeshAxis(
            name,
            ranks,
            ranks.index(rank),
            group if len(ranks) > 1 and not name.endswith("_cpu") else None,
            journal,
            launcher,
            peer_memory=_OwnMemory(len(ranks)),
        )
    return ParallelMesh(
        layout,
        rank,
        device,
        random_streams(layout, rank, 0, torch.device("cpu")),
        sequence_parallel and layout.tp > 1,
        **axes,
        context=context or ContextLinks(),
        loss_chunk=loss_chunk,
        launcher=launcher,
    )
