"""Benchmark of the kernels for clones of busy experts, on one GPU with the memory of several ranks.

    python -m benchmarks.clone_kernels --out clone_kernels.md

The shapes are those of Qwen3-30B-A3B on 4 ranks with 2 places for clones each. A time is the median
of single calls, each after an idle period and with a cold cache. Weights and gradients move within
one GPU, so their speed is an upper bound of the speed over NVLink. "Homes" are a rank's resident
experts. The products compare one launch over homes and clones in one stack with two launches, one
for a stack of homes and one for a stack of clones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_time import median_times
from lightning_megatron.experts.compute.backends import Bundled
from lightning_megatron.experts.compute.choose_backend import choose_backend
from lightning_megatron.experts.transport.cloning import place_clones, to_physical
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.plan.expert_clones import CloneMemory

RANKS, EXPERTS, PLACES, TOP_K, TOKENS = 4, 128, 2, 8, 4096
HOMES = EXPERTS // RANKS
#: Shapes of the weight matrices of an expert.
SHAPES = ((1536, 2048), (2048, 768))
DEVICE = torch.device("cuda", 0)


def median(call: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call (µs)."""
    return median_times({"": call}, rounds)[""]


def routed() -> tuple[Tensor, Tensor]:
    """Return the expert selections of rank 0, and token counts by rank and expert.

    Experts with low indices are the busiest.
    """
    scores = torch.rand(RANKS, TOKENS, EXPERTS, device=DEVICE)
    popularity = (1.0 + torch.arange(EXPERTS, device=DEVICE)).pow(-0.6)
    selected = (scores.log() / popularity).topk(TOP_K).indices
    counts = torch.stack(
        [selection.flatten().bincount(minlength=EXPERTS) for selection in selected]
    )
    return selected[0], counts.int()


def plan_rows(rounds: int) -> list[str]:
    """Time the placement of clones and the mapping to physical experts (goal: 25 µs for both)."""
    experts, counts = routed()
    row_map = map_rows(experts, 0, EXPERTS)
    clones = place_clones(counts, PLACES)
    plan = median(lambda: place_clones(counts, PLACES), rounds)
    remap = median(lambda: to_physical(experts, row_map, clones, 0), rounds)
    return [
        f"| plan | {plan:.1f} | |",
        f"| physical experts | {remap:.1f} | |",
        f"| both | {plan + remap:.1f} | at most 25 |",
    ]


def move_rows(rounds: int) -> list[str]:
    """Time one rank's puts of weights and reads of gradients for all other ranks' clone places."""
    owners = torch.arange(RANKS * PLACES, device=DEVICE) % HOMES
    owners[:PLACES] = -1
    num_clones = int((owners >= 0).sum())
    lines = []
    for operation, dtype in (("put weights", torch.bfloat16), ("add gradients", torch.float32)):
        layout = CloneMemory(PLACES, SHAPES, dtype.itemsize)
        memory = torch.zeros(RANKS, layout.num_bytes, dtype=torch.uint8, device=DEVICE)
        pointers = torch.tensor([rank_memory.data_ptr() for rank_memory in memory], device=DEVICE)
        is_put = operation == "put weights"
        move: Callable[..., None] = kernels.put_weights if is_put else kernels.add_clone_gradients
        for shape, start in zip(SHAPES, layout.starts, strict=True):
            stack = torch.zeros(HOMES, *shape, dtype=dtype, device=DEVICE)
            microseconds = median(partial(move, stack, owners, pointers, 0, start), rounds)
            size = num_clones * shape[0] * shape[1] * dtype.itemsize
            speed = size / microseconds / 1e3
            lines.append(
                f"| {operation} {shape} x {num_clones} | {microseconds:.1f} | {speed:.0f} GB/s |"
            )
            no_owners = torch.full_like(owners, -1)
            idle = median(partial(move, stack, no_owners, pointers, 0, start), rounds)
            lines.append(f"| {operation} {shape}, no clone | {idle:.1f} | |")
    return lines


