"""Samples and batches of preference pairs, whose labels are the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.data.conversation_encoder import ConversationEncoder, EncodedText
from lightning_megatron.data.encoded_rows import EncodedRows
from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.data.loader import IGNORE_INDEX, SampleBatches
from lightning_megatron.data.packing import index_packed
from lightning_megatron.data.preference_pairs import read_pairs


class EncodedPairs(EncodedRows):
    """Tokens of all preference pairs of some files, the chosen conversation of each pair first.

    A pair is left out if one of its conversations is left out, or if truncation makes both equal.

    Args:
        paths: Files of pairs.
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that are predicted; a conversation has at most one more (tokens).
        too_long: Treatment of pairs with a longer conversation: cut its end, leave the pair out, or
            raise an error.
        cache_dir: Folder of the encoded tokens; None keeps them in memory.

    Raises:
        CorruptDataError: If a row is not a pair, a conversation is too long and ``too_long`` is
            "refuse", or no pair is left.
    """

    plural = "pairs"
    num_texts = 2

    @override
    def _encode(
        self, path: Path, encoder: ConversationEncoder
    ) -> Iterator[list[EncodedText] | None]:
        for pair in read_pairs(path):
            chosen = encoder.encode(pair.chosen)
            rejected = encoder.encode(pair.rejected)
            if chosen is None or rejected is None:
                yield None
                continue
            was_cut = chosen.was_cut or rejected.was_cut
            are_equal = np.array_equal(chosen.tokens, rejected.tokens)
            yield None if was_cut and are_equal else [chosen, rejected]

    def text(self, pair: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers.

        Args:
            pair: Number of the pair.
            side: 0 for the chosen conversation, 1 for the rejected one.
        """
        start, stop = self.bounds[2 * pair + side : 2 * pair + side + 2]
        return self.tokens[start:stop].astype(np.int64), self.is_answer[start:stop].astype(np.bool_)


class PairSamples:
    """Preference pairs in shuffled order; each pair is a window of two documents.

    Args:
        encoded: Tokens of the pairs.
        seed: Seed of the shuffle; None keeps the order of the files.
        num_samples: Number of pairs, over as many passes as needed; None makes one pass (pairs).
    """

    most_documents = 2

    def __init__(
        self, encoded: EncodedPairs, seed: int | None, num_samples: int | None = None
    ) -> None:
        self.encoded = encoded
        self.seq_length = encoded.seq_length
        # In the index, a document of two tokens, which fills a row, represents each pair.
        lengths = np.full(len(encoded), 2)
        index = index_packed(lengths, 1, num_samples, seed, is_packed=False)
        self._numbers = index.parts[: index.num_windows, 0]
        self.order_key = cache_key(
            {"pairs": encoded.key, "seed": seed, "is_pass": num_samples is None}
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return np.concatenate([self.encoded.text(self.pair(index), side)[0] for side in (0, 1)])

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of the chosen and of the rejected conversation."""
        return [len(self.encoded.text(self.pair(index), side)[0]) for side in (0, 1)]

    def pair(self, index: int) -> int:
        """Return the number that the pair of a sample has in the files.

        Args:
            index: Number of the sample.
        """
        return int(self._numbers[index])


class PairBatches(SampleBatches):
    """Dataset whose items are whole batches of pairs, indexed by a list of sample numbers.

    Shapes:
        An item is {"tokens": (B, 2, S), "labels": (B, 2, S), "pairs": (B,)}. The chosen
        conversation of each pair comes first. Labels are shifted by one token, and -100 where the
        next token does not belong to an answer. ``pairs`` is the number of each pair in the files.
        Padding has token 0 and label -100. A sample with number -1 is only padding, and the number
        of its pair is -1.

    Args:
        samples: Pairs in order.
        multiple: S is the length of the longest conversation of the batch, rounded up to a multiple
            of this number and at most ``seq_length``; None means ``seq_length`` (tokens).
    """

    samples: PairSamples

    def __init__(self, samples: PairSamples, multiple: int | None) -> None:
        self.samples = samples
        self.multiple = multiple

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        pairs = [-1 if number < 0 else self.samples.pair(number) for number in numbers]
        texts = {
            (row, side): self.samples.encoded.text(pair, side)
            for row, pair in enumerate(pairs)
            for side in (0, 1)
            if pair >= 0
        }
        length = self.samples.seq_length
        if self.multiple is not None:
            longest = max((len(tokens) - 1 for tokens, _ in texts.values()), default=1)
            length = min(length, -(-longest // self.multiple) * self.multiple)
        tokens = np.zeros((len(pairs), 2, length), np.int64)
        labels = np.full(tokens.shape, IGNORE_INDEX, np.int64)
        for index, (ids, is_answer) in texts.items():
            tokens[index][: len(ids) - 1] = ids[:-1]
            labels[index][: len(ids) - 1] = np.where(is_answer[1:], ids[1:], IGNORE_INDEX)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "pairs": torch.tensor(pairs),
        }
