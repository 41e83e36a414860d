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
    """Give windows of at most seq_length + 1 token ids; `order_key` differs when any window or its place could."""

    seq_length: int

    @property
    def order_key(self) -> str:
        """Hash what decides which window has which place, but not how many windows there are."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class SampleOptions:
    """Say how windows are cut from a corpus.

    Args:
        seq_length: Tokens that one window predicts.
        seed: Of documents and windows; at most 2^32 - 1.
        order: "passes" shuffles each pass over the documents by itself, so that more samples only continue the order of
            fewer; "megatron" is Megatron-Core's order for the same seed, number of samples and weights, which shuffles
            sequences; "sequential" takes every token of one pass once, in order, the last window short if need be;
            "spread" takes the same windows in a shuffled order, so that the first of them are a fair sample.
        by_sequence: Count the sequences of a corpus where documents are counted else, as Megatron-Core does; "megatron"
            always does. It matters where documents have several sequences.
        tokenizer: Fingerprint of the tokenizer; part of the cache key.
        vocab_size: Ids from it on are refused when a sample is read; None accepts all.
        cache_dir: Where the index is kept; None keeps it in memory.
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
            raise UnsupportedError(f"the seed of data must lie in [0, 2^32): {self.seed}. numpy takes no other.")
        if self.order not in get_args(Order):
            raise UnsupportedError(f"order must be one of {', '.join(get_args(Order))}: {self.order!r}.")

    def bounds(self, corpus: TokenFile) -> npt.NDArray[np.int64]:
        """Return the token where each piece that is shuffled and split starts, and the total at the end."""
        return corpus.starts if self.by_sequence or self.order == "megatron" else corpus.document_starts


