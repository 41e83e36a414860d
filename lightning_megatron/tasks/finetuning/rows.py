"""Encoded rows of a task, their order in training, and their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_megatron.building_blocks import IGNORED, SampleBatches, cache_key

#: Arrays of encoded rows.
ARRAYS = ("tokens", "bounds", "first", "labels", "groups", "counts")


@dataclass(frozen=True)
class TaskRows:
    """Token sequences of a data set with labels.

    Args:
        bounds: Index of the first token of each sequence, and the total number of tokens.
        first: Number of tokens of type 0, which begin each sequence (tokens).
        labels: Labels of each row, ``(rows,)`` or ``(rows, labels)``.
        counts: Number of malformed rows that were omitted, and number of truncated texts.
    """

    tokens: npt.NDArray
    bounds: npt.NDArray
    first: npt.NDArray
    labels: npt.NDArray
    groups: npt.NDArray
    counts: npt.NDArray
    choices: int
    key: str

    def __len__(self) -> int:
        return len(self.labels)


def joined(
    tokens: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]],
    labels: Sequence[int] | Sequence[tuple[int, int]],
    groups: Sequence[int],
    counts: Sequence[int],
) -> dict[str, npt.NDArray]:
    """Return the arrays of encoded rows.

    Args:
        types: Type of each token; tokens of type 0 come before those of type 1.
        counts: Number of malformed rows that were omitted, and number of truncated texts.
    """
    sizes = [0, *map(len, tokens)]
    flat = [np.asarray(ids, np.int32) for ids in tokens]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *flat]),
        "bounds": np.cumsum(sizes, dtype=np.int64),
        "first": np.array(
            [len(types_of_sequence) - sum(types_of_sequence) for types_of_sequence in types],
            np.int32,
        ),
        "labels": np.array(labels, np.int64),
        "groups": np.array(groups, np.int64),
        "counts": np.array(counts, np.int64),
    }


class TaskSamples:
    """Order of rows: one or several passes over all rows, each shuffled independently.

    Args:
        seq_length: Length of a sequence (tokens).
        seed: Seed of the shuffling; None keeps the order of the files.
        num_samples: Number of rows, from as many passes as needed; None makes one pass (rows).
    """

    def __init__(
        self,
        rows: TaskRows,
        seq_length: int,
        seed: int | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.rows = rows
        self.seq_length = seq_length
        self._size = len(rows) if num_samples is None else num_samples
        passes = range(-(-self._size // len(rows)))
        self._order = np.concatenate([self._pass(seed, number) for number in passes])
        fields = {"rows": rows.key, "seed": seed, "is_pass": num_samples is None}
        self.order_key = cache_key(fields)

    def _pass(self, seed: int | None, number: int) -> npt.NDArray[np.int64]:
        order = np.arange(len(self.rows))
        return order if seed is None else np.random.default_rng([seed, number]).permutation(order)

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> int:
        """Return the index of a row in the data set."""
        return int(self._order[index])


class TaskBatches(SampleBatches):
    """Dataset whose items are whole batches, indexed by a list of positions in the order of rows.

    Shapes:
        An item is {"tokens": (B, S), "token_types": (B, S), "valid": (B, S), "lengths": (B,),
        "labels": (B, ...), "row": (B,)}, with (B, C, S) and (B, C) if a row has C > 1 sequences.
        ``lengths`` is the number of tokens before the padding. A row with the index -1 is padding:
        its labels are -100, and only its first token is valid.
    """

    samples: TaskSamples

    def __init__(self, samples: TaskSamples, padding: int) -> None:
        self.samples = samples
        self.padding = padding

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        rows = self.samples.rows
        shape = (len(numbers), rows.choices, self.samples.seq_length)
        tokens = np.full(shape, self.padding, np.int64)
        types = np.zeros(shape, np.int64)
        valid = np.zeros(shape, np.bool_)
        valid[..., 0] = True  # Attention is undefined without any valid token.
        labels = np.full((len(numbers), *rows.labels.shape[1:]), IGNORED, np.int64)
        row = np.full(len(numbers), -1, np.int64)
        for index, number in enumerate(numbers):
            if number < 0:
                continue
            row[index] = self.samples.row(number)
            labels[index] = rows.labels[row[index]]
            for choice in range(rows.choices):
                place = row[index] * rows.choices + choice
                sequence = rows.tokens[rows.bounds[place] : rows.bounds[place + 1]]
                tokens[index, choice, : len(sequence)] = sequence
                types[index, choice, rows.first[place] : len(sequence)] = 1
                valid[index, choice, : len(sequence)] = True
        lengths = valid.sum(-1)
        inputs = {"tokens": tokens, "token_types": types, "valid": valid, "lengths": lengths}
        if rows.choices == 1:
            inputs = {name: array[:, 0] for name, array in inputs.items()}
        return _tensors({**inputs, "labels": labels, "row": row})


def _tensors(arrays: Mapping[str, npt.NDArray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
