"""Padded rows of prompts of unequal lengths and of the tokens generated after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.plan.settings import shown
from lightning_megatron.shapes import Int


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Prompts with padding on their left, and the tokens generated after them.

    The padding makes all prompts end at the same position.

    Args:
        tokens: Tokens of the prompts, and the new tokens.
        before: Padding before each prompt; None means none (tokens).
        multiple: Number of which the row length of the first call must be a multiple; padding is
            appended to reach it (tokens).
        later_multiple: The same for later calls (tokens).
    """

    tokens: Int[Tensor, "batch seq"]
    before: Int[Tensor, " batch"] | None
    multiple: int = 1
    later_multiple: int = 1

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        num_rows: int,
        length: int,
        multiple: int = 1,
        later_multiple: int = 1,
    ) -> PromptRows:
        """Return the padded rows of prompts.

        Args:
            prompts: Token ids of each prompt.
            device: Device of the model.
            num_rows: Number of rows; the rows after those of the prompts are fillers.
            length: Length of the rows, at least that of the longest prompt (tokens).
            multiple: Number of which the row length of the first call must be a multiple (tokens).
            later_multiple: The same for later calls (tokens).
        """
        filled = [*prompts, *[[0] * length] * (num_rows - len(prompts))]
        before = [length - len(prompt) for prompt in filled]
        rows = [[0] * extra + list(row) for extra, row in zip(before, filled, strict=True)]
        padding = torch.tensor(before, device=device) if any(before) else None
        return cls(torch.tensor(rows, device=device), padding, multiple, later_multiple)

    def first(self, cache: KeyValueCache) -> tuple[Tensor, AttentionSpan]:
        """Return the tokens of the prompts, and the span that makes the model cache them.

        Args:
            cache: Empty cache.
        """
        count = self.tokens.shape[1]
        tokens = F.pad(self.tokens, (0, -count % self.multiple))
        past = CachedTokens(cache, count)
        if self.before is None:
            return tokens, AttentionSpan(past=past)
        lengths = torch.stack((self.before, tokens.shape[1] - self.before), 1)
        positions = self._positions(0, tokens.shape[1])
        return tokens, AttentionSpan(lengths, positions=positions, restarts=False, past=past)

    def followed_by(self, tokens: Int[Tensor, " batch"]) -> PromptRows:
        """Return the rows with one more token each.

        Args:
            tokens: Next token of each row.
        """
        return replace(self, tokens=torch.cat((self.tokens, tokens[:, None]), 1))

    def reordered(self, rows: Int[Tensor, " _"]) -> PromptRows:
        """Return the rows, with the first ones replaced by copies of others.

        Args:
            rows: For each replaced row the index of the row to copy, which must have the same
                prompt.
        """
        rest = torch.arange(len(rows), len(self.tokens), device=rows.device)
        return replace(self, tokens=self.tokens[torch.cat((rows, rest))])

    def last(self, cache: KeyValueCache) -> tuple[Tensor, AttentionSpan]:
        """Return the last token of each row, and its attention span after the cached tokens.

        Args:
            cache: Cache of all earlier tokens.
        """
        tokens = F.pad(self.tokens[:, -1:], (0, -1 % self.later_multiple))
        visible = None
        if self.before is not None:
            index = torch.arange(cache.length + 1, device=tokens.device)
            visible = index >= self.before[:, None]
        positions = self._positions(cache.length, tokens.shape[1])
        return tokens, AttentionSpan(positions=positions, past=CachedTokens(cache, 1, visible))

    def _positions(self, first: int, length: int) -> Tensor:
        """Return the position of each token in its row; padding has that of the nearest token."""
        last = self.tokens.shape[1] - 1
        index = torch.arange(first, first + length, device=self.tokens.device).clamp(max=last)
        if self.before is None:
            return index.expand(len(self.tokens), length)
        return (index - self.before[:, None]).clamp(min=0)


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise if a model cannot read a prompt.

    Args:
        prompts: Token ids of each prompt.
        vocab_size: Vocabulary size (tokens).

    Raises:
        UnsupportedError: If there is no prompt, or one is empty or has a token outside the
            vocabulary.
    """
    if not prompts:
        raise UnsupportedError("generate needs at least one prompt: there is none. Pass one.")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UnsupportedError(
                f"a prompt needs at least one token, whose logits give the next one: prompt "
                f"{number} is empty. Start it with the beginning-of-text token."
            )
        wrong = [one for one in prompt if not 0 <= one < vocab_size]
        if wrong:
            raise UnsupportedError(
                f"token ids must be from 0 to {vocab_size - 1}, the model's vocabulary: prompt "
                f"{number} has {shown(wrong[0])}. Use the tokenizer of the model."
            )
