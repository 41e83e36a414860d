"""Bitwise reproducibility of attention's backward pass, alone and beside other GPU work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.config import GPTConfig


def attention_repeats(
    config: GPTConfig, device: torch.device, repeats: int = 40
) -> tuple[int, int | None]:
    """Count the runs of attention's backward pass whose bits differ from the first run.

    Args:
        config: Model that gives the number of heads and the sequence length.
        device: Device that computes.
        repeats: Number of runs after the first run.

    Returns:
        Number of differing runs without other work, and number of differing runs while matrix
        products on another stream occupy multiprocessors; the second is None on a CPU.
    """
    generator = torch.Generator(device).manual_seed(3)

    def drawn(heads: int) -> Tensor:
        shape = (config.max_seq_length, 1, heads, config.head_size)
        values = torch.randn(shape, device=device, generator=generator)
        return values.bfloat16().requires_grad_()

    query, key, value = (
        drawn(heads) for heads in (config.num_heads, config.kv_heads, config.kv_heads)
    )
    grad_output = drawn(config.num_heads).detach().flatten(2)

    def gradients() -> tuple[Tensor, ...]:
        output = attend(query, key, value, AttentionSpan())
        return torch.autograd.grad(output, (query, key, value), grad_output)

    first_gradients = gradients()

    def count(start_other_work: Callable[[], None]) -> int:
        num_differing = 0
        for _ in range(repeats):
            start_other_work()
            pairs = zip(gradients(), first_gradients, strict=True)
            num_differing += not all(torch.equal(*pair) for pair in pairs)
        return num_differing

    num_differing_alone = count(lambda: None)
    if device.type != "cuda":
        return num_differing_alone, None
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()

    def multiply() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                torch.mm(factor, factor)

    stream.wait_stream(torch.cuda.current_stream())
    return num_differing_alone, count(multiply)
