"""Settings of text generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, Positive, Range, coerce_fields


@dataclass(frozen=True)
class GenerationSettings:
    """How prompts are continued.

    Args:
        max_new_tokens: Most tokens that follow a prompt (tokens).
        sample: Whether tokens are drawn at random; otherwise the likeliest token follows.
        temperature: Divisor of the logits before a draw.
        top_k: Number of likeliest tokens among which a draw chooses; None means all (tokens).
        top_p: Probability that the likeliest tokens must reach together, among which a draw
            chooses; 1 means all.
        stop_tokens: Tokens that end a row. They are the last ones that it gets.
        seed: Seed of the draws, equal on all ranks.
        beams: Beams of a beam search, which looks for the likeliest words instead of the likeliest
            next token; 1 means none.
        length_penalty: Power of the number of new tokens by which the score of a beam is divided;
            above 0 it favours long words.
        record: Whether passes of single tokens run as one CUDA graph on a GPU, where the model and
            the layout allow it; the log says why not. Without ranks that share the model, experts,
            longrope, ALiBi, soft caps, sinks and products in 8 bits only.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or beams are to be drawn.
    """

    max_new_tokens: Count = 64
    sample: bool = False
    temperature: Positive = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    stop_tokens: tuple[Index, ...] = ()
    seed: Index = 0
    beams: Count = 1
    length_penalty: float = 1.0
    record: bool = True

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.sample and self.beams > 1:
            raise ParallelPlanError(
                f"a beam search cannot draw tokens: beams is {self.beams} and sample is true. Its "
                "beams are the likeliest words. Use beams=1, or sample=False."
            )
