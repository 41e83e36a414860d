"""Continuation of prompts with a model placed under a layout, and output of the new text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import nn

from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.generation.decoding import generate, generated_tokens, gpt_of
from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.generation.stop_text import StopStrings, TextStream
from lightning_megatron.groups.collectives import all_gather_objects


class PromptText(NamedTuple):
    """Prompt, as text and as tokens."""

    text: str
    tokens: list[int]


class SampledRow(NamedTuple):
    """Row of a batch: one sample of one prompt."""

    prompt: int
    sample: int


@dataclass(frozen=True)
class TextGeneration:
    """Function that continues prompts with a model and prints the result on the first rank.

    Rows are divided into batches, which the data-parallel replicas process in turn. The result
    depends on the batches, not on the layout.

    Args:
        stop_strings: Strings that end a row; they are not printed.
        batch_size: Number of rows that a replica continues at once (rows).
        prints_json: Whether each row is printed as a JSON object on one line.
        is_chat: Whether the new text is an answer to the prompt, printed without it, and not its
            continuation.
    """

    prompts: Sequence[PromptText]
    tokenizer: Tokenizer
    settings: GenerationSettings
    stop_strings: tuple[str, ...] = ()
    num_samples: int = 1
    batch_size: int = 1
    prints_json: bool = False
    is_chat: bool = False

    def __call__(self, model: nn.Module) -> None:
        """Continue the prompts and print them; all ranks call this.

        Communication: that of the model, and one gather of objects over dp for each round of
            batches.
        """
        mesh = gpt_of(model).mesh
        prints = mesh.rank == 0
        batches = self.batches()
        for first in range(0, len(batches), mesh.dp.size):
            number = first + mesh.dp.rank
            has_own = number < len(batches)
            # Replicas that share experts must all run, so a replica without a batch repeats the
            # first batch of the round.
            batch = batches[number] if has_own else batches[first]
            continuations = self._continued(
                model, batch, number if has_own else first, streams=prints and not self.prints_json
            )
            all_continuations = all_gather_objects(continuations if has_own else [], mesh.dp_cpu)
            if prints:
                self._print_rows(batches[first : first + mesh.dp.size], all_continuations)

    def answer(self, model: nn.Module, number: int, *, prints: bool) -> str:
        """Continue the first prompt, print the new text meanwhile, and return it.

        Args:
            number: Number of the answers before, which sampling depends on.
        """
        row = SampledRow(0, 0)
        [tokens] = self._continued(model, [row], number, streams=prints)
        return self.text_of(row, tokens)

    def batches(self) -> list[list[SampledRow]]:
        """Return the rows of each batch."""
        samples = range(self.num_samples)
        rows = [
            SampledRow(prompt, sample) for prompt in range(len(self.prompts)) for sample in samples
        ]
        size = self.batch_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def text_of(self, row: SampledRow, tokens: Sequence[int]) -> str:
        """Return the text of the new tokens of a row."""
        stream = self._stream(row)
        return "".join([*map(stream.push, self._spoken(tokens)), stream.finish()])

    def _continued(
        self, model: nn.Module, batch: Sequence[SampledRow], number: int, *, streams: bool
    ) -> list[list[int]]:
        """Return the new tokens of each row; with ``streams``, print the first row meanwhile."""
        prompts = [self.prompts[row.prompt].tokens for row in batch]
        settings = replace(self.settings, seed=seed_of_batch(self.settings.seed, number))
        stops = None
        if self.stop_strings:
            stops = StopStrings(self.tokenizer.decode, self.stop_strings)
        if streams:
            self._print_head(batch[0])
        stream = self._stream(batch[0])
        if settings.beams > 1:
            continuations = generate(model, prompts, settings, stops)
            if streams:
                _say(self.text_of(batch[0], continuations[0]) + "\n")
            return continuations
        continuations = [[] for _ in batch]
        for tokens in generated_tokens(model, prompts, settings, stops):
            for row, token in zip(continuations, tokens, strict=True):
                row.extend([] if token is None else [token])
            if streams and tokens[0] is not None:
                _say("".join(map(stream.push, self._spoken([tokens[0]]))))
        if streams:
            _say(stream.finish() + "\n")
        return continuations

    def _print_rows(
        self,
        batches: Sequence[Sequence[SampledRow]],
        continuations: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        """Print the rows of a round; as plain text, all but the first, which was streamed."""
        rows = self._joined(batches, continuations)
        if not self.prints_json:
            next(rows)
        for row, tokens in rows:
            if self.prints_json:
                _say(json.dumps(self._described(row, tokens), ensure_ascii=False) + "\n")
                continue
            self._print_head(row)
            _say(self.text_of(row, tokens) + "\n")

    @staticmethod
    def _joined(
        batches: Sequence[Sequence[SampledRow]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[tuple[SampledRow, Sequence[int]]]:
        # Replicas without a batch come last in the round.
        for batch, rows in zip(batches, continuations, strict=False):
            yield from zip(batch, rows, strict=True)

    def _described(self, row: SampledRow, tokens: Sequence[int]) -> dict[str, object]:
        text = self.text_of(row, tokens)
        has_stopped = tokens[-1] in self.settings.stop_tokens or (
            bool(self.stop_strings)
            and StopStrings(self.tokenizer.decode, self.stop_strings)(tokens)
        )
        return {
            "prompt": self.prompts[row.prompt].text,
            "sample": row.sample,
            "text": text,
            "tokens": list(tokens),
            "finish_reason": "stop" if has_stopped else "length",
        }

    def _print_head(self, row: SampledRow) -> None:
        has_others = len(self.prompts) * self.num_samples > 1
        if has_others:
            _say(f"=== prompt {row.prompt + 1}, sample {row.sample + 1}\n")
        text = self.prompts[row.prompt].text
        if not self.is_chat:
            _say(text)
        elif has_others:
            _say(f"{text}\n")

    def _stream(self, row: SampledRow) -> TextStream:
        before = self.prompts[row.prompt].tokens
        return TextStream(self.tokenizer.decode, self.stop_strings, before)

    def _spoken(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self.settings.stop_tokens]


def seed_of_batch(seed: int, number: int) -> int:
    """Return the seed for sampling in a batch; batch 0 uses the seed of the run."""
    if number == 0:
        return seed
    # The shift drops one bit, because generation settings accept seeds below 2^31.
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
