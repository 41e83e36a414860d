"""Blends of the samples of several corpora."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

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
from lightning_megatron.data.samples import (
    ONE_PASS_ORDERS,
    Corpora,
    GPTSamples,
    SampleOptions,
    Samples,
    Windows,
)
from lightning_megatron.data.windows import num_windows
from lightning_megatron.errors import UnsupportedError


class BlendedSamples:
    """Blend of the samples of several corpora.

    Args:
        parts: Samples of each corpus.
        choices: Index of the part from which each sample comes.
        mixture: Text that identifies the rule of the choices, such as the weights. It is part of
            ``order_key``.
    """

    def __init__(self, parts: Sequence[Any], choices: npt.NDArray[np.int16], mixture: str) -> None:
        self._mixture = mixture
        self.parts = tuple(parts)
        self.seq_length = parts[0].seq_length
        self.choices = choices
        self.numbers = occurrences(choices, len(parts))

    @classmethod
    def of(
        cls,
        count: int,
        open_part: Callable[[int, int | None], Samples],
        weights: Sequence[float] | None,
        num_samples: int | None,
        cache_dir: str | None,
        one_pass: Callable[[], list[int]] | None = None,
    ) -> Self:
        """Return a blend whose samples are drawn from the corpora by their weights.

        Args:
            count: Number of corpora.
            open_part: Function that takes the index of a corpus and a number of samples (None for
                one pass), and returns the samples of this corpus.
            weights: Share of each corpus in the samples, exact in its decimal notation; None uses
                the sizes of one pass.
            num_samples: Number of samples; None uses one pass over every corpus.
            cache_dir: Directory of the index cache; None keeps the choices in memory.
            one_pass: Function that returns the number of samples of one pass over each corpus; None
                opens the parts to count them.

        Raises:
            UnsupportedError: If the number of weights differs from the number of corpora, or
                weights are invalid.
        """
        _check_weights(weights, count)
        if num_samples is None and weights is None:
            parts = [open_part(number, None) for number in range(count)]
            return cls(parts, blend_exhaustively([len(part) for part in parts]), "exhaustive")
        if one_pass is None:
            sizes = [len(open_part(number, None)) for number in range(count)]
        else:
            sizes = one_pass()
        shares = sizes if weights is None else weights
        size = sum(sizes) if num_samples is None else num_samples
        fields = {"weights": [str(weight) for weight in shares], "size": size}
        choices = _cached(fields, lambda: blend(shares, size), cache_dir)
        # Open every corpus, even one from which no sample is drawn. A damaged corpus would
        # otherwise fail only in a longer run.
        drawn = np.maximum(np.bincount(choices, minlength=count), 1).tolist()
        parts = [open_part(number, drawn[number]) for number in range(count)]
        return cls(parts, choices, ",".join(map(str, integer_weights(shares))))

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}.")
        return self.parts[self.choices[index]][int(self.numbers[index])]

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in order."""
        return self.parts[self.choices[index]].lengths(int(self.numbers[index]))

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a window."""
        return max(part.max_documents for part in self.parts)

    @property
    def order_key(self) -> str:
        """Hash of the parts' order keys and the mixture."""
        return cache_key(
            {"parts": [part.order_key for part in self.parts], "mixture": self._mixture}
        )


def blend_samples(
    corpora: Corpora,
    weights: Sequence[float] | None,
    options: SampleOptions,
    num_samples: int | None = None,
) -> Windows:
    """Return the windows of one corpus, or a blend of several corpora.

    Args:
        corpora: Token files, each with the range of documents to use.
        weights: Share of each corpus in the samples, exact in its decimal notation. In the order
            "megatron" it is a double (see ``megatron_order.py``). None uses the sizes of the
            corpora.
        num_samples: Number of samples; None uses one pass over every corpus. The order "megatron"
            without weights returns at most one pass.
    """
    if len(corpora) == 1 and (weights is None or options.order != "megatron"):
        return GPTSamples(corpora[0][0], options, corpora[0][1], num_samples)
    _check_weights(weights, len(corpora))
    if options.order == "megatron":
        return _blend_as_megatron(corpora, weights, options, num_samples)

    def open_part(number: int, size: int | None) -> Samples:
        corpus, documents = corpora[number]
        return GPTSamples(corpus, options, documents, size)

    if num_samples is None and options.order in ONE_PASS_ORDERS:
        weights = None
    return BlendedSamples.of(
        len(corpora),
        open_part,
        weights,
        num_samples,
        options.cache_dir,
        lambda: _one_pass(corpora, options),
    )


def _check_weights(weights: Sequence[float] | None, count: int) -> None:
    if weights is not None and len(weights) != count:
        raise UnsupportedError(
            f"a blend needs one weight for each corpus: it has {len(weights)} weights and "
            f"{count} corpora."
        )


def _blend_as_megatron(
    corpora: Corpora,
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
    for (corpus, _), num_drawn, num_built in zip(corpora, drawn, sizes, strict=True):
        if num_drawn > num_built:
            raise UnsupportedError(
                f"a blend in the order 'megatron' must not draw more windows of a corpus than it "
                f"builds: it draws {num_drawn} of {corpus.prefix} and builds {num_built}. "
                "Megatron-Core rejects such a blend, too. Use another number of samples, other "
                "weights, or order 'passes'."
            )
    mixture = "exhaustive" if num_samples is None else ",".join(map(str, shares))
    return BlendedSamples(parts, choices, f"megatron {mixture}")


def _one_pass(corpora: Corpora, options: SampleOptions) -> list[int]:
    """Return the number of windows of one pass over each corpus."""
    counts = []
    for corpus, documents in corpora:
        bounds = options.bounds(corpus)
        used = range(len(bounds) - 1) if documents is None else documents
        if options.whole:
            counts.append(len(GPTSamples(corpus, options, documents)))
            continue
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
