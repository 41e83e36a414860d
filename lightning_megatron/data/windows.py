"""Start positions of token windows in shuffled documents and epochs, in exact integer arithmetic.

The concatenated documents form one row of tokens. With S = seq_length, window k has the S + 1
tokens [k S, k S + S]: the first S are inputs and the last S are labels. Neighbouring windows share
one token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import UnsupportedError

Integers = np.ndarray


@dataclass(frozen=True)
class WindowIndex:
    """Index of the windows of a corpus.

    Args:
        starts: Start of each window as (position in ``documents``, offset in that document). One
            more entry is the last token of the last window.
        shuffle: Order of the windows; empty for the order of the row.
    """

    documents: Integers
    starts: Integers
    shuffle: Integers

    @property
    def num_windows(self) -> int:
        """Return the number of windows."""
        return len(self.shuffle) or len(self.starts) - 1

    @property
    def max_pieces(self) -> int:
        """Return the largest number of documents with tokens in a window."""
        return int(np.diff(self.starts[:, 0]).max(initial=0)) + 1

    def pieces(self, index: int, bounds: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the range of tokens of each document in a window, in order.

        Args:
            bounds: Index of the first token of each document, and the total number of tokens.

        Returns:
            Start and end of each range among all tokens. A range may be empty.
        """
        window = int(self.shuffle[index]) if len(self.shuffle) else index
        (first, offset), (last, last_offset) = self.starts[window : window + 2].tolist()
        ranges = []
        for position in range(first, last + 1):
            document = self.documents[position]
            start = int(bounds[document])
            stop = int(bounds[document + 1])
            if position == last:
                # The window includes the first token of the next window as its last label.
                stop = start + last_offset + 1
            ranges.append((start + offset, stop))
            offset = 0
        return ranges


def num_windows(num_tokens: int, seq_length: int, drop_last: bool = True) -> int:
    """Return the number of windows in a row of tokens.

    Args:
        drop_last: Whether to drop the remaining tokens; otherwise they form a shorter window.

    Source: Megatron-Core core/datasets/helpers.cpp. Without drop_last, Megatron-Core rounds in
    float32, and its count may be one too small.
    """
    predicted = max(num_tokens - 1, 0)
    return predicted // seq_length if drop_last else -(-predicted // seq_length)


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return the number of passes over the documents that a number of windows needs."""
    return max(-(-(num_samples * seq_length + 1) // tokens_per_epoch), 1)


def window_starts(
    lengths: npt.ArrayLike, documents: npt.ArrayLike, seq_length: int, count: int
) -> Integers:
    """Return the start of each window.

    Args:
        documents: Documents in the order of the row, repeated for each pass.

    Returns:
        Array (count + 1, 2) of the position in ``documents`` and the offset in that document. The
        last entry is the last token of the last window.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64)[np.asarray(documents)], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # A short last window ends with the last token.
    tokens = np.minimum(np.arange(count + 1, dtype=np.int64) * seq_length, total - 1)
    positions = np.searchsorted(ends, tokens, side="right")
    before = np.where(positions > 0, ends[np.maximum(positions, 1) - 1], 0)
    starts = np.stack([positions, tokens - before], axis=1)
    return starts.astype(np.int32) if starts.max(initial=0) < 2**31 else starts


def shuffle_windows(first: int, total: int, random: np.random.RandomState) -> Integers:
    """Return an order in which the windows [0, first) and [first, total) are shuffled separately.

    Source: Megatron-Core core/datasets/gpt_dataset.py (_build_shuffle_index).
    """
    order = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    random.shuffle(order[:first])
    if first < total:
        random.shuffle(order[first:])
    return order


def shuffle_documents(
    count: int, epochs: int, random: np.random.RandomState, final_apart: bool
) -> Integers:
    """Return the documents of several epochs in a common shuffled order.

    Args:
        final_apart: Whether to shuffle the last epoch separately from the others.

    Source: Megatron-Core core/datasets/gpt_dataset.py (_build_document_index).
    """
    if final_apart and epochs > 1:
        before = shuffle_documents(count, epochs - 1, random, False)
        return np.concatenate([before, shuffle_documents(count, 1, random, False)])
    order = np.tile(np.arange(count, dtype=np.int32 if count < 2**31 else np.int64), epochs)
    random.shuffle(order)
    return order


