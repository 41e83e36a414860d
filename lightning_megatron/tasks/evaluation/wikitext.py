"""WikiText: detokenization, word count and overlapping windows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.building_blocks import IGNORED
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.shapes import Int

#: Patterns that the tokenizer of WikiText left in the text, and their replacements, in order. The
#: published perplexities use the same rules, so that results are comparable.
_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    # numbers and compounds
    (r" @([-,.])@ ", r"\1"),
    # signs that follow a word
    *(
        (rf" {sign} ", f"{sign.removeprefix(chr(92))} ")
        for sign in (":", ";", r"\.", "!", r"\?", ",")
    ),
    # brackets and quotation marks, without the spaces inside them
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    # headings, degrees, ends of lines, numbers that were replaced, genitives
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_COMPILED = tuple((re.compile(pattern), result) for pattern, result in _RULES)


def detokenize(text: str) -> str:
    """Convert WikiText to plain text, without the marks and spaces that its tokenizer added.

    Args:
        text: Text of WikiText-2 or WikiText-103.
    """
    for pattern, result in _COMPILED:
        text = pattern.sub(result, text)
    return text


def count_words(text: str) -> int:
    """Count the words by which the perplexity of a text is normalised (words).

    Spaces separate words. As in the published figures, the end of a line counts as a word; the test
    set of WikiText-103 has 245,566 words.
    """
    return len(text.strip().split(" "))


class WikiText(NamedTuple):
    """Text of one split of WikiText, or another text.

    Args:
        num_words: Number of words of the original text (words).
    """

    text: str
    num_words: int


def read_wikitext(path: str | os.PathLike[str], *, is_plain: bool = False) -> WikiText:
    """Read one split of WikiText, or another text.

    Args:
        path: Text file, such as ``wiki.test.tokens`` or ``wiki.test.raw``.
        is_plain: Whether the text is plain text, which is not detokenized.
    """
    file = Path(path)
    if not file.is_file():
        raise UnsupportedError(
            f"the text to evaluate on must be a file: {os.fspath(path)!r} is not. Give the path of "
            "a text file."
        )
    lines = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CorruptDataError(
                f"{path}:{number} is not UTF-8: {error.reason} at byte {error.start}. Convert it."
            ) from None
    text = "".join(lines)
    if not text.strip():
        raise CorruptDataError(f"{path} has no word in {len(lines)} lines. Copy it again.")
    return WikiText(text if is_plain else detokenize(text), count_words(text))


class SlidingWindows(Dataset):
    """Dataset of windows of a long text that scores each token after the first exactly once.

    The first window scores all its labels. Each later window starts ``stride`` tokens after the
    previous one and scores only its last ``stride`` labels, which have at least ``window - stride``
    tokens of context. With ``stride`` equal to ``window``, the windows do not overlap.

    Shapes: An item is {"tokens": (S,), "labels": (S,)}, with S = ``window``.

    Args:
        window: Length of the windows that the model reads (tokens).
        stride: Number of tokens by which windows advance; the paper calls it overlap and uses 32
            (tokens).

    Source: Shoeybi et al. 2019, appendix E.1.
    """

    def __init__(self, tokens: Sequence[int], window: int, stride: int) -> None:
        if not 1 <= stride <= window:
            raise ParallelPlanError(
                f"stride ({stride}) must be at least 1 and at most the window ({window}), because "
                "a larger one leaves tokens without a score. Use a smaller stride."
            )
        if len(tokens) < 2:
            raise CorruptDataError(
                "a text must have at least two tokens, because the first one is not predicted: it "
                f"has {len(tokens)}. Use a longer text."
            )
        self.tokens = torch.tensor(tokens, dtype=torch.int64)
        self.window = window
        self.stride = stride

    @property
    def num_targets(self) -> int:
        """Number of scored tokens: all tokens but the first (tokens)."""
        return len(self.tokens) - 1

    def __len__(self) -> int:
        further = max(self.num_targets - self.window, 0)
        return 1 - (-further // self.stride)

    def __getitem__(self, index: int) -> dict[str, Int[Tensor, "window"]]:
        start = index * self.stride
        piece = self.tokens[start : start + self.window + 1]
        row = empty_row(self.window)
        row["tokens"][: len(piece) - 1] = piece[:-1]
        row["labels"][: len(piece) - 1] = piece[1:]
        if index:
            row["labels"][: self.window - self.stride] = IGNORED
        return row


def empty_row(length: int) -> dict[str, Int[Tensor, "length"]]:
    """Return a row of padding, whose labels are all -100.

    Args:
        length: Length of the row (tokens).
    """
    return {
        "tokens": torch.zeros(length, dtype=torch.int64),
        "labels": torch.full((length,), IGNORED, dtype=torch.int64),
    }
