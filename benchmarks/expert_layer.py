"""Profile of a mixture-of-experts layer on one GPU: time by kernel, and host time.

    python -m benchmarks.expert_layer
    python -m benchmarks.expert_layer --inputs kept again
    python -m benchmarks.expert_layer --workloads W0 W1 W2 W6 W2:8 --ranks 2

The benchmark runs one layer in bfloat16, forward and backward. The inputs of experts are kept for
the backward pass, or the backward pass sorts them again. Weights and float32 gradient sums lie
contiguously as in training. The device time is the median of single passes that the host has queued
before they start, each with a cold cache. The time by kernel is the mean under torch.profiler. The
host time is the time to queue the passes.

With ``--workloads`` it times the experts, forward and backward, with the rows of the busiest of
several ranks, for whose products all others wait, with 0, 1 and 2 places for clones. That is the
time of a layer on these ranks without transports, puts of weights and reads of gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import device_time, heading, option_parser
from benchmarks.routing import Workload, workload_of
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.balance import tokens_per_expert
from lightning_megatron.experts.transport.cloning import place_clones
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot, slot_of
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.expert_clones import MIN_ROWS_ON_GPUS
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.profiling.step_parts import part_of

DTYPE = torch.bfloat16
# Sizes of Qwen3-30B-A3B.
HIDDEN_SIZE = 2048
TOP_K = 8
FFN_SIZE = 768
LONGEST = 24  # kernels in the report
HEAD_START = 20_000_000  # longer than the host time of a pass (cycles)


def laid_out(module: nn.Module) -> nn.Module:
    """Move the parameters and their gradient slots into two contiguous buffers, as in training."""
    parameters = list(module.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    device = parameters[0].device
    values = torch.empty(total, dtype=DTYPE, device=device)
    sums = torch.zeros(total, device=device)
    start = 0
    for parameter in reversed(parameters):
        stop = start + parameter.numel()
        view = values[start:stop].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        slot = GradientSlot(sums[start:stop].view_as(parameter), lambda: None)
        # Mark slots as filled, as after an earlier microbatch, so that gradients add to the sum.
        slot.is_empty = False
        set_slot(parameter, slot)
        start = stop
    return module


def host_times(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], rounds: int
) -> tuple[float, float]:
    """Return the time that the host needs to queue a forward and a backward pass (µs)."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        start = time.perf_counter()
        output = forward()
        middle = time.perf_counter()
        backward(output)
        times.append((middle - start, time.perf_counter() - middle))
    torch.cuda.synchronize()
    first, last = zip(*times, strict=True)
    return 1e6 * statistics.median(first), 1e6 * statistics.median(last)