def index_once(
    lengths: npt.NDArray[np.int64], seq_length: int, seed: int | None = None
) -> WindowIndex:
    """Return the index of one pass that uses every token, with documents in order.

    Args:
        seq_length: Tokens that a window predicts; the last window may predict fewer.
        seed: Seed of a shuffle of the windows; None keeps their order.
    """
    documents = np.arange(len(lengths))
    count = num_windows(int(lengths.sum()), seq_length, drop_last=False)
    shuffle = (
        np.zeros(0, np.int64)
        if seed is None
        else np.random.RandomState([seed, 0, 3]).permutation(count)
    )
    return WindowIndex(documents, window_starts(lengths, documents, seq_length, count), shuffle)


def index_as_megatron(
    lengths: npt.NDArray[np.int64], seq_length: int, num_samples: int, seed: int
) -> WindowIndex:
    """Return the index of as many epochs as needed, in the order of Megatron-Core.

    The order depends on ``num_samples``: all epochs except a short final one are shuffled together.

    Source: Megatron-Core core/datasets/gpt_dataset.py (_build_document_sample_shuffle_indices).
    """
    random = np.random.RandomState(seed)
    tokens = int(lengths.sum())
    epochs = num_epochs(tokens, seq_length, num_samples)
    before_final = num_windows((epochs - 1) * tokens, seq_length)
    # Shuffle the final epoch separately if less than 80 % of it is used.
    final_apart = (
        epochs > 1 and num_samples - before_final < 8 * num_windows(tokens, seq_length) // 10
    )
    documents = shuffle_documents(len(lengths), epochs, random, final_apart)
    count = num_windows(epochs * tokens, seq_length)
    starts = window_starts(lengths, documents, seq_length, count)
    return WindowIndex(
        documents, starts, shuffle_windows(before_final if final_apart else count, count, random)
    )


def index_one_pass(lengths: npt.NDArray[np.int64], seq_length: int, seed: int) -> WindowIndex:
    """Return the index of one pass with shuffled documents and windows.

    Remaining tokens that fill no window are left out.
    """
    documents = np.random.RandomState([seed, 0, 0]).permutation(len(lengths))
    count = num_windows(int(lengths.sum()), seq_length)
    shuffle = np.random.RandomState([seed, 0, 1]).permutation(count)
    return WindowIndex(documents, window_starts(lengths, documents, seq_length, count), shuffle)


def index_passes(
    lengths: npt.NDArray[np.int64], seq_length: int, num_samples: int, seed: int
) -> WindowIndex:
    """Return the index of several passes, each of which is shuffled separately.

    A window belongs to the pass in which it starts, and is shuffled with the windows of this pass.
    A larger ``num_samples`` extends the order.
    """
    tokens = int(lengths.sum())
    num_passes = max(num_samples - 1, 0) * seq_length // tokens + 1
    # The first window that starts in each pass, and the total number of windows.
    firsts = [-(-number * tokens // seq_length) for number in range(num_passes + 1)]
    # The last window may extend into documents of the next passes.
    covered = firsts[-1] * seq_length // tokens + 1
    documents = [
        np.random.RandomState([seed, number, 0]).permutation(len(lengths))
        for number in range(covered)
    ]
    order = np.concatenate(documents)
    shuffles = [
        start + np.random.RandomState([seed, number, 1]).permutation(stop - start)
        for number, (start, stop) in enumerate(zip(firsts, firsts[1:], strict=False))
    ]
    starts = window_starts(lengths, order, seq_length, firsts[-1])
    return WindowIndex(order, starts, np.concatenate(shuffles)[:num_samples])


def split_range(count: int, weights: str) -> tuple[range, ...]:
    """Divide documents into ranges in the exact proportion of weights.

    Bounds are rounded to the nearest document, and halves to the even one. Megatron-Core uses
    doubles and may place a bound one sequence later (see ``split_as_megatron``).

    Args:
        weights: Comma-separated weights, such as "980,15,5".
    """
    parts = [part.strip() for part in weights.split(",")]
    # Limit the number of digits, because a huge power of ten would take hours to compute.
    if not all(
        re.fullmatch(r"(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,3})?", part, re.ASCII)
        for part in parts
    ):
        raise UnsupportedError(
            "split weights must be non-negative decimal numbers, separated by commas, such as "
            f"'980,15,5': they are {weights[:80]!r}."
        )
    shares = [Fraction(part) for part in parts]
    if sum(shares) == 0:
        raise UnsupportedError(f"split weights must not all be zero: they are {weights!r}.")
    bounds = [round(count * sum(shares[:parts]) / sum(shares)) for parts in range(len(shares) + 1)]
    return tuple(range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False))
