"""GPT samples: windows of tokens over the documents of a corpus, and blends of several corpora."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.blend import blend, blend_exhaustively, integer_weights, occurrences
from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.data.megatron_order import (
    blend_as_megatron,
    blend_exhaustively_as_megatron,
    normalize,
    sizes_as_megatron,
)
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.windows import (
    WindowIndex,
    index_as_megatron,
    index_once,
    index_one_pass,
    index_passes,
    num_windows,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError

Order = Literal["passes", "megatron", "spread", "sequential"]
ONCE = ("spread", "sequential")


class Samples(Protocol):
    """Sequence of windows with at most seq_length + 1 token ids each."""

    seq_length: int

    @property
    def order_key(self) -> str:
        """Hash of everything that determines the order of windows, except their number."""

    @property
    def most_documents(self) -> int:
        """Largest number of documents that a window has tokens of."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in their order."""


@dataclass(frozen=True)
class SampleOptions:
    """Options for cutting a corpus into windows.

    Args:
        seq_length: Number of tokens that one window predicts.
        seed: Seed of the shuffles of documents and windows; at most 2^32 - 1.
        order: Order of windows. "passes" shuffles each pass over the documents separately, so that
            more samples extend the order of fewer. "megatron" is Megatron-Core's order for the same
            seed, number of samples and weights; it shuffles sequences. "sequential" uses every
            token of one pass once, in order, and the last window may be short. "spread" shuffles
            the windows of "sequential", so that the first of them are a fair sample.
        by_sequence: Whether to shuffle and split the sequences of a corpus in place of its
            documents, as Megatron-Core does. The order "megatron" always does. The two differ if a
            document has several sequences.
        tokenizer: Fingerprint of the tokenizer; part of the cache key.
        vocab_size: Size of the vocabulary; larger ids raise when a sample is read. None accepts all
            ids.
        cache_dir: Directory of the cached index; None keeps the index in memory.
    """

    seq_length: int
    seed: int = 1234
    order: Order = "passes"
    tokenizer: str | None = None
    vocab_size: int | None = None
    cache_dir: str | None = None
    by_sequence: bool = False

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise UnsupportedError(f"seq_length must be at least 1: {self.seq_length}.")
        if not 0 <= self.seed < 2**32:
            raise UnsupportedError(
                "the seed of data must lie in [0, 2^32), the range of numpy's generator: "
                f"{self.seed}."
            )
        if self.order not in get_args(Order):
            raise UnsupportedError(
                f"order must be one of {', '.join(get_args(Order))}: {self.order!r}."
            )

    def bounds(self, corpus: TokenFile) -> npt.NDArray[np.int64]:
        """Return the first token of each document or sequence, and the total number of tokens."""
        return (
            corpus.starts
            if self.by_sequence or self.order == "megatron"
            else corpus.document_starts
        )


