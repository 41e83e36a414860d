"""Benchmark of the tensor-parallel linear layers of a block, with and without communication.

    torchrun --nproc-per-node 4 -m benchmarks.tensor_products

The table has the times of each layer of a Llama-3-8B block under sequence parallelism (ms):
forward, and forward and backward with gradient slots. ``alone`` is the same local product without
communication. ``plain`` overlaps collectives with independent products. ``pipelined`` divides
collectives and products into pieces that overlap through symmetric memory. With ``--fp8``, the
products compute in 8 bits, with one scale for each tensor.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.groups.collectives import barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout

LAYERS: dict[str, tuple[type[nn.Module], int, int]] = {
    "qkv": (ColumnParallelLinear, 4096, 6144),
    "output": (RowParallelLinear, 4096, 4096),
    "gate_up": (ColumnParallelLinear, 4096, 28672),
    "down": (RowParallelLinear, 14336, 4096),
}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the mean time of a call (ms)."""
    on_gpu = torch.get_default_device().type == "cuda"
    for _ in range(3):
        run()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def build(name: str, mesh: ParallelMesh, local: bool, scaling: Scaling | None) -> Any:
    """Return one layer with gradient slots.

    Args:
        name: Name of the layer.
        mesh: Mesh of this rank.
        local: Whether to build only this rank's part, without communication.
        scaling: Settings of products in 8 bits; None for products without 8 bits.
    """
    layer_type, width, features = LAYERS[name]
    size = mesh.tp.size
    if local:
        local_sizes = (
            (width, features // size)
            if layer_type is ColumnParallelLinear
            else (width // size, features)
        )
        layer: Any = layer_type(*local_sizes, ParallelMesh.single(mesh.device), bias=False)
    else:
        layer = layer_type(width, features, mesh, bias=False)
    layer.scaling = scaling
    nn.init.normal_(layer.weight, std=0.02)
    set_slot(
        layer.weight,
        GradientSlot(torch.zeros_like(layer.weight, dtype=torch.float32), lambda: None),
    )
    return layer


def measure(
    name: str,
    mesh: ParallelMesh,
    rows: tuple[int, int],
    local: bool,
    repeats: int,
    scaling: Scaling | None,
) -> tuple[float, float]:
    """Return the time of forward, and of forward and backward together (ms)."""
    layer = build(name, mesh, local, scaling)
    is_row = isinstance(layer, RowParallelLinear)
    size = mesh.tp.size
    seq = rows[0] if local or is_row else rows[0] // size
    width = LAYERS[name][1] // size if is_row else LAYERS[name][1]
    x = torch.randn(seq, rows[1], width, requires_grad=True)
    with torch.no_grad():
        forward = milliseconds(lambda: layer(x), repeats)
        grad = torch.randn_like(layer(x))

    def forward_and_backward() -> None:
        x.grad = None
        layer(x).backward(grad)

    return forward, milliseconds(forward_and_backward, repeats)


def main() -> None:
    """Measure all layers and print a table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, to test this program")
    parser.add_argument("--fp8", action="store_true", help="multiply in 8 bits")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if args.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    rows = (args.seq, args.batch)
    lines: list[str] = []
    scaling = Scaling(FP8("tensorwise"), emulate=args.cpu) if args.fp8 else None
    for priority in (False, True):
        mesh = ParallelMesh.create(
            ParallelLayout(size, tp=size),
            device=device,
            sequence_parallel=True,
            options={"tp": {"high_priority": priority}},
        )
        pipelined = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=True))
        cases = [("plain, high priority" if priority else "plain", mesh, False)]
        cases += [] if priority else [("alone", mesh, True), ("pipelined", pipelined, False)]
        for label, case_mesh, local in cases:
            for name in LAYERS:
                barrier(mesh.world, device)
                forward, step = measure(name, case_mesh, rows, local, args.repeats, scaling)
                lines.append(
                    f"| {label} | {name} | {forward:.3f} | {step:.3f} | {step - forward:.3f} |"
                )
                if rank == 0:
                    print(lines[-1], flush=True)
        mesh.destroy()
    if rank == 0:
        heading = [
            "",
            "| way | layer | forward ms | with backward | backward |",
            "|---|---|---|---|---|",
        ]
        print("\n".join([*heading, *lines]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
