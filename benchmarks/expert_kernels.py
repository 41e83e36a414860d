"""Benchmark of the expert kernels against torch and against their memory traffic, on one GPU.

    python -m benchmarks.expert_kernels --out expert_kernels.md

A time is the median of single calls, each after an idle period and with a cold cache. The variants
alternate, so that all run at the same temperature. Bytes are the minimum that a step must read and
write. The table gives the time of this traffic at the speed of a copy. "Host" is the time to queue
the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.block_kernels import without_kernels
from benchmarks.device_time import host_time, median_times
from lightning_megatron.experts.compute.grouped_linear import weighted_activation
from lightning_megatron.experts.routing.exact_linear import exact_linear
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.transport.permute import map_rows, permute_both, unpermute
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig

DTYPE = torch.bfloat16
SIZE = 2  # bytes of an element
COPY_SPEED = 4.26e12  # bytes/s


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture-of-experts layer.

    Args:
        name: Model with these sizes.
        hidden_size: Hidden size D (elements).
        config: Number and sizes of the experts.
        num_tokens: Number of tokens.
    """

    name: str
    hidden_size: int
    config: ExpertsConfig
    num_tokens: int


QWEN3 = ExpertsConfig(num_experts=128, top_k=8, ffn_hidden_size=768, aux_loss=0.001)
MIXTRAL = ExpertsConfig(num_experts=8, top_k=2, ffn_hidden_size=14336, aux_loss=0.001)
SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, QWEN3, 4096),
    Shape("Qwen3-30B-A3B", 2048, QWEN3, 16384),
    Shape("Mixtral", 4096, MIXTRAL, 4096),
    Shape("Mixtral", 4096, MIXTRAL, 16384),
)


@dataclass(frozen=True)
class Case:
    """One step of a mixture-of-experts layer.

    Args:
        name: Label of the row in the table.
        step: Function of the inputs, with fused kernels if ``layers.fused.choose_kernels`` selects
            them.
        inputs: Inputs of the step; inputs that require gradients get gradients.
        moved: Minimum traffic of the forward and of the backward pass (bytes).
        plain: Function to compare with; None uses ``step`` without fused kernels.
    """

    name: str
    step: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    moved: tuple[int, int]
    plain: Callable[..., Any] | None = None


def drawn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Return a random tensor that requires gradients."""
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def route(router: Router, x: Tensor) -> Tensor:
    """Return the probabilities of the selected experts, with the losses attached."""
    routing = router(x.unsqueeze(1))
    assert routing.losses.load_factors is not None, "the auxiliary loss is on"
    return routing.losses.attach_to(routing.probabilities, 1.0)


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return a matrix product in float32."""
    return F.linear(x.float(), weight.float())


def router_of(shape: Shape) -> Router:
    """Return the initialized router of a layer."""
    router = Router(shape.config, shape.hidden_size, ParallelMesh.single("cuda", seed=0))
    initialize_(router, torch.device("cuda"), 0)
    return router.to("cuda", DTYPE)


def cases_of(shape: Shape) -> list[Case]:
    """Return the steps of a layer with random routing."""
    config = shape.config
    tokens = shape.num_tokens
    width = shape.hidden_size
    num_experts = config.num_experts
    top_k = config.top_k
    inner = config.ffn_hidden_size
    router = router_of(shape)
    hidden = drawn(tokens, width)
    probabilities = torch.rand(tokens, top_k, device="cuda").requires_grad_()
    experts = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    row_map = map_rows(experts, 0, num_experts)
    rows = tokens * top_k
    # Sizes of all hidden states, expert rows, probabilities and logits (bytes).
    token = tokens * width * SIZE
    row = rows * width * SIZE
    scores = rows * 4
    logits = tokens * num_experts * 4
    gate_up = drawn(rows, 2 * inner)
    scales = torch.rand(rows, device="cuda").requires_grad_()

    routed = partial(route, router)
    return [
        Case(
            "router's product",
            exact_linear,
            (hidden, router.weight),
            (token + logits, 2 * token + logits),
            plain_product,
        ),
        Case("router", routed, (hidden,), (token + 3 * scores, token + logits + 3 * scores)),
        Case("row map", lambda e: map_rows(e, 0, num_experts).rows, (experts,), (6 * scores, 0)),
        Case(
            "permute + probabilities",
            lambda x, p: permute_both(x, p, row_map),
            (hidden, probabilities),
            (token + row + 2 * scores, token + row + 2 * scores),
        ),
        Case(
            "unpermute",
            lambda x: unpermute(x, row_map),
            (drawn(rows, width),),
            (token + row, token + row),
        ),
        Case(
            "unpermute x probability",
            lambda x, p: unpermute(x, row_map, p),
            (drawn(rows, width), probabilities),
            (token + row + scores, token + 2 * row + 2 * scores),
        ),
        Case(
            "SwiGLU x probability",
            lambda x, p: weighted_activation(x, p, row_map.ends, "swiglu")[0],
            (gate_up, scales),
            (3 * rows * inner * SIZE + scores, 5 * rows * inner * SIZE + 2 * scores),
        ),
    ]


def passes(step: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Callable[[], Any]]:
    """Return functions that run the forward pass of a step and, if any, the backward pass."""
    outputs = step(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with_gradients = [tensor for tensor in inputs if tensor.requires_grad]
    if not with_gradients:
        return [lambda: step(*inputs)]
    grads = [torch.randn_like(output) for output in outputs]
    return [
        lambda: step(*inputs),
        lambda: torch.autograd.grad(outputs, with_gradients, grads, retain_graph=True),
    ]


def measure(case: Case, rounds: int) -> list[str]:
    """Time a case alternately with and without kernels, and return its rows of the table."""
    fused = passes(case.step, case.inputs)
    with without_kernels():
        plain = passes(case.plain or case.step, case.inputs)
    rows = []
    for index, kind in enumerate(("forward", "backward")[: len(fused)]):

        def plain_call(call: Callable[[], Any] = plain[index]) -> None:
            with without_kernels():
                call()

        calls = {"fused": fused[index], "torch": plain_call}
        medians = median_times(calls, rounds)
        hosts = {name: host_time(call) for name, call in calls.items()}
        copy_time = 1e6 * case.moved[index] / COPY_SPEED
        rows.append(
            f"| {case.name} | {kind} | {case.moved[index] / 1e6:.1f} | {medians['fused']:.1f} "
            f"| {medians['torch']:.1f} | {medians['torch'] / medians['fused']:.1f} "
            f"| {copy_time:.1f} "
            f"| {copy_time / medians['fused']:.2f} "
            f"| {hosts['fused']:.0f} | {hosts['torch']:.0f} |"
        )
    return rows


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each variant")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}: microseconds"]
    print(lines[0], flush=True)
    for shape in SHAPES:
        columns = (
            "step",
            "pass",
            "MB",
            "fused",
            "torch",
            "times",
            "at 4.26 TB/s",
            "reached",
            "host",
            "host of torch",
        )
        title = (
            f"\n{shape.name}, {shape.num_tokens} tokens\n\n| {' | '.join(columns)} "
            f"|\n|{' --- |' * len(columns)}"
        )
        lines.append(title)
        print(lines[-1], flush=True)
        for case in cases_of(shape):
            rows = measure(case, options.rounds)
            lines += rows
            print("\n".join(rows), flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