class GPTSamples:
    """Windows of one corpus that cross the bounds of documents.

    Args:
        corpus: Token file.
        options: Options for cutting the corpus.
        documents: Range of the documents with tokens (or of the sequences) to use; None uses all.
        num_samples: Number of windows, over as many passes as needed; None makes one pass.
        whole: Whether to offer all windows of these passes, instead of the first ``num_samples``.

    Raises:
        CorruptDataError: If the documents have too few tokens for one window.
    """

    def __init__(
        self,
        corpus: TokenFile,
        options: SampleOptions,
        documents: range | None = None,
        num_samples: int | None = None,
        whole: bool = False,
    ) -> None:
        if num_samples is not None and num_samples < 1:
            raise UnsupportedError(
                f"num_samples must be at least 1: {num_samples}. Leave it out for one pass."
            )
        self.corpus = corpus
        self.options = options
        self.seq_length = options.seq_length
        bounds = options.bounds(corpus)
        self.documents = range(len(bounds) - 1) if documents is None else documents
        self._bounds = bounds[self.documents.start : self.documents.stop + 1]
        self.num_tokens = int(self._bounds[-1] - self._bounds[0]) if len(self._bounds) else 0
        needed = 2 if options.order in ONCE or num_samples is not None else self.seq_length + 1
        if self.num_tokens < needed:
            raise CorruptDataError(
                f"{corpus.prefix} has {self.num_tokens} tokens in documents "
                f"[{self.documents.start}, {self.documents.stop}); one window of seq_length "
                f"{self.seq_length} needs {needed}. Use a shorter seq_length, a larger corpus or "
                "another split."
            )
        self._num_samples = num_samples
        self.index = self._index(num_samples)
        available = len(self.index.shuffle) or len(self.index.starts) - 1
        self._size = available if num_samples is None or whole else min(num_samples, available)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of {self.corpus.prefix}.")
        places = self.index.pieces(index, self._bounds)
        pieces = [self.corpus.tokens[start:stop] for start, stop in places]
        tokens = np.concatenate(pieces).astype(np.int64)
        self._check(tokens, index)
        return tokens

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in their order."""
        sizes = [stop - start for start, stop in self.index.pieces(index, self._bounds)]
        return [size for size in sizes if size]

    @property
    def most_documents(self) -> int:
        """Largest number of documents that a window has tokens of."""
        return self.index.most_pieces

    @property
    def order_key(self) -> str:
        """Hash of everything that determines the order of windows, except their number."""
        # The order depends on the number of samples in two cases: a single pass has no window that
        # reaches into the next pass, and Megatron-Core shuffles most epochs together.
        fixed = self._num_samples is None or self.options.order == "megatron"
        extent = {"num_samples": self._num_samples} if fixed else {}
        return cache_key({**self._fields(), **extent})

    def _check(self, tokens: npt.NDArray[np.int64], index: int) -> None:
        limit = self.options.vocab_size
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0 or (limit is not None and high >= limit):
            raise CorruptDataError(
                f"token ids must lie in the vocabulary of {limit} tokens: sample {index} of "
                f"{self.corpus.prefix} holds {low} to {high}. The corpus was written with another "
                "tokenizer: use that tokenizer."
            )

    def _fields(self) -> dict[str, object]:
        options = self.options
        corpus = self.corpus
        # Documents and sequences are the same if every document is one sequence.
        by_sequence = len(options.bounds(corpus)) != len(corpus.document_starts)
        return {
            **({"by_sequence": True} if by_sequence else {}),
            # The `.idx` file determines the windows; the path and times of the corpus do not.
            "corpus": corpus.index_sha256,
            "documents": [self.documents.start, self.documents.stop],
            "seq_length": options.seq_length,
            "seed": options.seed,
            "order": options.order,
            "tokenizer": options.tokenizer,
        }

    def _index(self, num_samples: int | None) -> WindowIndex:
        def build() -> dict[str, npt.NDArray]:
            index = self._build(num_samples)
            return {"documents": index.documents, "starts": index.starts, "shuffle": index.shuffle}

        if self.options.cache_dir is None:
            return WindowIndex(**build())
        fields = {**self._fields(), "num_samples": num_samples}
        return WindowIndex(
            **load_or_build(
                Path(self.options.cache_dir), fields, build, ("documents", "starts", "shuffle")
            )
        )

    def _build(self, num_samples: int | None) -> WindowIndex:
        lengths = np.diff(self._bounds)
        options = self.options
        if options.order in ONCE:
            seed = options.seed if options.order == "spread" else None
            return index_once(lengths, options.seq_length, seed)
        if options.order == "megatron":
            return index_as_megatron(lengths, options.seq_length, num_samples or 1, options.seed)
        if num_samples is None:
            return index_one_pass(lengths, options.seq_length, options.seed)
        return index_passes(lengths, options.seq_length, num_samples, options.seed)


class BlendedSamples:
    """Blend of the samples of several corpora.

    Args:
        parts: Samples of each corpus.
        choices: Index of the part from which each sample comes.
        mixture: Text that identifies the rule of the choices, such as the weights; part of
            ``order_key``.
    """

    def __init__(
        self, parts: Sequence[Samples], choices: npt.NDArray[np.int16], mixture: str
    ) -> None:
        self._mixture = mixture
        self.parts = tuple(parts)
        self.seq_length = parts[0].seq_length
        self.choices = choices
        self.numbers = occurrences(choices, len(parts))

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        return self.parts[self.choices[index]][int(self.numbers[index])]

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in their order."""
        return self.parts[self.choices[index]].lengths(int(self.numbers[index]))

    @property
    def most_documents(self) -> int:
        """Largest number of documents that a window has tokens of."""
        return max(part.most_documents for part in self.parts)

    @property
    def order_key(self) -> str:
        """Hash of the parts' order keys and the mixture."""
        return cache_key(
            {"parts": [part.order_key for part in self.parts], "mixture": self._mixture}
        )