def by_kernel(step: Callable[[], object], rounds: int) -> list[tuple[str, float, float]]:
    """Return name, number of launches and time (µs) of the kernels of a step, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.count / rounds, event.self_device_time_total / rounds)
        for event in profiler.key_averages()
    ]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the memory that a forward pass keeps, its output included (bytes)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = forward()
    num_bytes = torch.cuda.memory_allocated() - before
    assert output.requires_grad, "the backward pass needs the kept tensors"
    return num_bytes


def measure(num_experts: int, num_tokens: int, rounds: int, inputs: str) -> list[str]:
    """Measure one layer and return the lines of its report."""
    config = ExpertsConfig(
        num_experts=num_experts, top_k=TOP_K, ffn_hidden_size=FFN_SIZE, aux_loss=0.001
    )
    mesh = ParallelMesh.single("cuda", seed=0)
    layer: Any = MixtureOfExperts(HIDDEN_SIZE, config, mesh)
    initialize_(layer, torch.device("cuda"), 0)
    layer = laid_out(layer.to("cuda", DTYPE))
    layer.sends_inputs_again = inputs == "again"
    hidden = torch.randn(num_tokens, 1, HIDDEN_SIZE, device="cuda").to(DTYPE).requires_grad_()
    grad_output = torch.randn(num_tokens, 1, HIDDEN_SIZE, device="cuda").to(DTYPE)

    def backward(output: Tensor) -> None:
        hidden.grad = None
        output.backward(grad_output)

    for _ in range(3):
        backward(layer(hidden))
    num_kept_bytes = kept_bytes(lambda: layer(hidden))
    outputs: list[Tensor] = []
    device_forward = [
        device_time(lambda: outputs.append(layer(hidden)), HEAD_START) for _ in range(rounds)
    ]
    device_backward = [device_time(partial(backward, output), HEAD_START) for output in outputs]
    outputs.clear()
    host = host_times(lambda: layer(hidden), backward, rounds)
    kernels = by_kernel(lambda: backward(layer(hidden)), rounds)
    launches = sum(count for _, count, _ in kernels)
    total = sum(microseconds for _, _, microseconds in kernels)
    assert all(slot_of(parameter) is not None for parameter in layer.parameters()), (
        "gradients are in slots"
    )
    lines = [
        f"\n{num_experts} experts, {num_tokens} tokens, inputs {inputs}: "
        f"{num_kept_bytes / num_tokens:,.0f} bytes a token kept; "
        f"device {statistics.median(device_forward):.0f} us forward, "
        f"{statistics.median(device_backward):.0f} backward; host {host[0]:.0f} and {host[1]:.0f}; "
        f"{launches:.0f} launches, {total:.0f} us in kernels\n",
        *heading("us", "launches", "kernels"),
    ]
    kinds: dict[str, tuple[float, float]] = {}
    for name, count, microseconds in kernels:
        kind = part_of(name)
        kinds[kind] = (
            kinds.get(kind, (0.0, 0.0))[0] + microseconds,
            kinds.get(kind, (0.0, 0.0))[1] + count,
        )
    lines += [
        f"| {microseconds:.1f} | {count:.0f} | all of {kind} |"
        for kind, (microseconds, count) in kinds.items()
    ]
    lines += [
        f"| {microseconds:.1f} | {count:.0f} | `{name[:100]}` |"
        for name, count, microseconds in kernels[:LONGEST]
    ]
    return lines


@dataclass(frozen=True)
class BusiestRank:
    """Rows of the rank with the most rows under a workload.

    Args:
        rows: Number of rows of each of its own experts, then of each place for a clone.
        mean: Number of rows of a rank, as a mean over all.
    """

    rows: Tensor
    mean: float

    @classmethod
    def of(
        cls, workload: Workload, sizes: tuple[int, int, int], places: int, num_ranks: int
    ) -> Self:
        """Plan clones for step 7 of a workload: a burst of W7, and the third place of W6.

        Args:
            sizes: Tokens of a rank, experts of a token, and experts.
            places: Places for clones on each rank; 0 plans none.
        """
        num_tokens, top_k, num_experts = sizes
        everywhere = workload.choices(
            num_tokens * num_ranks, top_k, num_experts, seed=0, step=7, device="cpu"
        )
        counts = [tokens_per_expert(part, num_experts) for part in everywhere.chunk(num_ranks)]
        by_rank = torch.stack(counts).long()
        least = MIN_ROWS_ON_GPUS if places else int(by_rank.sum()) + 1
        plan = place_clones(by_rank, max(places, 1), least)
        left = by_rank.sum(0)
        for owner, amount in zip(plan.owners.tolist(), plan.amounts.tolist(), strict=True):
            left[owner] -= amount if owner >= 0 else 0
        busiest = int(plan.rows.argmax())
        arrived = plan.amounts.view(num_ranks, -1)[busiest, :places]
        rows = torch.cat([left.view(num_ranks, -1)[busiest], arrived])
        assert int(rows.sum()) == int(plan.rows[busiest]), "the plan counts the same rows"
        return cls(rows, float(plan.rows.double().mean()))


def workload_line(
    name: str,
    places: int,
    experts: GroupedMLP,
    busiest: BusiestRank,
    time_of: Callable[[Callable[[], Any]], float],
) -> str:
    """Time the experts of the busiest rank, and return a row of the table."""
    device = next(experts.parameters()).device
    ends = busiest.rows.cumsum(0).int().to(device)
    num_rows = int(busiest.rows.sum())
    rows = torch.randn(num_rows, HIDDEN_SIZE, device=device).to(DTYPE).requires_grad_()
    scales = torch.rand(num_rows, device=device).requires_grad_()
    clones = None
    if places:
        stacks = [torch.randn(places, *own[0].shape, device=device) for own in experts.matrices()]
        clones = [(stack.to(DTYPE), torch.zeros_like(stack)) for stack in stacks]

    def step() -> None:
        rows.grad = scales.grad = None
        experts(rows, scales, ends, clones).backward(rows.detach())

    step()
    return (
        f"| {name} | {places} | {busiest.mean:,.0f} | {num_rows:,} | "
        f"{num_rows / busiest.mean:.2f} | {time_of(step):,.0f} |"
    )


def workload_lines(
    names: Sequence[str],
    sizes: tuple[int, int, int],
    num_ranks: int,
    device: torch.device,
    time_of: Callable[[Callable[[], Any]], float],
) -> list[str]:
    """Time the busiest rank under each workload, with 0, 1 and 2 places for clones."""
    _, top_k, num_experts = sizes
    config = ExpertsConfig(
        num_experts=num_experts // num_ranks, top_k=top_k, ffn_hidden_size=FFN_SIZE
    )
    experts = GroupedMLP(HIDDEN_SIZE, config, ParallelMesh.single(device, seed=0))
    initialize_(experts, device, 0)
    laid_out(experts.to(device, DTYPE))
    lines = heading("workload", "places", "rows of a rank", "busiest rank", "over mean", "us")
    for name, places in product(names, (0, 1, 2)):
        workload = workload_of(name)
        assert workload is not None, "the router chooses no experts here"
        busiest = BusiestRank.of(workload, sizes, places, num_ranks)
        lines.append(workload_line(name, places, experts, busiest, time_of))
    return lines


def main() -> None:
    """Measure all sizes and print the report."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--experts", type=int, nargs="+", default=[128, 32], help="number of experts of the layer")
    add("--tokens", type=int, default=4096, help="number of tokens of the layer")
    add(
        "--inputs",
        nargs="+",
        default=["kept"],
        choices=["kept", "again"],
        help="inputs of experts: kept, or sorted again by the backward pass",
    )
    add("--rounds", type=int, default=9, help="timed passes")
    add("--workloads", nargs="*", default=[], help="workloads of benchmarks/routing.py")
    add("--ranks", type=int, default=2, help="ranks that share the experts of a workload")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}", flush=True)
    if options.workloads:

        def median(step: Callable[[], Any]) -> float:
            return statistics.median(device_time(step, HEAD_START) for _ in range(options.rounds))

        sizes = options.tokens, TOP_K, options.experts[0]
        device = torch.device("cuda")
        report = workload_lines(options.workloads, sizes, options.ranks, device, median)
        print("\n".join(report))
        return
    for num_experts, inputs in product(options.experts, options.inputs):
        report = measure(num_experts, options.tokens, options.rounds, inputs)
        print("\n".join(report), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
