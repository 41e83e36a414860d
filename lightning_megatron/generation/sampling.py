"""Choice of the next token from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.shapes import Float, Int


class Sampler:
    """Choose the likeliest token, or draw one.

    Ranks with the same logits choose the same tokens, because their draws have the same seed.

    Args:
        settings: Settings of the draws.
        device: Device of the logits.
    """

    def __init__(self, settings: GenerationSettings, device: torch.device) -> None:
        self.settings = settings
        self._generator = torch.Generator(device).manual_seed(settings.seed)

    def __call__(self, logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
        """Return the next token of each row.

        Args:
            logits: Logits of the last token of each row.
        """
        wide = logits.float()
        if not self.settings.sample:
            return wide.argmax(-1)
        weights = weighed(wide, self.settings).softmax(-1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]


def weighed(
    logits: Float[Tensor, "batch vocab"], settings: GenerationSettings
) -> Float[Tensor, "batch vocab"]:
    """Return logits of whose softmax a token is drawn: minus infinity for those that are left out.

    Equal to Hugging Face's processors of temperature, then top-k, then top-p.

    Args:
        logits: Logits of the next token.
        settings: Settings of the draws.
    """
    logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[-1]:
        least = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if settings.top_p < 1.0:
        ordered, index = logits.sort(descending=False)
        # A token stays if those that are likelier do not reach top_p. The likeliest always does.
        is_rare = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        is_rare[:, -1] = False
        logits = logits.masked_fill(is_rare.scatter(1, index, is_rare), -torch.inf)
    return logits
