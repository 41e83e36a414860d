"""Samples of consecutive sentences of token files, and their blends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_megatron.building_blocks import (
    BlendedSamples,
    Samples,
    TokenFile,
    cache_key,
    load_or_build,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.tasks.bert.pair_index import PairRule, index_pairs

Sentences = list[npt.NDArray[np.int64]]
#: Token files, each with the range of documents to use (None for all).
Corpora = Sequence[tuple[TokenFile, range | None]]


@dataclass(frozen=True)
class PairOptions:
    """Options for cutting token files into samples of sentences.

    Args:
        num_segments: Segments of a row: 2, or 1 without order prediction.
        seed: Seed of target lengths and order; at most 2^32 - 1.
        vocab_size: Size of the vocabulary. Reading a sample with a larger id raises an error; None
            accepts all ids (tokens).
        cache_dir: Directory of the cached index; None keeps the index in memory.
    """

    seq_length: int
    num_segments: int = 2
    short_probability: float = 0.1
    seed: int = 1234
    vocab_size: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.rule.max_target < 2:
            raise UnsupportedError(
                f"seq_length must be at least {self.num_segments + 3}, for two tokens of text and "
                f"{self.num_segments + 1} special tokens: it is {self.seq_length}."
            )

    @property
    def rule(self) -> PairRule:
        """Rule for cutting documents; a row has [CLS], and [SEP] after each segment."""
        max_target = self.seq_length - self.num_segments - 1
        return PairRule(max_target, self.num_segments, self.short_probability, self.seed)


class SentenceSamples(Samples, Protocol):
    """Samples that consist of sentences and have a target length."""

    @property
    def seed(self) -> int:
        """Seed of the order and the masks."""

    def sentences(self, index: int) -> tuple[Sentences, int]:
        """Return the tokens of each sentence of a sample, and its target length (tokens)."""


class PairSamples:
    """Samples of consecutive sentences of one token file.

    Documents with fewer sentences than segments are left out, as in Megatron-LM. Unlike there,
    documents with a very long sentence are used.

    Args:
        documents: Range of the documents with tokens to use; None uses all.
        num_samples: Number of samples, over as many passes as needed; None makes one pass.
    """

    def __init__(
        self,
        corpus: TokenFile,
        options: PairOptions,
        documents: range | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.options = options
        self.seq_length = options.seq_length
        self.seed = options.seed
        # Empty documents repeat an entry.
        bounds = np.unique(corpus.document_index)
        self.documents = range(len(bounds) - 1) if documents is None else documents
        self._bounds = bounds[self.documents.start : self.documents.stop + 1]
        self._index = self._load(num_samples)
        if not len(self._index):
            raise CorruptDataError(
                f"{corpus.prefix} must have a document of at least {options.num_segments} "
                f"sentences in documents [{self.documents.start}, {self.documents.stop}): it has "
                "none. Write it with `lightning-megatron preprocess --split_sentences`, or use "
                "another split."
            )

    def __len__(self) -> int:
        return len(self._index)

    def sentences(self, index: int) -> tuple[Sentences, int]:
        """Return the tokens of each sentence of a sample, and its target length (tokens)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of {self.corpus.prefix}.")
        first, stop, target = self._index[index].tolist()
        starts = self.corpus.starts[first : stop + 1]
        tokens = self.corpus.sample(index, starts[0], starts[-1], self.options.vocab_size)
        return np.split(tokens, starts[1:-1] - starts[0]), target

    @property
    def order_key(self) -> str:
        """Hash of everything that determines the order of samples, except their number."""
        return cache_key(self._fields())

    def summary(self) -> str:
        """Return a line with the number of samples, omitted documents and truncated tokens."""
        sizes = self.corpus.starts[self._index[:, 1]] - self.corpus.starts[self._index[:, 0]]
        cut = int(np.maximum(sizes - self._index[:, 2], 0).sum())
        few = int((np.diff(self._bounds) < self.options.num_segments).sum())
        return (
            f"{self.corpus.prefix}: {len(self)} samples from {len(self.documents)} documents, of "
            f"which {few} are left out with fewer than {self.options.num_segments} sentences; "
            f"{cut / int(sizes.sum()):.1%} of the tokens are cut where sentences exceed the target "
            "length."
        )

    def _fields(self) -> dict[str, object]:
        return {
            "kind": "sentences",
            "corpus": self.corpus.index_sha256,
            "documents": [self.documents.start, self.documents.stop],
            "seq_length": self.options.seq_length,
            "num_segments": self.options.num_segments,
            "short_probability": str(self.options.short_probability),
            "seed": self.options.seed,
        }

    def _load(self, num_samples: int | None) -> npt.NDArray[np.integer]:
        def build() -> dict[str, npt.NDArray]:
            rule = self.options.rule
            first = self.documents.start
            samples = index_pairs(self.corpus.starts, self._bounds, first, rule, num_samples)
            return {"samples": samples}

        if self.options.cache_dir is None:
            return build()["samples"]
        key = {**self._fields(), "num_samples": num_samples}
        return load_or_build(Path(self.options.cache_dir), key, build, ["samples"])["samples"]


class BlendedPairs(BlendedSamples):
    """Blend of the samples of sentences of several token files."""

    @property
    def seed(self) -> int:
        """Seed of the order and the masks."""
        seed: int = self.parts[0].seed
        return seed

    def sentences(self, index: int) -> tuple[Sentences, int]:
        """Return the tokens of each sentence of a sample, and its target length (tokens)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        part = self.parts[self.choices[index]]
        assert isinstance(part, PairSamples), "`blend_pairs` blends only samples of sentences"
        return part.sentences(int(self.numbers[index]))


def blend_pairs(
    corpora: Corpora,
    weights: Sequence[float] | None,
    options: PairOptions,
    num_samples: int | None = None,
) -> PairSamples | BlendedPairs:
    """Return the samples of one token file, or a blend of several.

    Args:
        corpora: Token files, each with the range of documents to use.
        weights: Share of each file in the samples, exact in its decimal notation; None uses the
            sizes of the files.
        num_samples: Number of samples; None uses one pass over every file.
    """
    if len(corpora) == 1:
        return PairSamples(corpora[0][0], options, corpora[0][1], num_samples)

    def open_part(number: int, size: int | None) -> PairSamples:
        corpus, documents = corpora[number]
        return PairSamples(corpus, options, documents, size)

    return BlendedPairs.of(len(corpora), open_part, weights, num_samples, options.cache_dir)