class GPTSamples:
    """Cut a corpus into windows that cross documents.

    Args:
        corpus: The token file.
        options: How windows are cut.
        documents: Which of the documents that have tokens (or of the sequences) are used; all if None.
        num_samples: Windows wanted, over as many passes as they need; None is one pass.
        whole: Offer all windows of these passes, not just `num_samples`.

    Raises:
        CorruptDataError: The documents have too few tokens for one window.
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
            raise UnsupportedError(f"num_samples must be at least 1: {num_samples}. Leave it out for one pass.")
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
                f"{corpus.prefix} has {self.num_tokens} tokens in documents [{self.documents.start}, "
                f"{self.documents.stop}); one window of seq_length {self.seq_length} needs {needed}. Use a shorter "
                f"seq_length, a larger corpus or another split."
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
        window = int(self.index.shuffle[index]) if len(self.index.shuffle) else index
        (position, offset), (last, last_offset) = self.index.starts[window : window + 2].tolist()
        pieces = []
        for place in range(position, last + 1):
            document = self.index.documents[place]
            start, stop = int(self._bounds[document]), int(self._bounds[document + 1])
            stop = start + last_offset + 1 if place == last else stop
            pieces.append(self.corpus.tokens[start + offset : stop])
            offset = 0
        tokens = np.concatenate(pieces).astype(np.int64)
        self._check(tokens, index)
        return tokens

    @property
    def order_key(self) -> str:
        """Hash what decides which window has which place, but not how many windows there are."""
        # one pass leaves out the window that would reach into the next; Megatron shuffles most epochs together
        fixed = self._num_samples is None or self.options.order == "megatron"
        extent = {"num_samples": self._num_samples} if fixed else {}
        return cache_key({**self._fields(), **extent})

    def _check(self, tokens: npt.NDArray[np.int64], index: int) -> None:
        limit = self.options.vocab_size
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (limit is not None and high >= limit):
            raise CorruptDataError(
                f"token ids must lie in the vocabulary of {limit} tokens: sample {index} of {self.corpus.prefix} holds "
                f"{low} to {high}. The corpus was written with another tokenizer: use that one."
            )

    def _fields(self) -> dict[str, object]:
        options, corpus = self.options, self.corpus
        # the same where every document is one sequence
        by_sequence = len(options.bounds(corpus)) != len(corpus.document_starts)
        return {
            **({"by_sequence": True} if by_sequence else {}),
            # the index of a corpus decides all; its path and age do not
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
            **load_or_build(Path(self.options.cache_dir), fields, build, ("documents", "starts", "shuffle"))
        )

    def _build(self, num_samples: int | None) -> WindowIndex:
        lengths, options = np.diff(self._bounds), self.options
        if options.order in ONCE:
            return index_once(lengths, options.seq_length, options.seed if options.order == "spread" else None)
        if options.order == "megatron":
            return index_as_megatron(lengths, options.seq_length, num_samples or 1, options.seed)
        if num_samples is None:
            return index_one_pass(lengths, options.seq_length, options.seed)
        return index_passes(lengths, options.seq_length, num_samples, options.seed)


class BlendedSamples:
    """Mix the samples of several corpora.

    Args:
        parts: Their samples.
        choices: Which of the parts each sample comes from.
        mixture: What decides the choices, whatever their number; part of the order's key.
    """

    def __init__(self, parts: Sequence[Samples], choices: npt.NDArray[np.int16], mixture: str) -> None:
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

    @property
    def order_key(self) -> str:
        """Hash the order keys of the parts and the mixture."""
        return cache_key({"parts": [part.order_key for part in self.parts], "mixture": self._mixture})


def blend_samples(
    corpora: Sequence[tuple[TokenFile, range | None]],
    weights: Sequence[float] | None,
    options: SampleOptions,
    num_samples: int | None = None,
) -> Samples:
    """Cut one corpus, or mix several.

    Args:
        corpora: Token files, each with the documents to use.
        weights: Proportion of samples, read as the decimal numbers that they are written as (in the order "megatron":
            as doubles, see `megatron_order.py`); None takes each corpus as large as it is.
        options: How windows are cut.
        num_samples: Samples wanted; None is as many as one pass over every corpus has. Without weights the order
            "megatron" gives no more than that.

    Raises:
        UnsupportedError: Weights are not one for each corpus, or have no meaning.
        CorruptDataError: A corpus has too few tokens for one window.
    """
    if len(corpora) == 1 and (weights is None or options.order != "megatron"):
        return GPTSamples(corpora[0][0], options, corpora[0][1], num_samples)
    if weights is not None and len(weights) != len(corpora):
        raise UnsupportedError(f"a blend needs one weight per corpus: {len(weights)} weights, {len(corpora)} corpora.")
    if options.order == "megatron":
        return _blend_as_megatron(corpora, weights, options, num_samples)
    if num_samples is None and (weights is None or options.order in ONCE):
        parts = [GPTSamples(corpus, options, documents) for corpus, documents in corpora]
        return BlendedSamples(parts, blend_exhaustively([len(part) for part in parts]), "exhaustive")
    sizes = _one_pass(corpora, options)
    shares = sizes if weights is None else weights
    size = sum(sizes) if num_samples is None else num_samples
    fields = {"weights": [str(weight) for weight in shares], "size": size}
    choices = _cached(fields, lambda: blend(shares, size), options.cache_dir)
    # a corpus that is never drawn still has to be there, or a run with more samples would fail late
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
    """Mix corpora as Megatron-Core does; without weights each is used once at most, whatever is asked for.

    With weights and no number of samples, which it refuses, the blend is as large as one pass over every corpus.
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
    # Megatron-Core divides weights by their sum, and what it gets once more
    shares = sizes if weights is None else normalize(weights)
    if num_samples is None:
        size, choose = sum(sizes), lambda: blend_exhaustively_as_megatron(sizes)
    else:
        size = num_samples if weights is not None else min(num_samples, sum(sizes))
        choose = lambda: blend_as_megatron(shares, size)  # noqa: E731
    fields = {"megatron": [str(share) for share in shares], "size": size, "exhaustive": num_samples is None}
    choices = _cached(fields, choose, options.cache_dir)
    drawn = np.bincount(choices, minlength=count).tolist()
    for (corpus, _), wanted, available in zip(corpora, drawn, sizes, strict=True):
        if wanted > available:
            raise UnsupportedError(
                f"the order of Megatron draws {wanted} windows of {corpus.prefix}, of which it builds {available}: "
                f"Megatron-Core refuses such a blend, too. Ask for fewer or more samples, change the weights, or use "
                f"order 'passes'."
            )
    mixture = "exhaustive" if num_samples is None else ",".join(map(str, shares))
    return BlendedSamples(parts, choices, f"megatron {mixture}")


def _one_pass(corpora: Sequence[tuple[TokenFile, range | None]], options: SampleOptions) -> list[int]:
    """Count the windows of one pass over each corpus."""
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
    return load_or_build(Path(cache_dir), fields, lambda: {"choices": choose()}, ["choices"])["choices"]
