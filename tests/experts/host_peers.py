"""Host memory that processes share by one file for each rank, in place of symmetric GPU memory.

With Triton's interpreter the kernels of one-sided puts then write into the memory of other
processes, and the layers around them run as they do on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.experts.compute import grouped_linear
from lightning_megatron.experts.transport import choose_transport
from lightning_megatron.experts.transport.peer_transfer import Puts
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.peer_memory import PeerMemory, PeerRegion, PeerUse


@dataclass(frozen=True)
class HostBarrier:
    """Stand-in for the handle of symmetric memory of GPUs."""

    group: dist.ProcessGroup

    def barrier(self) -> None:
        dist.barrier(self.group)


def share_memory(patch: pytest.MonkeyPatch, folder: Path, kernels: ModuleType) -> None:
    """Let ranks on CPUs write transfers into the memory of other ranks."""
    numbers = count()

    def grow(
        self: PeerMemory,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
        use: PeerUse,
    ) -> PeerRegion:
        self._regions.pop(use, None)
        ranks, number = dist.get_process_group_ranks(group), next(numbers)
        files = [folder / f"{ranks[0]}-{use}-{number}-{rank}" for rank in ranks]
        local_rank = dist.get_rank(group)
        files[local_rank].write_bytes(bytes(num_bytes))
        dist.barrier(group)
        memories = [
            torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)
            for file in files
        ]
        dist.barrier(group)
        pointers = torch.tensor([memory.data_ptr() for memory in memories])
        # The parts stay mapped as long as the handle lives.
        handle = SimpleNamespace(barrier=HostBarrier(group).barrier, parts=memories)
        self._regions[use] = PeerRegion(memories[local_rank], pointers, handle)
        return self._regions[use]

    def puts(axis: MeshAxis, experts_each: int, device: torch.device) -> Puts:
        return Puts(axis, experts_each, kernels)

    patch.setattr(PeerMemory, "_grow", grow)
    patch.setattr(choose_transport, "transfer_over", puts)


def delay(patch: pytest.MonkeyPatch, kernels: Any, pause: Callable[[], object]) -> None:
    """Let this rank start all transfers late, and read weights of clones late."""
    for name in ("put_counts", "put_weights", "put_tokens", "put_sums", "add_clone_gradients"):
        patch.setattr(kernels, name, start_late(getattr(kernels, name), pause))
    patch.setattr(grouped_linear, "_with_clones", start_late(grouped_linear._with_clones, pause))


def start_late(function: Callable[..., Any], pause: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that begins after a pause."""

    def run(*args: Any, **kwargs: Any) -> Any:
        pause()
        return function(*args, **kwargs)

    return run
