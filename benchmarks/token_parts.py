"""Times of the parts of a pass over one token in CUDA graphs: sums over ranks, and products.

    torchrun --nproc-per-node 4 -m benchmarks.token_parts
    python -m benchmarks.token_parts

Several processes compare the all-reduce of NCCL with the kernel of ``layers.fused.one_shot``; one
process compares ``torch.nn.functional.linear`` with the kernel of ``layers.fused.vector_product``
for the weights of Llama-3-8B, whole and divided by four. A graph holds many calls, one after the
other; the time of a call is the time of a replay divided by the number of calls. The weights of the
calls differ, so that no cache holds them. The tests of the kernels compare the results.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.one_shot import one_shot_all_reduce_
from lightning_megatron.layers.fused.vector_product import linear
from lightning_megatron.plan.layout import ParallelLayout

NUM_REDUCTIONS = 100
NUM_REPLAYS = 20
#: Bytes of all weights of a shape; an H200 caches 50 MB.
WEIGHT_BYTES = 2**29
#: Output and input features of the layers of Llama-3-8B, whole and for each of four ranks.
WEIGHTS = {
    "qkv": (6144, 4096),
    "attention output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "qkv, 1/4": (1536, 4096),
    "attention output, 1/4": (4096, 1024),
    "gate and up, 1/4": (7168, 4096),
    "down, 1/4": (4096, 3584),
}


def time_of_calls(calls: list[Callable[[], object]]) -> float:
    """Return the device time of one of several calls in a replayed graph (µs).

    Args:
        calls: Calls of the graph, in order.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / len(calls) / NUM_REPLAYS


def sums(device: torch.device, width: int, counts: list[int]) -> list[str]:
    """Return the rows of the table of sums.

    Args:
        device: GPU of this rank.
        width: Number of elements of a token.
        counts: Numbers of tokens.
    """
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    mesh = ParallelMesh.create(ParallelLayout(world, tp=world), device=device)
    lines = ["| tensor | KiB | NCCL, µs | one kernel, µs |", "|---|---|---|---|"]
    bits = torch.zeros(512, dtype=torch.int32, device=device)
    calls: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (
            partial(all_reduce_, bits, mesh.tp, "max"),
            partial(one_shot_all_reduce_, bits, mesh.tp, "max"),
        )
    ]
    tensors = [bits]
    for count in counts:
        tokens = torch.zeros(count, width, dtype=torch.bfloat16, device=device)
        tensors.append(tokens)
        calls.append(
            (
                partial(all_reduce_, tokens, mesh.tp),
                partial(one_shot_all_reduce_, tokens, mesh.tp, "sum"),
            )
        )
    for tensor, variants in zip(tensors, calls, strict=True):
        nccl, ours = (time_of_calls([call] * NUM_REDUCTIONS) for call in variants)
        name = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        lines.append(f"| {name} | {tensor.nbytes / 1024:.0f} | {nccl:.1f} | {ours:.1f} |")
    mesh.destroy()
    return [f"{world} x {torch.cuda.get_device_name()}", "", *lines]


@torch.no_grad()
def products(device: torch.device) -> list[str]:
    """Return the rows of the table of products."""
    lines = [
        torch.cuda.get_device_name(),
        "",
        "| weight | MB | linear, µs | TB/s | one kernel, µs | TB/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, shape in WEIGHTS.items():
        size = 2 * shape[0] * shape[1]
        weights = torch.randn(
            max(2, WEIGHT_BYTES // size), *shape, dtype=torch.bfloat16, device=device
        )
        token = torch.randn(1, 1, shape[1], dtype=torch.bfloat16, device=device)
        times = []
        for multiply in (F.linear, linear):
            times.append(time_of_calls([partial(multiply, token, weight) for weight in weights]))
        cells = " | ".join(f"{time:.1f} | {size / time / 1e6:.2f}" for time in times)
        lines.append(f"| {name} {shape} | {size / 1e6:.0f} | {cells} |")
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096, help="number of elements of a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        lines = products(device)
    else:
        lines = sums(device, args.width, args.tokens)
    if device.index == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
