"""Padded rows of prompts of unequal lengths and of the tokens generated after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.plan.settings import shown
from lightning_megatron.shapes import Int


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Left-padded prompts, and the tokens generated after them.

    The padding makes all prompts end at the same position.

    Args:
        padding: Padding before each prompt; None means no padding (tokens).
    """

    tokens: Int[Tensor, "batch seq"]
    padding: Int[Tensor, " batch"] | None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        num_rows: int,
        length: int,
    ) -> PromptRows:
        """Return the padded rows of prompts.

        Args:
            num_rows: Number of rows; filler rows of zeros follow the rows of the prompts.
            length: Length of the rows, at least that of the longest prompt (tokens).
        """
        with_fillers = [*prompts, *[[0] * length] * (num_rows - len(prompts))]
        counts = [length - len(prompt) for prompt in with_fillers]
        rows = [[0] * count + list(row) for count, row in zip(counts, with_fillers, strict=True)]
        padding = torch.tensor(counts, device=device) if any(counts) else None
        return cls(torch.tensor(rows, device=device), padding)

    def prefill_inputs(
        self, cache: KeyValueCache, multiple: int = 1
    ) -> tuple[Tensor, AttentionSpan]:
        """Return the tokens of the prompts, and the attention span that stores them in a cache.

        Padding is appended until ``multiple`` divides the length of the rows (tokens).
        """
        count = self.tokens.shape[1]
        tokens = F.pad(self.tokens, (0, -count % multiple))
        past = CachedTokens(cache, count)
        if self.padding is None:
            return tokens, AttentionSpan(past=past)
        lengths = torch.stack((self.padding, tokens.shape[1] - self.padding), 1)
        positions = self._positions(0, tokens.shape[1])
        return tokens, AttentionSpan(lengths, positions=positions, restarts=False, past=past)

    def appended(self, tokens: Int[Tensor, " batch"]) -> PromptRows:
        """Return the rows with one more token each."""
        return replace(self, tokens=torch.cat((self.tokens, tokens[:, None]), 1))

    def reordered(self, rows: Int[Tensor, " _"]) -> PromptRows:
        """Return the rows after copies of other rows have replaced the first ones.

        Args:
            rows: Index of the row to copy to each of the first rows. Both must have the same
                prompt.
        """
        rest = torch.arange(len(rows), len(self.tokens), device=rows.device)
        return replace(self, tokens=self.tokens[torch.cat((rows, rest))])

    def decode_inputs(
        self, cache: KeyValueCache, multiple: int = 1
    ) -> tuple[Tensor, AttentionSpan]:
        """Return the last token of each row, and its attention span after the cached tokens.

        Padding is appended as by :meth:`prefill_inputs`.
        """
        tokens = F.pad(self.tokens[:, -1:], (0, -1 % multiple))
        visible = None
        if self.padding is not None:
            index = torch.arange(cache.length + 1, device=tokens.device)
            visible = index >= self.padding[:, None]
        positions = self._positions(cache.length, tokens.shape[1])
        return tokens, AttentionSpan(positions=positions, past=CachedTokens(cache, 1, visible))

    def _positions(self, first: int, length: int) -> Tensor:
        """Return each token's position in its row; padding has that of the nearest token."""
        last = self.tokens.shape[1] - 1
        index = torch.arange(first, first + length, device=self.tokens.device).clamp(max=last)
        if self.padding is None:
            return index.expand(len(self.tokens), length)
        return (index - self.padding[:, None]).clamp(min=0)


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise if a model cannot read a prompt.

    Args:
        vocab_size: Vocabulary size (tokens).
    """
    if not prompts:
        raise UnsupportedError("generate needs at least one prompt: there is none. Pass one.")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UnsupportedError(
                f"a prompt needs at least one token, because the logits of its last token give the "
                f"first new one: prompt {number} is empty. Start it with the beginning-of-text "
                "token."
            )
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise UnsupportedError(
                f"token ids must be from 0 to {vocab_size - 1}, the vocabulary of the model: "
                f"prompt {number} has {shown(wrong[0])}. Use the tokenizer of the model."
            )
