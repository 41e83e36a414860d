"""Data module of token files, which resumes within an epoch on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from typing_extensions import override

from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.corpora import (
    all_paths,
    bytes_per_token,
    check_sources,
    check_split,
    has_share,
    list_prefixes,
    named_sets,
)
from lightning_megatron.data.corpus_parts import PARTS, CorpusParts, Part
from lightning_megatron.data.loader import TokenLoader, WindowBatches
from lightning_megatron.data.row_datamodule import RowDataModule, row_arguments
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Order, SampleOptions, Samples, check_rows
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.global_batch import RampUp
from lightning_megatron.plan.settings import (
    Count,
    Elements,
    Index,
    NotNegative,
    Range,
    coerced_arguments,
)


class TokenDataModule(RowDataModule):
    """Batches of fixed-length token windows from token files, for pretraining a language model.

    An epoch of training is ``max_steps`` batches if only ``max_steps`` limits the Trainer, and one
    pass over the corpus otherwise. Validation and test use every token once, in a fixed shuffled
    order. The state counts samples over all data-parallel ranks, so training resumes with another
    number of ranks without repeating or skipping samples.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}. Labels are shifted by one token, and the
        loss ignores -100. Separate documents add {"lengths": (B, L)}, the number of tokens of each
        document.

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
        seq_length: Tokens per window.
        batch_size: Samples per data-parallel rank and batch; 1 if no size is given.
        global_batch_size: Samples of each optimizer step over all data-parallel ranks; replaces
            ``batch_size``. The batch of a rank is an equal share of them, which ``microbatch_size``
            of the strategy divides into microbatches. Losses do not depend on the number of ranks,
            so a run that loses hosts continues with the same losses on the remaining ones.
        ramp_up: Growth of ``global_batch_size`` at the start of training: ``start`` is the first
            size, ``increment`` is the number of samples that each growth adds, and ``samples`` is
            the number of samples after which the size is full.
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        order: Order of training samples. "passes" shuffles each pass over the documents
            separately, and computes splits and blends in exact integers. "megatron" reproduces the
            samples of Megatron-Core for the same seed, number of samples, weights and split: it
            shuffles and splits sequences (a document may have several), rounds doubles the same
            way, and ends a blend without weights after one pass.
        train_samples: Training samples per epoch over all ranks; None uses the default above.
        mask_after_eod: Whether the loss ignores the label that follows an end-of-document token.
        documents: With "joined", attention and positions continue across the ends of documents in a
            window. With "separate", both restart at each document, and the loss ignores the labels
            across the ends. "whole" also packs whole documents into samples by best fit, and cuts
            only documents that are longer than a sample. The samples of a pass have all tokens of
            the corpus, except documents of one token, and little padding.
        balance_attention: Whether to assign the samples of each global batch to data ranks and
            microbatches so that all have about equal attention work, which is the sum of the
            squares of document lengths. The samples of a global batch, the loss and the position in
            the data do not change. Needs separate documents.
        data_dir: Directory to which the bundled ``corpus`` is written.
        cache_dir: Directory of the index cache; None uses ``index_cache`` next to the first corpus.
        checksums: Whether to compare each token file with the checksum written by ``preprocess``.
            One process reads the files while the others wait; ``cache_dir`` stores the result until
            the size or times of a file change.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If data sources conflict or none is given, or ``balance_attention`` is
            used with joined documents.
    """

    order_settings = "corpus, split, weights, tokenizer, seq_length, seed or order"

    def __init__(
        self,
        train: str | list[str] | dict[str, NotNegative] | None = None,
        val: str | list[str] | dict[str, str | list[str]] | None = None,
        test: str | list[str] | dict[str, str | list[str]] | None = None,
        split: str | None = None,
        corpus: Literal["speeches"] | None = None,
        tokenizer: str | None = None,
        seq_length: Count = 1024,
        batch_size: Count | None = None,
        global_batch_size: Count | None = None,
        ramp_up: RampUp | None = None,
        num_workers: Index = 0,
        seed: Annotated[int, Range(minimum=0, maximum=2**32 - 1)] = 1234,
        order: Literal["passes", "megatron"] = "passes",
        train_samples: Elements | None = None,
        mask_after_eod: bool = False,
        documents: Literal["joined", "separate", "whole"] = "joined",
        balance_attention: bool = False,
        data_dir: str = "data",
        cache_dir: str | None = None,
        pin_memory: bool | None = None,
        checksums: bool = True,
    ) -> None:
        given = coerced_arguments(TokenDataModule.__init__, locals())
        super().__init__(**row_arguments(given))
        check_sources(train, val, test, split, corpus)
        check_rows(documents == "whole", order)
        _check_balance(balance_attention, documents)
        if split is not None:
            check_split(given["split"], given["order"])
        sets: dict[Part, dict[str, list[str]]] = {
            "val": named_sets("val", given["val"]),
            "test": named_sets("test", given["test"]),
        }
        self.set_names = {part: tuple(named) for part, named in sets.items()}
        self._parts = CorpusParts(
            {
                "train": list_prefixes(given["train"]),
                "val": all_paths(given["val"]),
                "test": all_paths(given["test"]),
            },
            split=given["split"],
            order=given["order"],
            corpus=given["corpus"],
            tokenizer_spec=given["tokenizer"],
            data_dir=given["data_dir"],
            cache_dir=given["cache_dir"],
            checksums=checksums,
            sets=sets,
        )
        self.weights = list(given["train"].values()) if isinstance(given["train"], dict) else None
        self.split: str | None = given["split"]
        self.order: Literal["passes", "megatron"] = given["order"]
        self.mask_after_eod = mask_after_eod
        self.documents: Literal["joined", "separate", "whole"] = given["documents"]
        self.data_dir: str = given["data_dir"]

    @property
    def prefixes(self) -> dict[Part, list[str]]:
        """Prefixes of the token files of each part."""
        return self._parts.prefixes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer given by name or path, or of the bundled corpus; None without both."""
        return self._parts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._parts.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer, or of the tokenizer recorded with the corpus."""
        return self._parts.tokenizer_field("vocab_size")

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the tokenizer has none."""
        return self._parts.tokenizer_field("eod")

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the validation corpora, or of the test corpora without any."""
        return self.bytes_per_token_of("val") or self.bytes_per_token_of("test")

    def bytes_per_token_of(self, part: Part, name: str | None = None) -> float | None:
        """Return UTF-8 bytes per token of a part's corpora; None if a corpus does not record it.

        Args:
            part: Part of the data.
            name: Name of a set, to use only its corpora; None uses all corpora of the part.
        """
        return bytes_per_token([corpus for corpus, _ in self._corpora(part, name)])

    def prepare_data(self) -> None:
        """Write the bundled corpus unless it exists; Lightning calls this once per node."""
        self._parts.locate()

    def setup(self, stage: str | None = None) -> None:
        """Open and check the corpora of a stage, so that errors occur before the first step."""
        self.restart()
        self._parts.locate()
        parts: dict[str | None, tuple[Part, ...]] = {
            "fit": ("train", "val"),
            "validate": ("val",),
            "test": ("test",),
        }
        for part in parts.get(stage, PARTS):
            self._corpora(part)

    def val_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every validation token once, in a fixed shuffled order.

        With named sets, the result is a list of one loader for each set.
        """
        return self._evaluation_loaders("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every test token once, in a fixed shuffled order.

        With named sets, the result is a list of one loader for each set.
        """
        return self._evaluation_loaders("test")

    @override
    def training_samples(self, num_samples: int | None) -> Samples:
        # Megatron-Core ignores the weight of a single corpus unless it splits the corpus.
        weights = None if len(self.prefixes["train"]) == 1 and self.split is None else self.weights
        return blend_samples(
            self._corpora("train"), weights, self._options(self.order), num_samples
        )

    @override
    def loader_of(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        if self.mask_after_eod and self.eod is None:
            raise UnsupportedError(
                "mask_after_eod needs an end-of-document token: the tokenizer has none. Leave "
                "mask_after_eod out, or use a tokenizer with such a token."
            )
        ignored = self.eod if self.mask_after_eod else None
        batches = WindowBatches(samples, ignored, self.documents != "joined")
        return TokenLoader(batches, sampler, self.num_workers, self.pin_memory)

    def evaluation_samples(self, corpora: Sequence[tuple[TokenFile, range | None]]) -> Samples:
        """Return one pass over token files, in an order that does not depend on the seed.

        Args:
            corpora: Token files, each with the range of its documents (None for all).
        """
        # With a fixed seed, `limit_val_batches` selects the same text in every run.
        return blend_samples(corpora, None, replace(self._options("spread"), seed=0))

    def _evaluation_loaders(self, part: Part) -> TokenLoader | list:
        names = self.set_names[part]
        return [self._evaluation_loader(part, name) for name in names] or self._evaluation_loader(
            part
        )

    def _evaluation_loader(self, part: Part, name: str | None = None) -> TokenLoader | list:
        corpora = [
            (corpus, documents)
            for corpus, documents in self._corpora(part, name)
            if documents is None or documents
        ]
        if not corpora and self.split is not None and has_share(self.split, PARTS.index(part)):
            raise UnsupportedError(
                f"each part of split {self.split!r} with a weight above 0 must have a document: it "
                f"leaves no document of {', '.join(self.prefixes['train'])} for {part}. Give "
                f"{part} a larger weight, or a weight of 0."
            )
        if not corpora:
            return []
        return self.evaluation_loader(self.evaluation_samples(corpora))

    def _options(self, order: Order) -> SampleOptions:
        return SampleOptions(
            seq_length=self.seq_length,
            seed=self.seed,
            order=order,
            tokenizer=self._parts.fingerprint,
            vocab_size=self._parts.known_vocab_size,
            cache_dir=str(self._parts.cache_folder),
            by_sequence=self.order == "megatron",
            whole=self.documents == "whole",
        )

    def _corpora(self, part: Part, name: str | None = None) -> list[tuple[TokenFile, range | None]]:
        # If checksums cannot be stored, one process of each node reads the files.
        return self._parts.of(part, getattr(self.trainer, "local_rank", 0) == 0, name)


def _check_balance(balance_attention: bool, documents: str) -> None:
    if balance_attention and documents == "joined":
        raise UnsupportedError(
            "balance_attention cannot be used with documents='joined', because all rows then have "
            "equal attention work. Use documents='separate', or leave balance_attention out."
        )
