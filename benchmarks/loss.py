"""Time and memory of the head and cross entropy: stored logits, chunks and other libraries.

    python -m benchmarks.loss
    PYTHONPATH=folder/with/wheels python -m benchmarks.loss --tokens 8192 65536 --smoothing 0.1

A call computes the head of Llama 3 8B (4,096 features, 128,256 tokens), the mean loss of random
labels of which every eighth is ignored, and the gradients of hidden states and head, in bfloat16.
TFLOP/s count the three matrix products once, even if a variant computes logits twice. ``forward``
computes gradients in the forward pass, and logits only once. The peak is that of the allocator
minus operands and gradients. ``liger-kernel`` and ``cut-cross-entropy`` are measured if they can be
imported; the latter drops small gradients by default, and its variant ``exact`` keeps them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import heading, option_parser
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.embedding import vocab_logits
from lightning_megatron.layers.loss.chunked_loss import (
    ChunkedHead,
    chunked_cross_entropy,
    summed_cross_entropy,
)
from lightning_megatron.layers.loss.cross_entropy import LossTerms, vocab_parallel_cross_entropy

IGNORED = -100
#: Function of hidden states (tokens, features), a head (vocabulary, features), labels and label
#: smoothing that returns the mean loss.
MeanLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def torch_operators(hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Compute the mean loss from stored logits in float32 by torch."""
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing)


def stored(hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Compute the mean loss from stored logits by this package."""
    mesh = ParallelMesh.single(hidden.device)
    logits = vocab_logits(hidden[:, None], head, mesh)
    losses = vocab_parallel_cross_entropy(
        logits, labels[:, None], mesh, len(head), label_smoothing=smoothing
    )
    return losses.sum() / (labels != IGNORED).sum()


def _chunks(head: Tensor, chunk: int, smoothing: float) -> ChunkedHead:
    mesh = ParallelMesh.single(head.device)
    return ChunkedHead(LossTerms(mesh.tp, len(head), smoothing, IGNORED), mesh, chunk)


def chunked(
    hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float, *, chunk: int = 2048
) -> Tensor:
    """Compute the mean loss in chunks of tokens."""
    losses = chunked_cross_entropy(
        hidden[:, None], head, labels[:, None], _chunks(head, chunk, smoothing)
    )
    return losses.sum() / (labels != IGNORED).sum()


def summed(
    hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float, *, chunk: int = 2048
) -> Tensor:
    """Compute the mean loss in chunks of tokens, and its gradients in the forward pass."""
    total = summed_cross_entropy(
        hidden[:, None], head, labels[:, None], _chunks(head, chunk, smoothing)
    )
    return total / (labels != IGNORED).sum()


def liger(function: Any, hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Compute the mean loss by liger-kernel, which sums the head's gradient in float32."""
    loss: Tensor = function.apply(
        hidden,
        head,
        labels,
        None,
        None,
        IGNORED,
        0.0,
        smoothing,
        "mean",
        None,
        False,
        torch.float32,
    )[0]
    return loss


def cut(function: Any, hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Compute the mean loss by cut-cross-entropy, which has no label smoothing."""
    assert smoothing == 0.0, "cut-cross-entropy has no label smoothing"
    loss: Tensor = function(hidden, head, labels, ignore_index=IGNORED)
    return loss


def liger_loss() -> MeanLoss:
    """Return the loss of liger-kernel.

    Raises:
        ImportError: If liger-kernel cannot be imported.
    """
    operators = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    return partial(liger, operators.LigerFusedLinearCrossEntropyFunction)


def cut_loss(*, exact: bool = False) -> MeanLoss:
    """Return the loss of cut-cross-entropy.

    Raises:
        ImportError: If cut-cross-entropy cannot be imported.
    """
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return partial(cut, partial(function, filter_eps=None) if exact else function)


def variants(chunk: int, smoothing: float) -> tuple[dict[str, MeanLoss], list[str]]:
    """Return the losses by name, and the omitted libraries with the reason for each.

    Args:
        chunk: Number of tokens per chunk (tokens).
        smoothing: Label smoothing.
    """
    losses: dict[str, MeanLoss] = {
        "torch": torch_operators,
        "stored": stored,
        f"chunks of {chunk}": partial(chunked, chunk=chunk),
        f"chunks of {chunk}, forward": partial(summed, chunk=chunk),
    }
    omitted: list[str] = []
    libraries: dict[str, Callable[[], MeanLoss]] = {"liger-kernel": liger_loss}
    if smoothing:
        omitted.append("cut-cross-entropy: it has no label smoothing")
    else:
        libraries["cut-cross-entropy"] = cut_loss
        libraries["cut-cross-entropy, exact"] = partial(cut_loss, exact=True)
    for name, make in libraries.items():
        try:
            losses[name] = make()
        except ImportError as error:
            omitted.append(f"{name}: {error}")
    return losses, omitted


def operands(tokens: int, features: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    """Return hidden states, a head and labels, every eighth of which is ignored."""
    generator = torch.Generator(device).manual_seed(0)
    draw = {"device": device, "generator": generator}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, features, **draw).to(dtype)  # type: ignore[call-overload]
    head = (torch.randn(vocabulary, features, **draw) * features**-0.5).to(dtype)  # type: ignore[call-overload]
    labels = torch.randint(vocabulary, (tokens,), **draw)  # type: ignore[call-overload]
    labels[::8] = IGNORED
    return hidden.requires_grad_(), head.requires_grad_(), labels


def measure(
    loss: MeanLoss, inputs: tuple[Tensor, ...], smoothing: float, rounds: int
) -> tuple[float, float]:
    """Return time (s) and peak memory (bytes, NaN on CPUs) of a loss and its gradients."""
    hidden, head, labels = inputs
    on_gpu = hidden.is_cuda

    def call() -> None:
        hidden.grad = head.grad = None
        loss(hidden, head, labels, smoothing).backward()

    call()
    seconds = []
    if on_gpu:
        hidden.grad = head.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = math.nan
    if on_gpu:
        gradients = (hidden.numel() + head.numel()) * hidden.element_size()
        peak = torch.cuda.max_memory_allocated() - before - gradients
    return statistics.median(seconds), peak


def main() -> None:
    """Measure all variants and print the table."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    add("--features", type=int, default=4096)
    add("--vocabulary", type=int, default=128_256)
    add("--chunk", type=int, default=2048, help="tokens of a chunk")
    add("--smoothing", type=float, default=0.0)
    add("--rounds", type=int, default=5, help="timed calls of each variant")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    losses, omitted = variants(options.chunk, options.smoothing)
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}")
    for reason in omitted:
        print(f"left out: {reason}")
    print("\n".join(["", *heading("tokens", "variant", "ms", "TFLOP/s", "peak GiB")]), flush=True)
    for tokens in options.tokens:
        flops = 6.0 * tokens * options.features * options.vocabulary
        inputs = operands(tokens, options.features, options.vocabulary, options.device)
        for name, loss in losses.items():
            try:
                seconds, peak = measure(loss, inputs, options.smoothing, options.rounds)
                speed = flops / seconds / 1e12
                cells = f"{seconds * 1e3:.1f} | {speed:.0f} | {peak / 2**30:.2f}"
            except torch.OutOfMemoryError:
                inputs[0].grad = inputs[1].grad = None
                cells = "out of memory | |"
            print(f"| {tokens} | {name} | {cells} |", flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
