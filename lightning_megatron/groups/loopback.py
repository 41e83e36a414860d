"""Communication of ranks of one machine, tried before any training: gloo inside this process, and
a measured all-reduce between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_into, reduce_scatter_into

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


@contextmanager
def trial_group(
    rank: int, size: int, device: torch.device, where: str, per_node: int | None = None
) -> Iterator[dict[str, tuple[Any, int]]]:
    """Join the processes that call this, which have no process group, inside the block.

    Communication: all ranks, by NCCL on GPUs and by gloo on CPUs.

    Args:
        where: Method of the rendezvous, such as "env://" or "file://PATH" of a new file.
        per_node: Ranks of a node; None means that all ranks are on one.

    Returns:
        Groups that have more than one rank, with their sizes: "node" are the ranks of a node, and
        "network" the ranks that are at one place of all nodes.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=where,
        timeout=_TIMEOUT,
        world_size=size,
        rank=rank,
        device_id=device if backend == "nccl" else None,
    )
    per_node = per_node or size
    nodes = [list(range(first, first + per_node)) for first in range(0, size, per_node)]
    lists = {"node": nodes, "network": list(map(list, zip(*nodes, strict=True)))}
    groups = {}
    for name, ranks in lists.items():
        if len(ranks[0]) > 1:
            group = dist.new_subgroups_by_enumeration(ranks)[0]
            groups[name] = group, len(ranks[0])
    yield groups
    # Leaving before the other ranks are done would reset their connections.
    dist.barrier()
    dist.destroy_process_group()


def trial_collective(
    kind: str, num_bytes: int, device: torch.device, group: Any
) -> Callable[..., Any]:
    """Return a function that runs a collective of a group; ``async_op=True`` only starts it.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "transfer" from each
            even rank to the next one.
        num_bytes: Size of the tensor, of all ranks' parts if there are parts (bytes).
    """
    size = dist.get_world_size(group)
    whole = torch.zeros(num_bytes // 4 // size * size, device=device)
    part = torch.zeros(len(whole) // size, device=device)
    if kind == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    if kind == "all_gather":
        return partial(all_gather_into, whole, part, group=group)
    if kind == "reduce_scatter":
        return partial(reduce_scatter_into, part, whole, group=group)
    if kind == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
    rank = dist.get_rank(group)
    other = dist.get_global_rank(group, min(rank ^ 1, size - 1))
    transfer = dist.P2POp(dist.irecv if rank % 2 else dist.isend, whole, other, group)

    def run() -> None:
        # The last rank of an odd number has no partner.
        for work in dist.batch_isend_irecv([transfer]) if rank ^ 1 < size else ():
            work.wait()

    return run


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
    with trial_group(rank, size, device, f"file://{store}"):
        value = torch.full((num_bytes // 4,), rank + 1.0, device=device)
        dist.all_reduce(value)
        is_right = bool((value == size * (size + 1) / 2).all())
        seconds = timer(lambda: dist.all_reduce(value))
    return 2 * (size - 1) / size * num_bytes / seconds, is_right
