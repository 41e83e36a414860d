"""Benchmark of dispatch and combine of tokens by every expert transport, on the GPUs of one host.

    torchrun --nproc-per-node 2 -m benchmarks.expert_dispatch

The benchmark runs dispatch and combine of one layer in bfloat16, without the experts: forward, and
backward with the gradients of tokens and probabilities. A barrier on the device precedes each pass
while the host queues ahead. Transports alternate, and a time is the median. The forward time of an
all-to-all includes host work after the host has read the sizes. MB is the data that a rank sends to
other ranks in dispatch and combine. GB/s is this data per forward time, which includes the
permutation of rows. The host time is the time to queue both passes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.expert_layer import by_kernel
from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import Dispatcher
from lightning_megatron.experts.transport.transit import ExpertInput
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.layout import ParallelLayout

#: Hidden size, number of experts and top_k, by name.
SHAPES = {
    "Qwen3-30B-A3B": (2048, 128, 8),
    "Mixtral": (4096, 8, 2),
    "DeepSeek-V3": (7168, 256, 8),
    "one choice": (4096, 8, 1),
}
TRANSPORTS: tuple[Transport, ...] = ("all_gather", "all_to_all", "one_sided")
HEAD_START = 3_000_000  # about the host time of a pass (cycles)
LONGEST = 12  # kernels listed by --profile


@dataclass
class Pass:
    """Timed passes of one transport."""

    dispatcher: Dispatcher
    mesh: ParallelMesh
    hidden: Tensor
    probabilities: Tensor
    experts: Tensor
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def run(self) -> tuple[Tensor, ExpertInput]:
        """Dispatch the tokens to their experts and combine the rows."""
        prepared = self.dispatcher.prepare(self.hidden, self.probabilities, self.experts)
        sent = self.dispatcher.receive(self.dispatcher.send(prepared))
        return self.dispatcher.combine(self.dispatcher.send_back(sent.rows, sent)), sent

    def run_backward(self, output: Tensor, sent: ExpertInput) -> None:
        """Run the backward pass of ``run``."""
        torch.autograd.grad(
            (output, sent.probabilities),
            (self.hidden, self.probabilities),
            (output.detach(), sent.probabilities),
        )

    def run_both(self) -> None:
        """Run both passes."""
        self.run_backward(*self.run())

    def measure(self) -> None:
        """Time both passes once (ms)."""
        begin = self._synchronize_ranks()
        start = time.perf_counter()
        results = self.run()
        seconds = time.perf_counter() - start
        end = _mark()
        begin_backward = self._synchronize_ranks()
        start = time.perf_counter()
        self.run_backward(*results)
        seconds += time.perf_counter() - start
        end_backward = _mark()
        torch.cuda.synchronize()
        self.forward.append(begin.elapsed_time(end))
        self.backward.append(begin_backward.elapsed_time(end_backward))
        self.host.append(1e3 * seconds)

    def _synchronize_ranks(self) -> torch.cuda.Event:
        torch.cuda._sleep(HEAD_START)
        all_reduce_(torch.ones(1, device=self.mesh.device), self.mesh.ep)
        return _mark()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def sent_bytes(
    transport: Transport, experts: Tensor, num_experts: int, mesh: ParallelMesh, row: int
) -> int:
    """Return the data that this rank sends to other ranks in one direction (bytes)."""
    holders = experts // (num_experts // mesh.ep.size)
    is_remote = holders != mesh.ep.rank
    if transport == "all_gather":
        return (mesh.ep.size - 1) * experts.shape[0] * row
    if transport == "all_to_all":
        return int(is_remote.sum()) * row
    ranks = torch.arange(mesh.ep.size, device=holders.device)
    is_holder = (holders.unsqueeze(-1) == ranks).any(1)
    return int(is_holder[:, ranks != mesh.ep.rank].sum()) * row


def measure(
    shape: str, num_tokens: int, rounds: int, mesh: ParallelMesh, profiles: bool
) -> list[str]:
    """Return a row of the table for every transport."""
    width, num_experts, top_k = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(mesh.ep.rank)
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    choices = scores.topk(top_k)
    hidden = (
        torch.randn(num_tokens, width, device="cuda", generator=generator)
        .bfloat16()
        .requires_grad_()
    )
    passes = {}
    for transport in TRANSPORTS:
        dispatcher = choose_transport(num_experts, top_k, mesh, transport).dispatcher
        probabilities = choices.values.clone().requires_grad_()
        passes[transport] = Pass(dispatcher, mesh, hidden, probabilities, choices.indices)
    for number in range(rounds + 3):
        for timed in passes.values():
            timed.measure()
            if number < 3:
                timed.forward.clear()
                timed.backward.clear()
                timed.host.clear()
    lines = []
    for transport, timed in passes.items():
        num_bytes = 2 * sent_bytes(transport, choices.indices, num_experts, mesh, 2 * width)
        forward, backward = statistics.median(timed.forward), statistics.median(timed.backward)
        times = f"{1e3 * forward:.0f} | {1e3 * backward:.0f} | {1e3 * (forward + backward):.0f}"
        host = (
            "waits" if transport == "all_to_all" else f"{1e3 * statistics.median(timed.host):.0f}"
        )
        lines.append(
            f"| {shape} | {transport} | {num_bytes / 1e6:.1f} | {times} "
            f"| {num_bytes / forward / 1e6:.0f} | {host} |"
        )
        if profiles:
            kernels = by_kernel(timed.run_both, 10)[:LONGEST]
            lines += [
                f"    {microseconds:8.1f} us  {count:4.0f} x  {name[:90]}"
                for name, count, microseconds in kernels
            ]
    return lines


def main() -> None:
    """Measure all shapes and print a table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="shapes to measure"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--rounds", type=int, default=30, help="timed passes of each transport")
    parser.add_argument("--profile", action="store_true", help="also list the longest kernels")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = ParallelMesh.create(ParallelLayout(size, ep=size), device=device)
    machine = f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = [
        f"{machine}, bfloat16, {options.tokens} tokens a rank\n",
        (
            "| shape | transport | MB sent | forward us | backward us | both us | GB/s forward | "
            "host us |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in options.shapes:
        lines += measure(shape, options.tokens, options.rounds, mesh, options.profile)
    if rank == 0:
        print("\n".join(lines), flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    mesh.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
