"""Greedy decoding and sampling of the next token from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.shapes import Float, Int

#: Logits of a group.
_GROUP = 256


class Sampler:
    """Choose the most probable token, or sample a token.

    Ranks with the same logits choose the same tokens, because their random number generators have
    the same seed.

    Args:
        settings: Settings of sampling.
        device: Device of the logits.
    """

    def __init__(self, settings: GenerationSettings, device: torch.device) -> None:
        self.settings = settings
        self._generator = torch.Generator(device).manual_seed(settings.seed)

    def __call__(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """Return the next token of each row.

        Args:
            logits: Next-token logits of each row.
        """
        if not self.settings.sample:
            return argmax(logits)
        probabilities = sampling_logits(logits.float(), self.settings).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]


def argmax(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Return the index of a largest logit of each row.

    Equals ``logits.argmax(-1)``. The logits of a row are first divided into groups, because a
    reduction of few long rows uses few multiprocessors of a GPU.

    Args:
        logits: Logits of each row.
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

    Args:
        logits: Next-token logits.
        settings: Settings of sampling.
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
