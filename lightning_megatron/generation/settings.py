"""Settings of text generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, Positive, Range, coerce_fields


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of sampling, beam search and the end of rows.

    Args:
        max_new_tokens: Maximum number of new tokens per prompt (tokens).
        sample: Whether to sample tokens; otherwise the most probable token is chosen.
        temperature: Divisor of the logits before sampling.
        top_k: Number of most probable tokens to sample from; None means all (tokens).
        top_p: Cumulative probability of the most probable tokens to sample from; 1 means all
            tokens.
        stop_tokens: Token ids that end a row. A stop token is part of its row.
        seed: Seed of sampling, equal on all ranks.
        beams: Number of beams of a beam search, which looks for the most probable sequence instead
            of the most probable next token; 1 means no beam search.
        length_penalty: Exponent of the number of new tokens, by which the score of a beam is
            divided; values above 0 favour long sequences.
        cuda_graph: Whether forward passes over one token per row run as one CUDA graph on a GPU.
            Models with experts, longrope, ALiBi, soft caps, attention sinks or 8-bit matrix
            products, and layouts with pp, cp or sequence parallelism, run without a graph; the log
            gives the reason.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or ``sample`` is combined
            with a beam search.
    """

    max_new_tokens: Count = 64
    sample: bool = False
    temperature: Positive = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Range(above=0, maximum=1)] = 1.0
    stop_tokens: tuple[Index, ...] = ()
    seed: Index = 0
    beams: Count = 1
    length_penalty: float = 1.0
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.sample and self.beams > 1:
            raise ParallelPlanError(
                f"a beam search cannot sample tokens: beams is {self.beams} and sample is true. "
                "The beams are the most probable sequences. Use beams=1, or sample=False."
            )
