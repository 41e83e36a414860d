"""Named sets of files, checks of the corpora of a run (one tokenizer, intact files), and their
train/val/test split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_megatron.data.checked_files import check_once
from lightning_megatron.data.description import description_path
from lightning_megatron.data.megatron_order import split_as_megatron
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.token_index import bin_path, idx_path
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.data.windows import split_range
from lightning_megatron.errors import CorruptDataError, UnsupportedError

#: Paths of one set, or paths of several sets by name; None means no set.
SetPaths = str | list[str] | dict[str, str | list[str]] | None


def files_of_sets(parts: Mapping[str, SetPaths]) -> dict[str, list[str]]:
    """Return the paths of each part that has paths, or of each of its named sets (``val/news``).

    Args:
        parts: Paths of a part, or of its sets by name; None means no data.

    Raises:
        UnsupportedError: If a mapping has no set, or a set has no name or no path.
    """
    files: dict[str, list[str]] = {}
    for part, paths in parts.items():
        if isinstance(paths, Mapping):
            if not paths or not all(name and listed for name, listed in paths.items()):
                raise UnsupportedError(
                    f"{part} must give each set a name and at least one path: it is {paths!r}. "
                    f"Write {part}={{'news': 'my_news', 'code': ['my_c', 'my_python']}}, or one "
                    "path without a name."
                )
            files |= {f"{part}/{name}": _listed(listed) for name, listed in paths.items()}
        elif paths:
            files[part] = _listed(paths)
    return files


def _listed(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def check_sources(train: object, val: object, test: object, split: object, corpus: object) -> None:
    """Check that the arguments of a data module name its data, and do not conflict.

    Args:
        train: Token files of the training part, or None.
        val: Token files of the validation part, or None.
        test: Token files of the test part, or None.
        split: Weights that divide ``train`` into all parts, or None.
        corpus: Name of a bundled corpus, or None.
    """
    if not (train or val or test or corpus):
        raise UnsupportedError(
            "a data module needs train, val, test or corpus: none of them is given. Pass prefixes "
            "of token files, or corpus 'speeches'."
        )
    if corpus is not None and (train or val or test or split):
        raise UnsupportedError(
            f"corpus {corpus!r} cannot be combined with train, val, test or split, because it "
            "defines all parts. Leave these out, or leave corpus out."
        )
    if split is not None and (val or test or train is None):
        raise UnsupportedError(
            "split needs train, and cannot be combined with val or test, because it divides the "
            "files of train into all parts. Pass train, and leave out val and test."
        )


def check_one_tokenizer(corpora: Sequence[TokenFile], tokenizer: Tokenizer | None) -> None:
    """Check that all corpora were written with the same tokenizer.

    Args:
        tokenizer: Tokenizer of the run; None compares the corpora with each other only.
    """
    fingerprints: dict[str, str] = {}
    for corpus in corpora:
        if tokenizer is not None:
            corpus.check_tokenizer(tokenizer)
        fingerprint = (
            None if corpus.description is None else corpus.description.tokenizer_fingerprint
        )
        if fingerprint is not None:
            fingerprints[fingerprint] = corpus.prefix
    if len(fingerprints) > 1:
        raise CorruptDataError(
            "all corpora of a run must share a tokenizer: "
            f"{' and '.join(fingerprints.values())} were written with different ones. Write them "
            "again with one tokenizer."
        )


def bytes_per_token(corpora: Sequence[TokenFile]) -> float | None:
    """Return UTF-8 bytes per token of corpora; None if a corpus does not record it."""
    descriptions = [corpus.description for corpus in corpora]
    known = [
        description
        for description in descriptions
        if description is not None and description.tokenizer is not None
    ]
    num_tokens = sum(description.num_tokens for description in known)
    if len(known) < len(descriptions) or not num_tokens:
        return None
    return sum(description.num_bytes for description in known) / num_tokens


def check_corpus_once(corpus: TokenFile, results: Path, in_charge: bool) -> None:
    """Compare the files of a corpus with their checksums, unless an earlier run has done so.

    Args:
        in_charge: Whether this process reads the files if ``results`` cannot be written.
    """
    if corpus.description is None or corpus.description.fields_crc32 is None:
        return
    files = [path(corpus.prefix) for path in (bin_path, idx_path, description_path)]
    check_once(results, files, corpus.check_checksums, in_charge)


def split_corpus(corpus: TokenFile, weights: str, order: str) -> tuple[range, ...]:
    """Return the ranges of documents for training, validation and test.

    Args:
        weights: Comma-separated weights of the parts, such as "980,15,5".
        order: Order of samples; "megatron" splits sequences instead of documents.
    """
    if order == "megatron":
        return split_as_megatron(len(corpus), weights)
    return (*split_range(len(corpus.document_starts) - 1, weights), range(0), range(0))


def check_split(weights: str, order: str) -> None:
    """Validate the weights of a split."""
    if len(weights.split(",")) > 3:
        raise UnsupportedError(
            "split weights must be at most three, for train, val and test: they are "
            f"{weights[:80]!r}."
        )
    # A split of zero documents runs the checks of the weights without a corpus.
    if order == "megatron":
        split_as_megatron(0, weights)
    else:
        split_range(0, weights)


def has_share(weights: str, part: int) -> bool:
    """Return whether a part of the split has a positive weight."""
    shares = [float(weight) for weight in weights.split(",")]
    return part < len(shares) and shares[part] > 0
