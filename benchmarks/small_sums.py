"""Times of all-reduces of small tensors in CUDA graphs: NCCL, and one kernel on shared memory.

    torchrun --nproc-per-node 4 -m benchmarks.small_sums

A graph holds many reductions, one after the other; the time of one is that of a replay divided by
their number. tests/gpu/test_gpu_one_shot.py compares the results.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.one_shot import one_shot_all_reduce_
from lightning_megatron.plan.layout import ParallelLayout

NUM_REDUCTIONS = 100
NUM_REPLAYS = 20


def time_of_one(reduce: Callable[[Tensor], object], x: Tensor) -> float:
    """Return the device time of one reduction in a replayed graph (µs).

    Args:
        reduce: Reduction in place.
        x: Its tensor.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(NUM_REDUCTIONS):
            reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / NUM_REDUCTIONS / NUM_REPLAYS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="numbers of a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    mesh = ParallelMesh.create(ParallelLayout(world, tp=world), device=device)
    lines = ["| tensor | KiB | NCCL, µs | one kernel, µs |", "|---|---|---|---|"]
    cases = [("512 int32, maximum", torch.zeros(512, dtype=torch.int32, device=device))]
    for count in args.tokens:
        x = torch.zeros(count, args.width, dtype=torch.bfloat16, device=device)
        cases.append((f"{count} x {args.width} bfloat16, sum", x))
    for name, x in cases:
        if x.dtype is torch.int32:
            nccl = time_of_one(lambda one: all_reduce_(one, mesh.tp, "max"), x)
            ours = time_of_one(lambda one: one_shot_all_reduce_(one, mesh.tp, "max", "sums"), x)
        else:
            nccl = time_of_one(lambda one: all_reduce_(one, mesh.tp), x)
            ours = time_of_one(lambda one: one_shot_all_reduce_(one, mesh.tp, "sum", "sums"), x)
        lines.append(f"| {name} | {x.nbytes / 1024:.0f} | {nccl:.1f} | {ours:.1f} |")
    if dist.get_rank() == 0:
        print(f"{world} x {torch.cuda.get_device_name()}\n")
        print("\n".join(lines))
    mesh.destroy()


if __name__ == "__main__":
    main()
