"""Settings of text generation, and the choice of the next token: greedy or sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, Positive, Range, coerce_fields
from lightning_megatron.shapes import Float, Int

#: Logits of a group.
_GROUP = 256


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
        ParallelPlanError: If a value has a wrong type, is out of range or has no effect, or
            ``sample`` is combined with a beam search.
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
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1.0, None, 1.0):
            raise ParallelPlanError(
                f"temperature ({self.temperature}), top_k ({self.top_k}) and top_p ({self.top_p}) "
                "need sample: without it the most probable tokens follow, and nothing is drawn. "
                "Set sample=True, or leave them out."
            )
        if self.length_penalty != 1.0 and self.beams == 1:
            raise ParallelPlanError(
                f"length_penalty ({self.length_penalty}) needs beams: only beams of unequal "
                "lengths are compared. Set beams=4, or leave it out."
            )


class Sampler:
    """Choose the most probable token, or sample a token.

    Ranks with the same logits choose the same tokens, because their random number generators have
    the same seed.
    """

    def __init__(self, settings: GenerationSettings, device: torch.device) -> None:
        self.settings = settings
        self._generator = torch.Generator(device).manual_seed(settings.seed)

    def __call__(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """Return the next token of each row."""
        if not self.settings.sample:
            return argmax(logits)
        probabilities = sampling_logits(logits.float(), self.settings).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]


def argmax(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Return the index of a largest logit of each row.

    Equals ``logits.argmax(-1)``. The logits of a row are first divided into groups, because a
    reduction of few long rows uses few multiprocessors of a GPU.
    """
    if logits.shape[-1] % _GROUP:
        return logits.argmax(-1)
    peaks, places = logits.unflatten(-1, (-1, _GROUP)).max(-1)
    group = peaks.argmax(-1, keepdim=True)
    return (group * _GROUP + places.gather(-1, group))[:, 0]


def sampling_logits(
    logits: Float[Tensor, "batch vocab"], settings: GenerationSettings
) -> Float[Tensor, "batch vocab"]:
    """Return logits for sampling: scaled, and minus infinity for tokens that are excluded.

    Equals the logits processors of Hugging Face for temperature, then top-k, then top-p.
    """
    logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        smallest = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if settings.top_p < 1.0:
        ordered, index = logits.sort(descending=False)
        # A token is kept if the probabilities of all more probable tokens sum to less than top_p.
        # The most probable token is always kept.
        is_excluded = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        is_excluded[:, -1] = False
        logits = logits.masked_fill(is_excluded.scatter(1, index, is_excluded), -torch.inf)
    return logits
