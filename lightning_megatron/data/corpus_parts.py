"""Token files of the training, validation and test parts, opened and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data.corpora import check_corpus_once, check_one_tokenizer, split_corpus
from lightning_megatron.data.description import CorpusDescription
from lightning_megatron.data.speeches import prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.errors import UnsupportedError

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")


@dataclass(eq=False)
class CorpusParts:
    """Token files of each part of a run.

    Args:
        prefixes: Prefixes of the token files of each part. :meth:`locate` adds those of a bundled
            corpus.
        split: Weights that divide the files of ``train`` into all parts; None means that ``val``
            and ``test`` have separate files.
        order: Order of samples; "megatron" splits sequences instead of documents.
        corpus: Name of a bundled corpus; None means that ``prefixes`` names the files.
        tokenizer_spec: Name or path of the tokenizer; None uses the one recorded with the files.
        cache_dir: Directory of the index cache; None uses ``index_cache`` next to the first file.
        checksums: Whether to compare each file with its checksum.
        sets: Prefixes of the named sets of each part; ``prefixes`` has them, too.
        by_sentence: Whether each sentence of a bundled corpus is a sequence.
    """

    prefixes: dict[Part, list[str]]
    split: str | None
    order: str
    corpus: str | None
    tokenizer_spec: str | None
    data_dir: str
    cache_dir: str | None
    checksums: bool
    sets: Mapping[Part, Mapping[str, list[str]]] = field(default_factory=dict)
    by_sentence: bool = False
    _files: dict[str, TokenFile] = field(default_factory=dict)
    _checked: set[Part] = field(default_factory=set)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer given by name or path, or of the bundled corpus; None without both."""
        if self.tokenizer_spec is None and self.corpus is None:
            return None
        return load_tokenizer(self.tokenizer_spec or "bytes")

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer that is given or recorded; None without such a tokenizer."""
        if self.tokenizer:
            return self.tokenizer.fingerprint
        description = self._description()
        return None if description is None else description.tokenizer_fingerprint

    @property
    def known_vocab_size(self) -> int | None:
        """Size of the vocabulary; None if no tokenizer is known (tokens)."""
        known = self.tokenizer or self._description()
        return known.vocab_size if known else None

    @property
    def cache_folder(self) -> Path:
        """Directory of the index cache."""
        return Path(self.cache_dir or Path(self._all_prefixes()[0]).parent / "index_cache")

    def tokenizer_field(self, name: Literal["vocab_size", "eod"]) -> Any:
        """Return a field of the tokenizer that is given or recorded with the files."""
        known = self.tokenizer or self._description()
        if known is None:
            raise UnsupportedError(
                f"{name} needs a tokenizer: the description of {self._all_prefixes()[0]} records "
                "none. Pass the tokenizer."
            )
        return getattr(known, name)

    def locate(self) -> None:
        """Write the bundled corpus unless it exists, and set its prefixes."""
        if self.corpus is not None and not self.prefixes["train"]:
            assert self.tokenizer is not None, "a named corpus always has a tokenizer"
            written = prepare_speeches(self.data_dir, self.tokenizer, self.by_sentence)
            heldout = [written["heldout"]]
            self.prefixes = {"train": [written["train"]], "val": heldout, "test": heldout}

    def of(
        self, part: Part, in_charge: bool = True, name: str | None = None
    ) -> list[tuple[TokenFile, range | None]]:
        """Return the files of a part, each with the range of its documents (None for all).

        Args:
            in_charge: Whether this process compares checksums if the result cannot be stored.
            name: Name of a set, to return only its files; None returns all files of the part.
        """
        self.locate()
        self._check(part, in_charge)
        if self.split is None:
            prefixes = self.prefixes[part] if name is None else self.sets[part][name]
            return [(self._open(prefix), None) for prefix in prefixes]
        corpora: list[tuple[TokenFile, range | None]] = []
        for prefix in self.prefixes["train"]:
            corpus = self._open(prefix)
            # The parts of one split are disjoint.
            corpora.append(
                (corpus, split_corpus(corpus, self.split, self.order)[PARTS.index(part)])
            )
        return corpora

    def _open(self, prefix: str) -> TokenFile:
        if prefix not in self._files:
            # `_check` compares the checksums, in a single process and after checking tokenizers.
            self._files[prefix] = TokenFile(prefix, check=False)
        return self._files[prefix]

    def _all_prefixes(self) -> list[str]:
        self.locate()
        return [prefix for part in PARTS for prefix in self.prefixes[part]]

    def _description(self) -> CorpusDescription | None:
        descriptions = (self._open(prefix).description for prefix in self._all_prefixes())
        return next(
            (
                description
                for description in descriptions
                if description is not None and description.tokenizer is not None
            ),
            None,
        )

    def _check(self, part: Part, in_charge: bool) -> None:
        if part in self._checked:
            return
        names = self.prefixes["train" if self.split else part]
        corpora = [self._open(prefix) for prefix in names]
        check_one_tokenizer(corpora, self.tokenizer)
        if self.checksums:
            for corpus in corpora:
                check_corpus_once(corpus, self.cache_folder, in_charge)
        self._checked.add(part)
