"""Samples for training a GPT: windows of tokens of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.data.packing import PackedIndex, index_packed
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.windows import (
    WindowIndex,
    index_as_megatron,
    index_once,
    index_one_pass,
    index_passes,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError

#: Token files, each with the range of documents to use (None for all).
Corpora = Sequence[tuple[TokenFile, range | None]]
Order = Literal["passes", "megatron", "spread", "sequential"]
#: Orders that use every token of one pass once.
ONE_PASS_ORDERS = ("spread", "sequential")


class Samples(Protocol):
    """Numbered samples in the order of training."""

    seq_length: int

    @property
    def order_key(self) -> str:
        """Hash of everything that determines the order of samples, except their number."""

    def __len__(self) -> int: ...


class Windows(Samples, Protocol):
    """Samples that are windows with at most seq_length + 1 token ids each."""

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a window."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in order."""


@dataclass(frozen=True)
class SampleOptions:
    """Options for cutting a corpus into windows.

    Args:
        seed: Seed of the shuffles of documents and windows; at most 2^32 - 1.
        order: Order of windows. "passes" shuffles each pass over the documents separately, so that
            a larger number of samples extends the order. "megatron" is Megatron-Core's order for
            the same seed, number of samples and weights; it shuffles sequences. "sequential" uses
            every token of one pass once, in order, and the last window may be short. "spread"
            shuffles the windows of "sequential", so that the first windows represent the corpus.
        whole: Whether windows consist of whole documents, packed by best fit; otherwise windows
            cross the ends of documents. Cannot be used with the order "megatron".
        by_sequence: Whether to shuffle and split the sequences of a corpus instead of its
            documents, as Megatron-Core does. The order "megatron" always does so. The two differ if
            a document has several sequences.
        tokenizer: Fingerprint of the tokenizer; part of the cache key.
        vocab_size: Size of the vocabulary. Reading a sample with a larger id raises an error; None
            accepts all ids.
        cache_dir: Directory of the cached index; None keeps the index in memory.
    """

    seq_length: int
    seed: int = 1234
    order: Order = "passes"
    tokenizer: str | None = None
    vocab_size: int | None = None
    cache_dir: str | None = None
    by_sequence: bool = False
    whole: bool = False

    def bounds(self, corpus: TokenFile) -> npt.NDArray[np.int64]:
        """Return the first token of each document or sequence, and the total number of tokens."""
        return (
            corpus.starts
            if self.by_sequence or self.order == "megatron"
            else corpus.document_starts
        )


def check_rows(whole: bool, order: str) -> None:
    """Check that the order of windows supports rows of whole documents, if these are used.

    Args:
        whole: Whether windows consist of whole documents.
    """
    if whole and order == "megatron":
        raise UnsupportedError(
            "documents='whole' cannot be used with order='megatron', whose samples cross the ends "
            "of documents. Use order='passes', or documents='separate'."
        )


class GPTSamples:
    """Windows of one corpus, which cross the ends of documents or consist of whole documents.

    Args:
        documents: Range of the non-empty documents (or of the sequences) to use; None uses all.
        num_samples: Number of windows, over as many passes as needed; None makes one pass.
        whole: Whether to include all windows of these passes, instead of the first ``num_samples``.
    """

    def __init__(
        self,
        corpus: TokenFile,
        options: SampleOptions,
        documents: range | None = None,
        num_samples: int | None = None,
        whole: bool = False,
    ) -> None:
        self.corpus = corpus
        self.options = options
        self.seq_length = options.seq_length
        bounds = options.bounds(corpus)
        self.documents = range(len(bounds) - 1) if documents is None else documents
        self._bounds = bounds[self.documents.start : self.documents.stop + 1]
        self.num_tokens = int(self._bounds[-1] - self._bounds[0]) if len(self._bounds) else 0
        may_be_short = options.order in ONE_PASS_ORDERS or num_samples is not None or options.whole
        needed = 2 if may_be_short else self.seq_length + 1
        if self.num_tokens < needed:
            raise CorruptDataError(
                f"{corpus.prefix} has {self.num_tokens} tokens in documents "
                f"[{self.documents.start}, {self.documents.stop}); one window of seq_length "
                f"{self.seq_length} needs {needed}. Use a shorter seq_length, a larger corpus or "
                "another split."
            )
        self._num_samples = num_samples
        self.index = self._index(num_samples)
        available = self.index.num_windows
        if not available:
            raise CorruptDataError(
                f"{corpus.prefix} has no document of at least 2 tokens in documents "
                f"[{self.documents.start}, {self.documents.stop}), so there is no token to "
                "predict. Use a larger corpus or another split."
            )
        self._size = available if num_samples is None or whole else min(num_samples, available)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of {self.corpus.prefix}.")
        pieces = [
            self.corpus.sample(index, start, stop, self.options.vocab_size)
            for start, stop in self.index.pieces(index, self._bounds)
            if start < stop
        ]
        return np.concatenate(pieces)

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in order."""
        sizes = [stop - start for start, stop in self.index.pieces(index, self._bounds)]
        return [size for size in sizes if size]

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a window."""
        return self.index.max_pieces

    @property
    def order_key(self) -> str:
        """Hash of everything that determines the order of windows, except their number."""
        # The order depends on the number of samples in two cases: a single pass has no window that
        # extends into the next pass, and Megatron-Core shuffles most epochs together.
        depends_on_number = self._num_samples is None or self.options.order == "megatron"
        extent = {"num_samples": self._num_samples} if depends_on_number else {}
        return cache_key({**self._fields(), **extent})

    def _fields(self) -> dict[str, object]:
        options = self.options
        corpus = self.corpus
        # Both orders are the same if every document is one sequence.
        by_sequence = len(options.bounds(corpus)) != len(corpus.document_starts)
        # Options that are off have no field, so that cached indices of earlier versions match.
        added = {"by_sequence": by_sequence, "whole": options.whole}
        return {
            **{name: value for name, value in added.items() if value},
            # The `.idx` file determines the windows; the path and times of the corpus do not.
            "corpus": corpus.index_sha256,
            "documents": [self.documents.start, self.documents.stop],
            "seq_length": options.seq_length,
            "seed": options.seed,
            "order": options.order,
            "tokenizer": options.tokenizer,
        }

    def _index(self, num_samples: int | None) -> WindowIndex | PackedIndex:
        kind = PackedIndex if self.options.whole else WindowIndex
        names = [field.name for field in fields(kind)]

        def build() -> dict[str, npt.NDArray]:
            index = self._build(num_samples)
            return {name: getattr(index, name) for name in names}

        if self.options.cache_dir is None:
            return kind(**build())
        key = {**self._fields(), "num_samples": num_samples}
        return kind(**load_or_build(Path(self.options.cache_dir), key, build, names))

    def _build(self, num_samples: int | None) -> WindowIndex | PackedIndex:
        lengths = np.diff(self._bounds)
        options = self.options
        if options.whole:
            seed = None if options.order == "sequential" else options.seed
            return index_packed(lengths, options.seq_length, num_samples, seed)
        if options.order in ONE_PASS_ORDERS:
            seed = options.seed if options.order == "spread" else None
            return index_once(lengths, options.seq_length, seed)
        if options.order == "megatron":
            return index_as_megatron(lengths, options.seq_length, num_samples or 1, options.seed)
        if num_samples is None:
            return index_one_pass(lengths, options.seq_length, options.seed)
        return index_passes(lengths, options.seq_length, num_samples, options.seed)
