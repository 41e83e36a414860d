"""What start, messages, watching and saving cost a rank of a large job, without its other ranks.

    python -m benchmarks.scale
    python -m benchmarks.scale --worlds 64 1024 16384 65536 --machine 8 --latency 30

One process takes the part of a rank: its groups are created without connections, its requests go to
a store that counts them, and what the first rank does alone is done here. The rate of a store is
measured with threads that ask one of this machine. Seconds of the store are requests of all ranks
at this rate, and seconds of messages are steps at ``--latency``; what is computed is measured.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.measure import heading, option_parser
from lightning_megatron.checkpoint.save import KEY_BYTES, writers_of
from lightning_megatron.groups import mesh_groups
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.journal import Call, Journal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.process.rank_status import RankStatus, hang_report, missing_ranks

#: Pieces of tensors that a rank writes in a checkpoint: parameters and two states of each.
_PIECES = 60
#: Interval between two statuses of a rank with NCCL's usual timeout of 10 minutes (seconds).
_STATUS_SECONDS = 15.0


class CountingStore(dist.Store):
    """Store of one process that counts the requests to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self._store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.num_requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Read a value."""
        self.num_requests += 1
        return self._store.get(key)

    def add(self, key: str, number: int) -> int:
        """Add to a number, and return the sum."""
        self.num_requests += 1
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        self.num_requests += 1
        return self._store.check(keys)


def layout_of(world_size: int) -> ParallelLayout:
    """Return a layout of a large mixture of experts: tp 8, ep up to 64, and the rest pp and dp."""
    pp = 16 if world_size >= 8192 else max(world_size // 128, 1)
    ep = min(64, world_size // pp)
    return ParallelLayout(world_size, tp=min(8, world_size), pp=pp, ep=ep, etp=1)


def mesh_without_connections(
    layout: ParallelLayout, rank: int
) -> tuple[ParallelMesh, list[tuple[str, int]]]:
    """Return the mesh of a rank on GPUs, and backend and size of each group that it creates."""
    created: list[tuple[str, int]] = []

    def new_group(ranks: list[int], *, backend: str, **_: Any) -> Any:
        created.append((backend, len(ranks)))
        return SimpleNamespace()

    default = SimpleNamespace(bound_device_id=None)
    with (
        patch.multiple(
            dist,
            is_initialized=lambda: True,
            get_world_size=lambda: layout.world_size,
            get_rank=lambda: rank,
            new_group=new_group,
        ),
        patch.multiple(
            mesh_groups,
            check_same_in_store=lambda *_: 0,
            default_store=lambda: None,
            torch_options=lambda _: None,
        ),
        patch.object(mesh_groups.distributed_c10d, "_get_default_group", lambda: default),
    ):
        return ParallelMesh.create(layout, backend="nccl"), created


def requests_of_comparison(world_size: int) -> int:
    """Return the requests of a rank that compares its configuration and need not wait."""
    store = CountingStore()
    store.set(f"lightning_megatron/same/0 to {world_size - 1}/1/result", "")
    ranks = range(world_size)
    check_same_in_store(store, ranks[-1], ranks, {"tp": 8, "pp": 16}, timedelta(seconds=30))
    return store.num_requests - 1


def steps_of(axis: MeshAxis) -> int:
    """Return the messages of a rank in a sum, each of which waits for that of another rank."""
    return sum(2 * (line.size - 1) for line in axis.lines or (axis,))


def requests_per_second(num_clients: int = 16, seconds: float = 2.0) -> float:
    """Measure the requests that a store of this machine answers, with a connection per thread."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stop = time.monotonic() + seconds
    counts = [0] * num_clients

    def ask(number: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        while time.monotonic() < stop:
            client.add(f"asked/{number}", 1)
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def status_of(rank: int, axis: MeshAxis, num_calls: int) -> RankStatus:
    """Return the status of a rank that has begun a number of sums over an axis."""
    call = Call("all_reduce", axis.name, num_calls, axis.ranks)
    status = RankStatus.observe(rank, 1, "train, global_step 5", Journal())
    fields = {**vars(status), "waits": True, "call": call, "counts": {axis.name: num_calls}}
    return RankStatus(**fields)


def rows_of(world_size: int, machine: int, rate: float, latency: float) -> dict[str, str]:
    """Return one column of the table, by row.

    Args:
        machine: Ranks of a machine (ranks).
        rate: Requests that the store answers (1 / seconds).
        latency: Time of a message between two ranks (seconds).
    """
    layout = layout_of(world_size)
    rank = world_size // 2 + 1
    mesh, created = mesh_without_connections(layout, rank)
    backends = [backend for backend, _ in created]
    ring = 2 * (world_size - 1)
    world = mesh.world
    statuses = {number: status_of(number, world, 2) for number in range(1, world_size)}
    statuses[0] = status_of(0, world, 1)
    keys = [os.urandom(KEY_BYTES * _PIECES) for _ in range(world_size)]
    requests = requests_of_comparison(world_size)
    sizes = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, ep {layout.ep}"
    assert prod((layout.tp, layout.pp, layout.dp)) == world_size, "the layout has all ranks"

    def report() -> None:
        hang_report(statuses, missing_ranks(statuses, [], world_size), {})

    return {
        "layout": sizes,
        "NCCL communicators of a rank": f"{backends.count('nccl')}",
        "groups on the CPU of a rank": f"{backends.count('gloo')}",
        "to find and number the groups of a rank": _milliseconds(
            seconds_of(lambda: mesh_without_connections(layout, rank))
        ),
        "requests of a rank to compare settings, twice": f"{2 * requests}",
        "the store's time for those of all ranks": f"{2 * requests * world_size / rate:.2f} s",
        "a sum over all ranks on the CPU": f"{steps_of(mesh.world_cpu)} messages, "
        f"{_milliseconds(steps_of(mesh.world_cpu) * latency)}",
        "the same in one ring": _milliseconds(ring * latency),
        "status of a rank in the store": f"{len(statuses[1].to_text())} bytes",
        "requests for statuses": f"{world_size / _STATUS_SECONDS:.0f} / s",
        "requests for failures of other machines": f"{min(world_size / machine / 2, 500):.0f} / s",
        "to name the missing rank of a hang": _milliseconds(seconds_of(report)),
        "plan of a checkpoint, received by rank 0": f"{sum(map(len, keys)) / 2**20:.1f} MiB",
        "to find pieces that several ranks have": _milliseconds(
            seconds_of(lambda: writers_of(keys))
        ),
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def main() -> None:
    """Print the table."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--machine", type=int, default=8, help="ranks of a machine")
    parser.add_argument("--latency", type=float, default=30.0, help="of a message (microseconds)")
    args = parser.parse_args()
    rate = requests_per_second()
    print(f"The store answers {rate:,.0f} requests a second.\n")
    columns = [rows_of(size, args.machine, rate, args.latency * 1e-6) for size in args.worlds]
    print(*heading("ranks", *(f"{size:,}" for size in args.worlds)), sep="\n")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main()