def direction_rows(rounds: int) -> list[str]:
    """Compare both directions for clone gradients: home ranks read them, or clone ranks write them.

    A home rank that reads gradients adds them in the same kernel. Gradients that clone ranks write
    must be added afterwards, and every rank needs memory for the gradients of all places.
    """
    owners = torch.arange(RANKS * PLACES, device=DEVICE) % HOMES
    owners[:PLACES] = -1
    layout = CloneMemory(PLACES, SHAPES, 4)
    memory = torch.zeros(RANKS, layout.num_bytes, dtype=torch.uint8, device=DEVICE)
    pointers = torch.tensor([rank_memory.data_ptr() for rank_memory in memory], device=DEVICE)
    lines = []
    for shape, start in zip(SHAPES, layout.starts, strict=True):
        stack = torch.zeros(HOMES, *shape, device=DEVICE)
        add = partial(kernels.add_clone_gradients, stack, owners, pointers, 0, start)
        put = partial(kernels.put_weights, stack, owners, pointers, 0, start)
        read_time = median(add, rounds)

        def write(put: Callable[[], Any] = put, add: Callable[[], Any] = add) -> None:
            put()
            add()

        write_time = median(write, rounds)
        lines.append(
            f"| gradients {shape}, read by homes and written by clones | {read_time:.1f}, "
            f"{write_time:.1f} | {100 * (write_time / read_time - 1):+.1f} % |"
        )
    return lines


def product_rows(rounds: int) -> list[str]:
    """Time grouped products of homes and clones in one launch and in two launches."""
    backend = choose_backend(DEVICE, torch.bfloat16, HOMES, *SHAPES[0][::-1])
    if backend.backend != "bundled":
        return [f"| products | | {backend.reason} |"]
    groups = HOMES + PLACES
    num_rows = RANKS * TOKENS * TOP_K // RANKS
    sizes = torch.full((groups,), num_rows // groups)
    ends = sizes.cumsum(0).int().to(DEVICE)
    return [line for n, k in SHAPES for line in products_of(n, k, num_rows, ends, rounds)]


def products_of(n: int, k: int, num_rows: int, ends: Tensor, rounds: int) -> list[str]:
    """Time the three grouped products of one weight matrix: forward and both gradients."""
    groups = HOMES + PLACES
    rows = torch.randn(num_rows, k, device=DEVICE).bfloat16()
    grad = torch.randn(num_rows, n, device=DEVICE).bfloat16()
    stack = torch.randn(groups, n, k, device=DEVICE).bfloat16()
    homes = stack[:HOMES]
    clones = stack[HOMES:].clone()
    sums = torch.zeros(groups, n, k, device=DEVICE)
    slots = [GradientSlot(gradient, lambda: None) for gradient in sums]
    home_slots = slots[:HOMES]
    clone_sums = torch.zeros(PLACES, n, k, device=DEVICE)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (
            partial(Bundled.output, rows, stack, ends),
            partial(Bundled.output_of_both, rows, homes, clones, ends),
        ),
        "data gradient": (
            partial(Bundled.input_gradient, grad, stack, ends),
            partial(Bundled.input_gradient_of_both, grad, homes, clones, ends),
        ),
        "weight gradient": (
            partial(Bundled.add_weight_gradients, grad, rows, ends, slots),
            partial(Bundled.add_weight_gradients_of_both, grad, rows, ends, home_slots, clone_sums),
        ),
    }
    lines = []
    for name, (joined, split) in pairs.items():
        joined_time, split_time = median_times({"one": joined, "two": split}, rounds).values()
        percent = 100 * (split_time / joined_time - 1)
        lines.append(
            f"| {name} {n, k}, one and two launches | {joined_time:.1f}, {split_time:.1f} "
            f"| {percent:+.1f} % |"
        )
    return lines


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each kernel")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "",
        "| kernel | µs | |",
        "| --- | --- | --- |",
        *plan_rows(options.rounds),
        *move_rows(options.rounds),
        *direction_rows(options.rounds),
        *product_rows(options.rounds),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
