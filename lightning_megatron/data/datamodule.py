"""Data module of token files, data-parallel and resumable within an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from typing_extensions import override

from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.corpora import (
    bytes_per_token,
    check_sources,
    check_split,
    has_share,
    list_prefixes,
)
from lightning_megatron.data.corpus_parts import PARTS, CorpusParts, Part
from lightning_megatron.data.loader import TokenLoader, WindowBatches
from lightning_megatron.data.named_sets import all_paths, named_sets
from lightning_megatron.data.row_datamodule import RowDataModule
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Order, SampleOptions, Samples, check_rows
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.data.window_packing import check_context_windows
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

    An epoch of training is ``max_steps`` batches if the Trainer stops by steps alone, and one pass
    over the corpus otherwise. Validation and test use every token once, in a fixed shuffled order.
    The state counts samples over all data-parallel ranks: training resumes under another number of
    ranks without repeating or skipping samples.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}: shifted labels, of which -100 is ignored.
        Separate documents add {"lengths": (B, L)}.

    Args:
        train: Prefix of a token file (path without .bin), a list of them, or prefixes with weights.
        val: Prefixes of the validation corpora; None disables validation. A mapping of names to
            prefixes makes a set, and a loader, of each name.
        test: Prefixes of the test corpora, or of named sets of them.
        split: Weights such as "980,15,5" to divide ``train`` into train, val and test.
        corpus: Name of a bundled corpus. "speeches" is the State of the Union corpus: speeches
            before 2000 are the training part, later ones serve as val and test.
        tokenizer: Tokenizer "bytes", "gpt2", or a path. None uses the one recorded with the corpus
            ("bytes" for ``corpus``).
        seq_length: Tokens per window.
        batch_size: Samples per data-parallel rank and batch; 1 if no size is given.
        global_batch_size: Samples of each optimizer step over all data-parallel ranks, in place of
            ``batch_size``. A rank's batch is its share, which ``microbatch_size`` of the strategy
            cuts. Losses do not depend on the number of ranks, so a run that loses hosts continues
            as before, but slower.
        ramp_up: Growth of ``global_batch_size`` at the start: the first size (start), what each
            step adds to it (increment), and the samples after which it is full (samples).
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        order: Order of training samples. "passes" shuffles each pass over the documents
            separately, and computes splits and blends in exact integers. "megatron" reproduces the
            samples of Megatron-Core for the same seed, number of samples, weights and split: it
            shuffles and splits sequences (a document may have several), rounds doubles the same
            way, and ends a blend without weights after one pass.
        train_samples: Training samples per epoch over all ranks; None derives it as above.
        mask_after_eod: Whether to ignore the label that follows an end-of-document token.
        documents: "joined" lets attention and positions run over the ends of documents in a window.
            "separate" restarts both at each document, and ignores the labels across the ends.
            "whole" does so too, and packs whole documents into samples by best fit: only those that
            are longer than a sample are cut. Samples of each pass have all tokens of it, except
            documents of one token, and are nearly full.
        context_windows: Windows of a sample, a power of two. Whole documents then lie in spans of
            1, 2, 4 ... neighbouring windows, no longer than the longest document of the sample
            needs. Set it to the strategy's ``cp`` with ``cp_groups="documents"``, whose groups of
            ranks share such spans. Only with whole documents.
        balance_attention: Whether to assign the samples of each global batch to data ranks and
            microbatches so that these have about equal attention work, the sum of the squares of
            documents' lengths. Which samples a global batch has, the loss and the position in the
            data do not change; only with separate documents.
        data_dir: Directory to which the bundled ``corpus`` is written.
        cache_dir: Directory of the index cache; None uses ``index_cache`` next to the first corpus.
        checksums: Whether to compare each token file with the checksum written by ``preprocess``.
            One process reads the files while the others wait; ``cache_dir`` stores the result until
            the size or times of a file change.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
        UnsupportedError: If data sources conflict, or none is given, if joined documents are to be
            balanced, or windows are to be kept by others than whole documents.
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
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 1234,
        order: Literal["passes", "megatron"] = "passes",
        train_samples: Elements | None = None,
        mask_after_eod: bool = False,
        documents: Literal["joined", "separate", "whole"] = "joined",
        context_windows: Count = 1,
        balance_attention: bool = False,
        data_dir: str = "data",
        cache_dir: str | None = None,
        pin_memory: bool | None = None,
        checksums: bool = True,
    ) -> None:
        given = coerced_arguments(TokenDataModule.__init__, locals())
        super().__init__(
            given["seq_length"],
            given["batch_size"],
            given["global_batch_size"],
            given["ramp_up"],
            given["num_workers"],
            given["seed"],
            given["train_samples"],
            balance_attention,
            pin_memory,
        )
        check_sources(train, val, test, split, corpus)
        check_rows(documents == "whole", order)
        check_context_windows(given["context_windows"], given["seq_length"], documents == "whole")
        if balance_attention and documents == "joined":
            raise UnsupportedError(
                "balance_attention cannot be used with documents='joined', because attention over "
                "whole rows has equal work in each of them. Use documents='separate', or leave it "
                "out."
            )
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
        self.context_windows: int = given["context_windows"]
        self.data_dir: str = given["data_dir"]

    @property
    def prefixes(self) -> dict[Part, list[str]]:
        """Prefixes of the token files of each part."""
        return self._parts.prefixes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer given by name or path; None if none was given and no bundled corpus is used."""
        return self._parts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._parts.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer, or of the tokenizer recorded with the corpus."""
        return self._parts.tokenizer_fact("vocab_size")

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the tokenizer has none."""
        return self._parts.tokenizer_fact("eod")

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the validation corpus, else of the test corpus."""
        return self.bytes_per_token_of("val") or self.bytes_per_token_of("test")

    def bytes_per_token_of(self, part: Part, name: str | None = None) -> float | None:
        """Return UTF-8 bytes per token of a part's corpora; None if not recorded.

        Args:
            part: Part of the data.
            name: Name of a set, for its corpora alone; None means all of the part.
        """
        return bytes_per_token([corpus for corpus, _ in self._corpora(part, name)])

    def prepare_data(self) -> None:
        """Write the bundled corpus unless it exists; called in one process per node."""
        self._parts.locate()

    def setup(self, stage: str | None = None) -> None:
        """Open and check the corpora of a stage, so that faults raise before the first step."""
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
        """Build the loader that yields every validation token once, in a fixed shuffled order.

        Named sets have a loader each, in a list.
        """
        return self._evaluation_loaders("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Build the loader that yields every test token once, in a fixed shuffled order.

        Named sets have a loader each, in a list.
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
            corpora: Token files, each with the range of its documents; None means all.
        """
        # Fixed seed: `limit_val_batches` then compares runs on the same text.
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
                f"split {self.split!r} leaves no document of {', '.join(self.prefixes['train'])} "
                f"for {part}. Give {part} a larger weight, or a weight of 0."
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
            context_windows=self.context_windows,
        )

    def _corpora(self, part: Part, name: str | None = None) -> list[tuple[TokenFile, range | None]]:
        # If checksums cannot be stored, one process of each node reads the files.
        return self._parts.of(part, getattr(self.trainer, "local_rank", 0) == 0, name)
