"""Benchmark of the fused kernels against the operators of torch and torch.compile, on one GPU.

    python -m benchmarks.block_kernels --out kernels.md

A time is the median of single calls, each after an idle period of the GPU. The variants alternate,
so that all run at the same temperature. Bytes are the minimum that a step must read and write, the
same for all variants.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F

from benchmarks.device_time import median_times
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.layers.rotary import apply_rotary, rotary_tables
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT

DTYPE = torch.bfloat16
SIZE = 2  # bytes of an element
# Llama 3 8B with one sequence of 4096 tokens; GPT-2 1.2B with eight sequences of 1024 tokens.
LLAMA = GPTConfig.llama(
    vocab_size=131072,
    max_seq_length=4096,
    num_layers=2,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
)
GPT2 = GPTConfig.gpt2(
    vocab_size=51200, max_seq_length=1024, num_layers=4, hidden_size=1536, num_heads=16
)


@dataclass(frozen=True)
class Case:
    """One step of a block, with a fused kernel and with the operators of torch.

    Args:
        name: Label of the row in the table.
        inputs: Inputs of both variants; floating-point inputs get gradients.
        fused: Step with the fused kernel; returns one tensor or several tensors.
        eager: Step with the operators of torch.
        forward_bytes: Minimum memory traffic of the forward pass (bytes).
        backward_bytes: Minimum memory traffic of the backward pass (bytes).
    """

    name: str
    inputs: tuple[Tensor, ...]
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    forward_bytes: int
    backward_bytes: int


def drawn(*shape: int) -> Tensor:
    """Return a random tensor that requires gradients."""
    return torch.randn(*shape, device="cuda").to(DTYPE).requires_grad_()


def rotary_case() -> Case:
    """Return the case of rotary embeddings on the queries and keys of a fused projection."""
    heads = LLAMA.num_heads
    kv_heads = LLAMA.kv_heads
    width = LLAMA.head_size
    tables = rotary_tables(4096, width, dtype=DTYPE, device="cuda")
    widths = [heads * width, kv_heads * width, kv_heads * width]

    def eager(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (part.unflatten(-1, (-1, width)) for part in qkv.split(widths, -1))
        return apply_rotary(query, (cosines, sines)), apply_rotary(key, (cosines, sines)), value

    def fused(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        return kernels.rotate_qkv(qkv, (cosines, sines), heads, kv_heads)

    bytes_per_feature = 2 * 4096 * SIZE
    inputs = (drawn(4096, 1, sum(widths)), *tables)
    return Case(
        "rotary, 32 + 8 heads of 128",
        inputs,
        fused,
        eager,
        bytes_per_feature * sum(widths[:2]),
        bytes_per_feature * sum(widths),
    )


def swiglu_case() -> Case:
    """Return the case of SwiGLU on a fused gate and up projection."""

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    elements = 4096 * LLAMA.ffn_size * SIZE
    inputs = (drawn(4096, 1, 2 * LLAMA.ffn_size),)
    return Case("SwiGLU, F 14336", inputs, kernels.apply_swiglu, eager, 3 * elements, 5 * elements)


def gelu_case() -> Case:
    """Return the case of GELU in its tanh approximation."""
    elements = 8192 * GPT2.ffn_size * SIZE
    return Case(
        "GELU by tanh, F 6144",
        (drawn(1024, 8, GPT2.ffn_size),),
        lambda x: kernels.apply_gelu(x, True),
        lambda x: F.gelu(x, approximate="tanh"),
        2 * elements,
        3 * elements,
    )


def norm_case(config: GPTConfig, has_update: bool) -> Case:
    """Return the case of a norm on the residual stream.

    Args:
        config: Model that gives the kind of norm and its width.
        has_update: Whether an update is added to the residual stream before the norm.
    """
    is_rms = config.norm == "rmsnorm"
    width = config.hidden_size
    rows = (4096, 1) if is_rms else (1024, 8)
    inputs = [drawn(*rows, width), drawn(*rows, width), drawn(width), drawn(width)]
    if not has_update:
        inputs[1] = torch.zeros((), device="cuda", dtype=torch.int64)

    def fused(
        hidden: Tensor, update: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        return kernels.add_norm(
            hidden, update if has_update else None, weight, None if is_rms else bias, 1e-5, is_rms
        )

    def eager(
        hidden: Tensor, update: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        stream = hidden + update if has_update else hidden.view_as(hidden)
        if is_rms:
            return stream, F.rms_norm(stream, (width,), weight, 1e-5)
        return stream, F.layer_norm(stream, (width,), weight, bias, 1e-5)

    name = (
        f"{'residual sum + ' if has_update else ''}{'RMSNorm' if is_rms else 'LayerNorm'}, D "
        f"{width}"
    )
    elements = rows[0] * rows[1] * width * SIZE
    case_inputs = tuple(inputs[:3]) + (
        (torch.zeros((), device="cuda", dtype=torch.int64),) if is_rms else (inputs[3],)
    )
    return Case(name, case_inputs, fused, eager, (4 if has_update else 2) * elements, 4 * elements)


def cross_entropy_case(tokens: int, vocab_size: int) -> Case:
    """Return the case of the cross entropy of all tokens."""
    mesh = ParallelMesh.single("cuda")
    labels = torch.randint(0, vocab_size, (tokens, 1), device="cuda")

    def fused(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, mesh, vocab_size)

    def eager(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 0].float(), labels[:, 0], reduction="none")

    elements = tokens * vocab_size * SIZE
    name = f"cross entropy, {tokens} x {vocab_size}"
    return Case(name, (drawn(tokens, 1, vocab_size), labels), fused, eager, elements, 2 * elements)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let all operators run without the fused kernels."""
    original = choose_kernels.is_served
    choose_kernels.is_served = lambda tensor: False
    try:
        yield
    finally:
        choose_kernels.is_served = original


