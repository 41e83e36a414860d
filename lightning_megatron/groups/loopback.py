"""Communication of ranks of one machine, tried before any training: gloo inside this process, and
a measured all-reduce between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_GLOO_TIMEOUT = timedelta(seconds=10)
#: Less than the minute that a measurement may take, so that the reason of a hang is seen.
_TIMEOUT = timedelta(seconds=30)
#: Time of a call (s): of a function, called so many times after some that do not count.
Timer = Callable[[Callable[[], object]], float]


def reason_against_gloo() -> str | None:
    """Return why two ranks of this machine cannot communicate by gloo; None if they can.

    The ranks are threads of this process, and connect over the network interface that gloo would
    choose for processes.
    """
    store = dist.HashStore()

    def sum_of_ranks(rank: int) -> Tensor:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, _GLOO_TIMEOUT)
        value = torch.tensor([rank + 1])
        group.allreduce([value]).wait()
        return value

    with ThreadPoolExecutor(2) as threads:
        try:
            sums = [int(value) for value in threads.map(sum_of_ranks, range(2))]
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return None if sums == [3, 3] else f"the sums of 1 and 2 are {sums}"


def all_reduce_speed(
    rank: int, size: int, device: torch.device, store: Path, num_bytes: int, timer: Timer
) -> tuple[float, bool]:
    """Measure an all-reduce between the processes that call this, which have no process group.

    Communication: all ranks, by NCCL on GPUs and by gloo on CPUs.

    Args:
        store: File for the rendezvous, which does not exist yet.
        num_bytes: Size of the tensor (bytes).

    Returns:
        The speed as NCCL's own tests count it, of the bus: the bandwidth of each rank's link that
        a ring would need (bytes/s). And whether the sums were right.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        timeout=_TIMEOUT,
        world_size=size,
        rank=rank,
        device_id=device if backend == "nccl" else None,
    )
    value = torch.full((num_bytes // 4,), rank + 1.0, device=device)
    dist.all_reduce(value)
    is_right = bool((value == size * (size + 1) / 2).all())
    seconds = timer(lambda: dist.all_reduce(value))
    # Leaving before the other ranks are done would reset their connections.
    dist.barrier()
    dist.destroy_process_group()
    return 2 * (size - 1) / size * num_bytes / seconds, is_right
