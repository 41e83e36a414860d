"""Search for the likeliest words among several beams of each prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.generation.stop_text import StopFunction
from lightning_megatron.shapes import Float, Int

#: Score of what must not be chosen, as in transformers.
_LOWEST = -1.0e9


class Candidates(NamedTuple):
    """Likeliest continuations of the beams of each prompt, in falling order.

    Args:
        scores: Logarithm of the probability of all new tokens.
        places: Beam times the vocabulary plus the token.
    """

    scores: Float[Tensor, "prompts kept"]
    places: Int[Tensor, "prompts kept"]


class BeamSearch:
    """Beams of each prompt, and the best of those that have ended.

    Equal to the beam search of transformers with ``early_stopping=False``: the score of words is
    the logarithm of their probability, divided by their number to the power of ``length_penalty``.

    Args:
        settings: Number of beams, length penalty, and when to stop.
        num_prompts: Number of prompts.
        vocab_size: The vocabulary (tokens).
        device: Device of the logits.
        stops: Function that says whether tokens end a row; None means none does.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        num_prompts: int,
        vocab_size: int,
        device: torch.device,
        stops: StopFunction | None = None,
    ) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._stops = stops
        size = num_prompts, settings.beams
        most = settings.max_new_tokens
        self._stop_tokens = torch.tensor(settings.stop_tokens, dtype=torch.long, device=device)
        #: Beams that go on. At first all but one of a prompt would say the same.
        self._words = torch.zeros(*size, most, dtype=torch.long, device=device)
        self._scores = torch.full(size, _LOWEST, device=device)
        self._scores[:, 0] = 0.0
        self._ended_words = torch.zeros_like(self._words)
        self._ended_scores = torch.full(size, _LOWEST, device=device)
        self._ended_lengths = torch.zeros(size, dtype=torch.long, device=device)
        self._has_ended = torch.zeros(size, dtype=torch.bool, device=device)
        self._may_improve = torch.ones(num_prompts, 1, dtype=torch.bool, device=device)
        self._length = 0
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """Return the continuations of a prompt of which enough go on if others end."""
        most = self._settings.beams * self._vocab_size
        return min(most, self._settings.beams * max(2, 1 + len(self._settings.stop_tokens)))

    def candidates(self, logits: Float[Tensor, "rows vocab"]) -> Candidates:
        """Return the likeliest continuations of the beams.

        Args:
            logits: Logits of the next token of each beam, one prompt after the other.
        """
        chances = logits.float().log_softmax(-1).view(*self._scores.shape, -1)
        sums = (chances + self._scores[:, :, None]).flatten(1)
        return Candidates(*sums.topk(self.num_candidates))

    def advance(self, given: Candidates) -> tuple[Tensor, Tensor]:
        """Choose among continuations, and return the next token of each beam and what it follows.

        Args:
            given: Continuations; on all ranks those of the last stage.

        Returns:
            Token of each beam, and the row of the beam whose tokens come before it.
        """
        beams = self._settings.beams
        parents = given.places // self._vocab_size
        tokens = given.places % self._vocab_size
        words = _picked(self._words, parents)
        words[:, :, self._length] = tokens
        self._length += 1
        ends = self._ends(words, tokens)
        going = given.scores + ends * _LOWEST
        chosen = going.topk(beams).indices
        self._keep_ended(words, given.scores, ends)
        self._words = _picked(words, chosen)
        self._scores = going.gather(1, chosen)
        best = self._scores[:, :1] / self._length**self._settings.length_penalty
        least = self._ended_scores.amin(1, keepdim=True)
        bar = torch.where(self._has_ended, least, _LOWEST)
        self._may_improve = self._may_improve & (best > bar).any(1, keepdim=True)
        self.is_over = bool(ends.all() | ~self._may_improve.any())
        first = torch.arange(len(parents), device=parents.device)[:, None] * beams
        return tokens.gather(1, chosen).flatten(), (parents.gather(1, chosen) + first).flatten()

    def best(self) -> list[list[int]]:
        """Return the best words of each prompt, a stop token included."""
        lengths = self._ended_lengths[:, 0].tolist()
        rows = self._ended_words[:, 0].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _ends(self, words: Tensor, tokens: Tensor) -> Tensor:
        """Return which continuations are the last of their rows."""
        if self._length == self._settings.max_new_tokens:
            return torch.ones_like(tokens, dtype=torch.bool)
        ends = torch.isin(tokens, self._stop_tokens)
        if self._stops is not None:
            rows = words[:, :, : self._length].flatten(0, 1).tolist()
            found = torch.tensor([self._stops(row) for row in rows], device=tokens.device)
            ends = ends | found.view_as(ends)
        return ends

    def _keep_ended(self, words: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Keep the best of the rows that have ended."""
        beams = self._settings.beams
        has_ended = ends.clone()
        # Continuations after the first ones are there to go on.
        has_ended[:, beams:] = False
        scaled = scores / self._length**self._settings.length_penalty
        scaled = scaled + ~self._may_improve * _LOWEST + ~has_ended * _LOWEST
        every = torch.cat((self._ended_scores, scaled), 1)
        chosen = every.topk(beams).indices
        lengths = torch.full_like(has_ended, self._length, dtype=torch.long)
        self._ended_scores = every.gather(1, chosen)
        self._ended_words = _picked(torch.cat((self._ended_words, words), 1), chosen)
        self._ended_lengths = torch.cat((self._ended_lengths, lengths), 1).gather(1, chosen)
        self._has_ended = torch.cat((self._has_ended, has_ended), 1).gather(1, chosen)


def _picked(words: Tensor, index: Tensor) -> Tensor:
    return words.gather(1, index[:, :, None].expand(-1, -1, words.shape[2]))
