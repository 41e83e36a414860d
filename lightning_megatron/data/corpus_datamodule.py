"""Base class of data modules of token files, which are opened and checked once."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_megatron.data.corpora import (
    SetPaths,
    bytes_per_token,
    check_corpus_once,
    check_one_tokenizer,
    check_sources,
    check_split,
    files_of_sets,
    has_share,
    split_corpus,
)
from lightning_megatron.data.description import CorpusDescription
from lightning_megatron.data.row_datamodule import PARTS, PARTS_OF_STAGES, RowDataModule
from lightning_megatron.data.samples import Corpora, Samples
from lightning_megatron.data.speeches import prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.token_index import check_header
from lightning_megatron.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.hub import hub_name
from lightning_megatron.plan.settings import NotNegative, coerced_arguments


class CorpusDataModule(RowDataModule):
    """Batches of rows of token files; a subclass cuts the files into rows.

    Args:
        train: Prefix of a token file (path without .bin), a list of them, or prefixes with weights.
        val: Prefixes of the validation corpora; None disables validation. A mapping of names to
            prefixes defines several validation sets, each with a loader.
        test: Prefixes of the test corpora; a mapping defines several sets, as for ``val``.
        split: Weights such as "980,15,5" to divide ``train`` into train, val and test.
        corpus: Name of a bundled corpus. "speeches" is the State of the Union corpus: speeches
            before 2000 are the training part, later ones are both the validation and test part.
        tokenizer: Tokenizer "bytes", "gpt2", or a path. None uses the one recorded with the corpus
            ("bytes" for ``corpus``).
        data_dir: Directory to which the bundled ``corpus`` is written.
        cache_dir: Directory of the index cache; None uses ``index_cache`` next to the first corpus.
        checksums: Whether to compare each token file with the checksum written by ``preprocess``.
            One process reads the files while the others wait; ``cache_dir`` stores the result until
            the size or times of a file change.
        options: Arguments of ``RowDataModule``.
    """

    #: Order of samples; "megatron" splits sequences instead of documents.
    order: Literal["passes", "megatron"] = "passes"
    #: Whether each sentence of a bundled corpus is a sequence.
    by_sentence = False

    def __init__(
        self,
        train: str | list[str] | dict[str, NotNegative] | None = None,
        val: SetPaths = None,
        test: SetPaths = None,
        split: str | None = None,
        corpus: Literal["speeches"] | None = None,
        tokenizer: str | None = None,
        data_dir: str = "data",
        cache_dir: str | None = None,
        checksums: bool = True,
        **options: Any,
    ) -> None:
        given = coerced_arguments(CorpusDataModule.__init__, locals())
        super().__init__(**options)
        check_sources(train, val, test, split, corpus)
        self.split: str | None = given["split"]
        if self.split is not None:
            check_split(self.split, self.order)
        train = given["train"]
        self.weights = list(train.values()) if isinstance(train, dict) else None
        parts = {"train": list(train) if isinstance(train, dict) else train}
        self.files: dict[str, list[str]] = files_of_sets(
            {**parts, "val": given["val"], "test": given["test"]}
        )
        if self.split is not None:
            self.files = dict.fromkeys(PARTS, self.files["train"])
        self.corpus: str | None = given["corpus"]
        self.data_dir: str = given["data_dir"]
        self._tokenizer_spec: str | None = given["tokenizer"]
        self._cache_dir: str | None = given["cache_dir"]
        self._checksums = checksums
        self._opened: dict[str, TokenFile] = {}
        self._checked: set[str] = set()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer given by name or path, or of the bundled corpus; None without both."""
        if self._tokenizer_spec is None and self.corpus is None:
            return None
        return load_tokenizer(self._tokenizer_spec or "bytes")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer, or of the tokenizer recorded with the corpus."""
        return self._known("vocab_size").vocab_size

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the tokenizer has none."""
        return self._known("eod").eod

    @property
    def cache_folder(self) -> Path:
        """Directory of the index cache."""
        return Path(self._cache_dir or Path(self._all_prefixes()[0]).parent / "index_cache")

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the validation corpora, or of the test corpora without any."""
        return self.bytes_per_token_of("val") or self.bytes_per_token_of("test")

    def bytes_per_token_of(self, part: str, name: str | None = None) -> float | None:
        """Return UTF-8 bytes per token of a part's corpora; None if a corpus does not record it.

        Args:
            part: Part of the data.
            name: Name of a set, to use only its corpora; None uses all corpora of the part.
        """
        set_names = self.sets_of(part) if name is None else [f"{part}/{name}"]
        corpora = [corpus for set_name in set_names for corpus, _ in self.corpora(set_name)]
        return bytes_per_token(corpora)

    def prepare_data(self) -> None:
        """Write the bundled corpus unless it exists; Lightning calls this once per node."""
        if self.corpus is not None and not self.files:
            assert self.tokenizer is not None, "a named corpus always has a tokenizer"
            written = prepare_speeches(self.data_dir, self.tokenizer, self.by_sentence)
            heldout = [written["heldout"]]
            self.files = {"train": [written["train"]], "val": heldout, "test": heldout}

    @property
    @override
    def vocab_size_before_launch(self) -> int | None:
        if hub_name(self._tokenizer_spec or "bytes", "model") is not None:
            return None
        known = self.tokenizer
        if known is None and "train" in self.files:
            return getattr(self._open(self.files["train"][0]).description, "vocab_size", None)
        return None if known is None else known.vocab_size

    @override
    def check_before_launch(self, stage: str | None) -> None:
        tokenizer = self._tokenizer_spec or "bytes"
        is_on_hub = hub_name(tokenizer, "model") is not None
        if not is_on_hub:
            find_tokenizer(tokenizer)
        parts = PARTS_OF_STAGES.get(stage, PARTS)
        sets = [files for name, files in self.files.items() if name.partition("/")[0] in parts]
        prefixes = [prefix for files in sets for prefix in files]
        for prefix in prefixes:
            check_header(prefix)
        if not is_on_hub:
            check_one_tokenizer([self._open(prefix) for prefix in prefixes], self.tokenizer)

    @override
    def sets_of(self, part: str) -> list[str]:
        # A bundled corpus names its sets when it is written, and a loader may be built without
        # a Trainer.
        self.prepare_data()
        return super().sets_of(part)

    @override
    def read(self, set_name: str) -> None:
        self.corpora(set_name)

    def corpora(self, set_name: str) -> list[tuple[TokenFile, range | None]]:
        """Return the files of a set, checked, each with the range of its documents (None for all).

        Args:
            set_name: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        self.prepare_data()
        found = [self._open(prefix) for prefix in self.files.get(set_name, ())]
        check_one_tokenizer(found, self.tokenizer)
        for corpus in found:
            if self._checksums and corpus.prefix not in self._checked:
                # If checksums cannot be stored, one process of each node reads the files.
                is_first = getattr(self.trainer, "local_rank", 0) == 0
                check_corpus_once(corpus, self.cache_folder, is_first)
            self._checked.add(corpus.prefix)
        if self.split is None:
            return [(corpus, None) for corpus in found]
        part = PARTS.index(set_name)
        return [(corpus, split_corpus(corpus, self.split, self.order)[part]) for corpus in found]

    @override
    def evaluation_samples(self, set_name: str) -> Samples | None:
        corpora = self.corpora(set_name)
        used = [(corpus, documents) for corpus, documents in corpora if documents != range(0)]
        if used:
            return self.samples_once(used)
        if self.split is not None and has_share(self.split, PARTS.index(set_name)):
            raise UnsupportedError(
                f"each part of split {self.split!r} with a weight above 0 must have a document: it "
                f"leaves no document of {', '.join(self.files['train'])} for {set_name}. Give "
                f"{set_name} a larger weight, or a weight of 0."
            )
        return None

    @abstractmethod
    def samples_once(self, corpora: Corpora) -> Samples:
        """Return one pass over token files, in an order that does not depend on the seed.

        Args:
            corpora: Token files, each with the range of its documents (None for all).
        """

    def _open(self, prefix: str) -> TokenFile:
        if prefix not in self._opened:
            # `corpora` compares the checksums, in a single process and after checking tokenizers.
            self._opened[prefix] = TokenFile(prefix, check=False)
        return self._opened[prefix]

    def _all_prefixes(self) -> list[str]:
        self.prepare_data()
        return [prefix for prefixes in self.files.values() for prefix in prefixes]

    def _recorded(self) -> CorpusDescription | None:
        """Return the first description of a file that records a tokenizer."""
        descriptions = (self._open(prefix).description for prefix in self._all_prefixes())
        return next((found for found in descriptions if found and found.tokenizer), None)

    def _known(self, name: str) -> Any:
        known = self.tokenizer or self._recorded()
        if known is None:
            raise UnsupportedError(
                f"{name} needs a tokenizer: the description of {self._all_prefixes()[0]} records "
                "none. Pass the tokenizer."
            )
        return known
