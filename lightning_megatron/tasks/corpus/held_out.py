"""Test sets: their documents, and the overlap of their 8-grams with a training corpus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.building_blocks import TextFiles
from lightning_megatron.tasks.corpus.signatures import (
    NUM_HASHES,
    Signatures,
    ngrams_of,
    signature_of,
    words_of,
)

#: Length of the n-grams by which overlap is measured (words).
OVERLAP_WORDS = 8


@dataclass(frozen=True)
class Overlap:
    """Numbers of 8-grams of one test set, and of those that occur in the training corpus.

    Args:
        eight_grams: Number of 8-grams of all documents; repeated ones count each time.
        num_found: Number of these 8-grams that occur in the training corpus.
        distinct_found: Number of distinct 8-grams that occur in the training corpus.
    """

    test: str
    documents: int
    eight_grams: int
    num_found: int
    distinct: int
    distinct_found: int

    @property
    def share(self) -> float:
        """Fraction of the 8-grams that occur in the training corpus, as in the GPT-2 paper."""
        return self.num_found / max(self.eight_grams, 1)


class HeldOut:
    """Test sets in memory.

    Args:
        inputs: Files, directories and globs: JSON lines, or plain text with one document per file.
    """

    def __init__(self, inputs: tuple[str, ...], json_key: str) -> None:
        self.places: list[str] = []
        self.texts: list[str] = []
        #: Index of each distinct 8-gram.
        self.grams: dict[str, int] = {}
        self._sets: list[tuple[str, int, Counter[int]]] = []
        for path in TextFiles(inputs).paths:
            counts: Counter[int] = Counter()
            before = len(self.texts)
            for place, text in TextFiles([path]).texts("file", json_key):
                self.texts.append(text)
                self.places.append(place)
                for gram in ngrams_of(words_of(text), OVERLAP_WORDS):
                    counts[self.grams.setdefault(gram, len(self.grams))] += 1
            self._sets.append((str(path), len(self.texts) - before, counts))

    def signatures(self, ngram: int) -> Signatures:
        """Return the signatures of the documents.

        Shapes: The result is (T, 128).

        Args:
            ngram: Length of an n-gram (words).
        """
        rows = [signature_of(text, ngram) for text in self.texts]
        return np.array(rows, dtype=np.uint32).reshape(-1, NUM_HASHES)

    def grams_in(self, text: str) -> list[int]:
        """Return the indices of the 8-grams that occur in a text, in ascending order."""
        grams = set(ngrams_of(words_of(text), OVERLAP_WORDS))
        return sorted(self.grams[gram] for gram in grams if gram in self.grams)

    def overlaps(self, in_corpus: npt.NDArray[np.bool_]) -> list[Overlap]:
        """Return the overlap of each file.

        Shapes: in_corpus (G,).
        """
        overlaps = []
        for name, documents, counts in self._sets:
            found = [times for gram, times in counts.items() if in_corpus[gram]]
            overlap = Overlap(
                test=name,
                documents=documents,
                eight_grams=counts.total(),
                num_found=sum(found),
                distinct=len(counts),
                distinct_found=len(found),
            )
            overlaps.append(overlap)
        return overlaps
