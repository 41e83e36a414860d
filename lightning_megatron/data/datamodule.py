"""Data module of token files, which resumes within an epoch on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

from typing_extensions import override

from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.corpora import SetPaths
from lightning_megatron.data.corpus_datamodule import CorpusDataModule
from lightning_megatron.data.loader import WindowBatches
from lightning_megatron.data.samples import (
    Corpora,
    Order,
    SampleOptions,
    Samples,
    Windows,
    check_rows,
)
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.settings import NotNegative, coerced_arguments


class TokenDataModule(CorpusDataModule):
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
        order: Order of training samples. "passes" shuffles each pass over the documents
            separately, and computes splits and blends in exact integers. "megatron" reproduces the
            samples of Megatron-Core for the same seed, number of samples, weights and split: it
            shuffles and splits sequences (a document may have several), rounds doubles the same
            way, and ends a blend without weights after one pass.
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
        options: Arguments of ``CorpusDataModule``: ``data_dir``, ``cache_dir``, ``checksums``, and
            those of ``RowDataModule``: ``seq_length``, ``batch_size``, ``global_batch_size``,
            ``ramp_up``, ``num_workers``, ``seed``, ``train_samples``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If data sources conflict or none is given, or ``balance_attention`` is
            used with joined documents.
    """

    order_settings = "corpus, split, weights, tokenizer, seq_length, seed or order"

    def __init__(
        self,
        train: str | list[str] | dict[str, NotNegative] | None = None,
        val: SetPaths = None,
        test: SetPaths = None,
        split: str | None = None,
        corpus: Literal["speeches"] | None = None,
        tokenizer: str | None = None,
        *,
        order: Literal["passes", "megatron"] = "passes",
        mask_after_eod: bool = False,
        documents: Literal["joined", "separate", "whole"] = "joined",
        balance_attention: bool = False,
        **options: Any,
    ) -> None:
        given = coerced_arguments(TokenDataModule.__init__, locals())
        check_rows(documents == "whole", order)
        _check_balance(balance_attention, documents)
        # The base class checks the split, which depends on the order.
        self.order = given["order"]
        super().__init__(train, val, test, split, corpus, tokenizer, **options)
        self.mask_after_eod = mask_after_eod
        self.documents: Literal["joined", "separate", "whole"] = given["documents"]
        self.balance_attention = balance_attention

    @override
    def training_samples(self, num_samples: int | None) -> Samples:
        # Megatron-Core ignores the weight of a single corpus unless it splits the corpus.
        corpora = self.corpora("train")
        weights = None if len(corpora) == 1 and self.split is None else self.weights
        return blend_samples(corpora, weights, self._options(self.order), num_samples)

    @override
    def batches_of(self, samples: Samples) -> WindowBatches:
        if self.mask_after_eod and self.eod is None:
            raise UnsupportedError(
                "mask_after_eod needs an end-of-document token: the tokenizer has none. Leave "
                "mask_after_eod out, or use a tokenizer with such a token."
            )
        ignored = self.eod if self.mask_after_eod else None
        return WindowBatches(cast(Windows, samples), ignored, self.documents != "joined")

    @override
    def samples_once(self, corpora: Corpora) -> Samples:
        # With a fixed seed, `limit_val_batches` selects the same text in every run.
        return blend_samples(corpora, None, replace(self._options("spread"), seed=0))

    def _options(self, order: Order) -> SampleOptions:
        known = self.tokenizer or self._recorded()
        return SampleOptions(
            seq_length=self.seq_length,
            seed=self.seed,
            order=order,
            tokenizer=getattr(known, "fingerprint", None),
            vocab_size=getattr(known, "vocab_size", None),
            cache_dir=str(self.cache_folder),
            by_sequence=self.order == "megatron",
            whole=self.documents == "whole",
        )


def _check_balance(balance_attention: bool, documents: str) -> None:
    if balance_attention and documents == "joined":
        raise UnsupportedError(
            "balance_attention cannot be used with documents='joined', because all rows then have "
            "equal attention work. Use documents='separate', or leave balance_attention out."
        )
