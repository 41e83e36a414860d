"""Greedy or random choice of the next token from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.shapes import Float, Int


class Sampler:
    """Choose the most probable token, or sample one.

    Ranks with the same logits choose the same tokens, because their generators have the same seed.

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
        wide = logits.float()
        if not self.settings.sample:
            return wide.argmax(-1)
        weights = weighed(wide, self.settings).softmax(-1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]


def weighed(
    logits: Float[Tensor, "batch vocab"], settings: GenerationSettings
) -> Float[Tensor, "batch vocab"]:
    """Return logits for sampling: minus infinity for tokens that top-k or top-p excludes.

    Equal to the logits processors of Hugging Face for temperature, then top-k, then top-p.

    Args:
        logits: Next-token logits.
        settings: Settings of sampling.
    """
    logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        least = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if settings.top_p < 1.0:
        ordered, index = logits.sort(descending=False)
        # A token stays if the more probable tokens do not reach top_p. The most probable one
        # always stays.
        is_rare = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        is_rare[:, -1] = False
        logits = logits.masked_fill(is_rare.scatter(1, index, is_rare), -torch.inf)
    return logits
