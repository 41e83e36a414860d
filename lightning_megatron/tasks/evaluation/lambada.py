"""LAMBADA: passages whose last word is predicted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.building_blocks import TextFiles
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.shapes import Int
from lightning_megatron.tasks.evaluation.wikitext import empty_row


class Passage(NamedTuple):
    """Text without its last word, and that word."""

    context: str
    word: str
    place: str


def read_passages(path: str | os.PathLike[str]) -> list[Passage]:
    """Read the passages of a file of JSON lines, ``{"text": ...}`` each.

    Args:
        path: File such as ``lambada_test.jsonl``, compressed (.gz) or not.
    """
    file = Path(path)
    if not file.is_file() or not {".jsonl", ".json", ".ndjson"} & set(file.suffixes):
        raise UnsupportedError(
            f"LAMBADA must be a file of JSON lines (.jsonl): {os.fspath(path)!r} is not. Give the "
            'path of a file with lines such as {"text": "... last word"}.'
        )
    passages = []
    for place, text in TextFiles([file]).texts("line", "text"):
        context, _, word = text.rstrip().replace("\n", " ").rpartition(" ")
        if not context.strip():
            raise CorruptDataError(
                f"{place} has fewer than two words: {text[:60]!r}. A passage has a context and a "
                "last word. Remove the line."
            )
        passages.append(Passage(context.rstrip(), word, place))
    if not passages:
        raise CorruptDataError(f"{path} has no passage. Copy it again.")
    return passages


class ClozeRows(Dataset):
    """Dataset of passages in which only the tokens of the last word are labels.

    The last word, with the space before it, and the context are encoded separately, so that the
    tokens of the context do not depend on the word.

    Shapes: An item is {"tokens": (S,), "labels": (S,)}; S is the length of the longest passage.

    Args:
        encode: Function that returns the token ids of a text.
        window: Maximum number of tokens that the model reads; None means any number (tokens).
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        encode: Callable[[str], list[int]],
        window: int | None = None,
    ) -> None:
        self._rows: list[tuple[list[int], int]] = []
        for passage in passages:
            context = encode(passage.context)
            word = encode(f" {passage.word}")
            if not context or not word:
                raise CorruptDataError(
                    f"{passage.place} has a context of {len(context)} tokens and a last word of "
                    f"{len(word)}: both need one. Remove the line, or use another tokenizer."
                )
            # The model does not read the last token, which is only a label.
            length = len(context) + len(word) - 1
            if window is not None and length > window:
                raise ParallelPlanError(
                    f"{passage.place} has {length} tokens before its last one, more than the "
                    f"window ({window}). Use a larger window."
                )
            self._rows.append((context + word, len(word)))
        #: Length of every row (tokens).
        self.window = max(len(tokens) for tokens, _ in self._rows) - 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Int[Tensor, "window"]]:
        tokens, num_scored = self._rows[index]
        sequence = torch.tensor(tokens, dtype=torch.int64)
        row = empty_row(self.window)
        end = len(tokens) - 1
        row["tokens"][:end] = sequence[:-1]
        row["labels"][end - num_scored : end] = sequence[-num_scored:]
        return row