def passes(
    step: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that run the forward and the backward pass of a step."""
    outputs = step(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(output) for output in outputs]
    with_gradients = [tensor for tensor in inputs if tensor.requires_grad]
    return lambda: step(*inputs), lambda: torch.autograd.grad(
        outputs, with_gradients, grads, retain_graph=True
    )


def measure(case: Case, rounds: int) -> str:
    """Time all variants of a case alternately and return two rows of the table."""
    torch._dynamo.reset()
    steps = {
        "fused": case.fused,
        "eager": case.eager,
        "compiled": torch.compile(case.eager, dynamic=False),
    }
    calls = {name: passes(step, case.inputs) for name, step in steps.items()}
    rows = []
    for index, (kind, num_bytes) in enumerate(
        (("forward", case.forward_bytes), ("backward", case.backward_bytes))
    ):
        medians = median_times(
            {name: directions[index] for name, directions in calls.items()}, rounds
        )
        cells = [f"{time:.0f} ({num_bytes / time / 1e6:.2f})" for time in medians.values()]
        rows.append(f"| {case.name} | {kind} | {num_bytes / 1e6:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def measure_model(config: GPTConfig, shape: tuple[int, int], rounds: int) -> str:
    """Time a small model with and without fused kernels, and return a row of the table."""
    model = GPT(config, ParallelMesh.single("cuda", seed=0), seed=0).to(DTYPE)
    tokens = torch.randint(0, config.vocab_size, (shape[0], shape[1] + 1), device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens[:, :-1], tokens[:, 1:]).mean().backward()

    def eager_step() -> None:
        with without_kernels():
            step()

    medians = median_times({"fused": step, "eager": eager_step}, rounds)
    cells = [f"{time:.0f}" for time in medians.values()]
    name = f"{config.num_layers} layers, embedding and loss, D {config.hidden_size}"
    return f"| {name} | both | | " + " | ".join(cells) + " | |"


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each variant")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False
    cases: list[Callable[[], Case]] = [
        rotary_case,
        swiglu_case,
        gelu_case,
        lambda: norm_case(LLAMA, True),
        lambda: norm_case(LLAMA, False),
        lambda: norm_case(GPT2, True),
        lambda: norm_case(GPT2, False),
        lambda: cross_entropy_case(4096, 131072),
        lambda: cross_entropy_case(8192, 51200),
    ]
    lines = [
        (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}: microseconds "
            "(TB/s)\n"
        ),
        "| step | pass | MB | fused | torch | torch.compile |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for build in cases:
        lines.append(measure(build(), options.rounds))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    for config, shape in ((LLAMA, (1, 4096)), (GPT2, (8, 1024))):
        lines.append(measure_model(config, shape, options.rounds))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
