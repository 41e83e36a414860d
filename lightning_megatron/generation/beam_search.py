"""Beam search for the most probable continuations of prompts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.generation.stop_text import StopFunction
from lightning_megatron.shapes import Float, Int

#: Score that excludes a candidate, as in transformers.
_LOWEST = -1.0e9


class Candidates(NamedTuple):
    """Most probable continuations of the beams of each prompt, in descending order.

    Args:
        scores: Sum of the log-probabilities of all new tokens (nats).
        flat_indices: Index of the beam times the vocabulary size, plus the token id.
    """

    scores: Float[Tensor, "prompts candidates"]
    flat_indices: Int[Tensor, "prompts candidates"]


class BeamSearch:
    """Search for the best sequences of each prompt: its live beams and its best finished sequences.

    Equals the beam search of transformers with ``early_stopping=False``: the score of a sequence
    is its log-probability, divided by its number of new tokens to the power of ``length_penalty``.

    Args:
        vocab_size: Vocabulary size (tokens).
        stop_function: Function that takes the new tokens of a sequence and returns whether the
            sequence ends; None means that only stop tokens and ``max_new_tokens`` end it.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        num_prompts: int,
        vocab_size: int,
        device: torch.device,
        stop_function: StopFunction | None = None,
    ) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._stop_function = stop_function
        size = num_prompts, settings.beams
        self._stop_tokens = torch.tensor(settings.stop_tokens, dtype=torch.long, device=device)
        #: New tokens of the live beams. The beams of a prompt are identical at first, so all but
        #: the first one start with the score that excludes them.
        self._tokens = torch.zeros(
            num_prompts,
            settings.beams,
            settings.max_new_tokens,
            dtype=torch.long,
            device=device,
        )
        self._scores = torch.full(size, _LOWEST, device=device)
        self._scores[:, 0] = 0.0
        self._ended_tokens = torch.zeros_like(self._tokens)
        self._ended_scores = torch.full(size, _LOWEST, device=device)
        self._ended_lengths = torch.zeros(size, dtype=torch.long, device=device)
        self._has_ended = torch.zeros(size, dtype=torch.bool, device=device)
        self._may_improve = torch.ones(num_prompts, 1, dtype=torch.bool, device=device)
        self._length = 0
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """Return the number of candidates per prompt, enough even if some end their sequences."""
        most = self._settings.beams * self._vocab_size
        return min(most, self._settings.beams * max(2, 1 + len(self._settings.stop_tokens)))

    def candidates(self, logits: Float[Tensor, "rows vocab"] | None) -> Candidates:
        """Return the most probable continuations of the beams.

        Args:
            logits: Next-token logits of each beam, one prompt after the other; without them the
                values of the candidates are not set.
        """
        if logits is None:
            empty = self._scores.new_empty(len(self._scores), self.num_candidates)
            return Candidates(empty, torch.empty_like(empty, dtype=torch.long))
        log_probs = logits.float().log_softmax(-1).view(*self._scores.shape, -1)
        sums = (log_probs + self._scores[:, :, None]).flatten(1)
        return Candidates(*sums.topk(self.num_candidates))

    def advance(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Choose the next beams among candidates, and return their new tokens and parents.

        Args:
            candidates: Candidates, on all ranks those of the last pipeline stage.

        Returns:
            New token of each beam, and the row of the beam that it continues.
        """
        beams = self._settings.beams
        parents = candidates.flat_indices // self._vocab_size
        tokens = candidates.flat_indices % self._vocab_size
        sequences = _selected(self._tokens, parents)
        sequences[:, :, self._length] = tokens
        self._length += 1
        ends = self._ends(sequences, tokens)
        live_scores = candidates.scores + ends * _LOWEST
        chosen = live_scores.topk(beams).indices
        self._keep_ended(sequences, candidates.scores, ends)
        self._tokens = _selected(sequences, chosen)
        self._scores = live_scores.gather(1, chosen)
        best = self._scores[:, :1] / self._length**self._settings.length_penalty
        worst_ended = self._ended_scores.amin(1, keepdim=True)
        threshold = torch.where(self._has_ended, worst_ended, _LOWEST)
        self._may_improve = self._may_improve & (best > threshold).any(1, keepdim=True)
        self.is_over = bool(ends.all() | ~self._may_improve.any())
        first = torch.arange(len(parents), device=parents.device)[:, None] * beams
        return tokens.gather(1, chosen).flatten(), (parents.gather(1, chosen) + first).flatten()

    def best(self) -> list[list[int]]:
        """Return the new tokens of the best sequence of each prompt, a stop token included."""
        lengths = self._ended_lengths[:, 0].tolist()
        rows = self._ended_tokens[:, 0].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _ends(self, sequences: Tensor, tokens: Tensor) -> Tensor:
        """Return a mask of the candidates that end their sequences."""
        if self._length == self._settings.max_new_tokens:
            return torch.ones_like(tokens, dtype=torch.bool)
        ends = torch.isin(tokens, self._stop_tokens)
        if self._stop_function is not None:
            rows = sequences[:, :, : self._length].flatten(0, 1).tolist()
            stopped = torch.tensor([self._stop_function(row) for row in rows], device=tokens.device)
            ends = ends | stopped.view_as(ends)
        return ends

    def _keep_ended(self, sequences: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Keep the best finished sequences."""
        beams = self._settings.beams
        has_ended = ends.clone()
        # Only the best ``beams`` candidates may finish; the others replace live beams that ended.
        has_ended[:, beams:] = False
        scaled = scores / self._length**self._settings.length_penalty
        scaled = scaled + ~self._may_improve * _LOWEST + ~has_ended * _LOWEST
        every = torch.cat((self._ended_scores, scaled), 1)
        chosen = every.topk(beams).indices
        lengths = torch.full_like(has_ended, self._length, dtype=torch.long)
        self._ended_scores = every.gather(1, chosen)
        self._ended_tokens = _selected(torch.cat((self._ended_tokens, sequences), 1), chosen)
        self._ended_lengths = torch.cat((self._ended_lengths, lengths), 1).gather(1, chosen)
        self._has_ended = torch.cat((self._has_ended, has_ended), 1).gather(1, chosen)


def _selected(sequences: Tensor, index: Tensor) -> Tensor:
    return sequences.gather(1, index[:, :, None].expand(-1, -1, sequences.shape[2]))