def blend_samples(
    corpora: Sequence[tuple[TokenFile, range | None]],
    weights: Sequence[float] | None,
    options: SampleOptions,
    num_samples: int | None = None,
) -> Samples:
    """Return the windows of one corpus, or a blend of several corpora.

    Args:
        corpora: Token files, each with the range of documents to use.
        weights: Proportions of samples, exact in their decimal notation (in the order "megatron":
            doubles, see ``megatron_order.py``). None uses the sizes of the corpora.
        options: Options for cutting the corpora.
        num_samples: Number of samples; None uses one pass over every corpus. The order "megatron"
            without weights returns no more than one pass.

    Raises:
        UnsupportedError: If the number of weights differs from the number of corpora, or weights
            are invalid.
        CorruptDataError: If a corpus has too few tokens for one window.
    """
    if len(corpora) == 1 and (weights is None or options.order != "megatron"):
        return GPTSamples(corpora[0][0], options, corpora[0][1], num_samples)
    if weights is not None and len(weights) != len(corpora):
        raise UnsupportedError(
            f"a blend needs one weight for each corpus: it has {len(weights)} weights and "
            f"{len(corpora)} corpora."
        )
    if options.order == "megatron":
        return _blend_as_megatron(corpora, weights, options, num_samples)
    if num_samples is None and (weights is None or options.order in ONCE):
        parts = [GPTSamples(corpus, options, documents) for corpus, documents in corpora]
        return BlendedSamples(
            parts, blend_exhaustively([len(part) for part in parts]), "exhaustive"
        )
    sizes = _one_pass(corpora, options)
    shares = sizes if weights is None else weights
    size = sum(sizes) if num_samples is None else num_samples
    fields = {"weights": [str(weight) for weight in shares], "size": size}
    choices = _cached(fields, lambda: blend(shares, size), options.cache_dir)
    # Open also a corpus of which no sample is drawn: otherwise a longer run could fail late.
    counts = np.maximum(np.bincount(choices, minlength=len(corpora)), 1).tolist()
    parts = [
        GPTSamples(corpus, options, documents, count)
        for (corpus, documents), count in zip(corpora, counts, strict=True)
    ]
    return BlendedSamples(parts, choices, ",".join(map(str, integer_weights(shares))))


def _blend_as_megatron(
    corpora: Sequence[tuple[TokenFile, range | None]],
    weights: Sequence[float] | None,
    options: SampleOptions,
    num_samples: int | None,
) -> BlendedSamples:
    """Blend corpora as Megatron-Core does.

    Without weights, each corpus is used at most once. With weights and no number of samples, the
    blend is as large as one pass over every corpus; Megatron-Core does not support this case.
    """
    count = len(corpora)
    if weights is None:
        built: list[int | None] = [None] * count
    else:
        num_samples = sum(_one_pass(corpora, options)) if num_samples is None else num_samples
        built = list(sizes_as_megatron(weights, num_samples))
    parts = [
        GPTSamples(corpus, options, documents, size, whole=True)
        for (corpus, documents), size in zip(corpora, built, strict=True)
    ]
    sizes = [len(part) for part in parts]
    # Megatron-Core normalizes weights twice, and the second rounding matters: `blend_as_megatron`
    # normalizes them again.
    shares = sizes if weights is None else normalize(weights)
    if num_samples is None:
        size = sum(sizes)
        choose = lambda: blend_exhaustively_as_megatron(sizes)  # noqa: E731
    else:
        size = num_samples if weights is not None else min(num_samples, sum(sizes))
        choose = lambda: blend_as_megatron(shares, size)  # noqa: E731
    fields = {
        "megatron": [str(share) for share in shares],
        "size": size,
        "exhaustive": num_samples is None,
    }
    choices = _cached(fields, choose, options.cache_dir)
    drawn = np.bincount(choices, minlength=count).tolist()
    for (corpus, _), wanted, available in zip(corpora, drawn, sizes, strict=True):
        if wanted > available:
            raise UnsupportedError(
                f"the order of Megatron draws {wanted} windows of {corpus.prefix}, but builds only "
                f"{available}: Megatron-Core refuses such a blend, too. Use fewer or more samples, "
                "change the weights, or use order 'passes'."
            )
    mixture = "exhaustive" if num_samples is None else ",".join(map(str, shares))
    return BlendedSamples(parts, choices, f"megatron {mixture}")


def _one_pass(
    corpora: Sequence[tuple[TokenFile, range | None]], options: SampleOptions
) -> list[int]:
    """Return the number of windows of one pass over each corpus."""
    counts = []
    for corpus, documents in corpora:
        bounds = options.bounds(corpus)
        used = range(len(bounds) - 1) if documents is None else documents
        counts.append(num_windows(int(bounds[used.stop] - bounds[used.start]), options.seq_length))
    return counts


def _cached(
    fields: dict[str, object], choose: Callable[[], npt.NDArray[np.int16]], cache_dir: str | None
) -> npt.NDArray[np.int16]:
    if cache_dir is None:
        return choose()
    return load_or_build(Path(cache_dir), fields, lambda: {"choices": choose()}, ["choices"])[
        "choices"
    ]
