"""Data module for pre-training BERT: masked pairs of segments from token files of sentences."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_megatron.building_blocks import (
    CorpusDataModule,
    Count,
    Probability,
    Samples,
    coerced_arguments,
)
from lightning_megatron.tasks.bert.masking import NGramMasking, WordPieces
from lightning_megatron.tasks.bert.pair_batches import PairBatches
from lightning_megatron.tasks.bert.pair_samples import (
    BlendedPairs,
    Corpora,
    PairOptions,
    PairSamples,
    SentenceSamples,
    blend_pairs,
)


class BERTDataModule(CorpusDataModule):
    """Batches of masked pairs of segments, for pre-training a BERT with ``BERTPretraining``.

    Each sentence is a sequence of the token files (``preprocess --split_sentences``). A sample
    consists of consecutive sentences of one document up to a target length. They are divided at
    random into two segments, which are swapped with probability 1/2. All random choices depend only
    on the seed, the epoch and the number of the sample, so they are the same in every layout, with
    any number of workers and after a restart. Splits, blends, epochs and the position in a
    checkpoint are those of ``TokenDataModule``.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S), "token_types": (B, S), "valid": (B, S),
        "lengths": (B,), "order": (B,)}, as ``BERTPretraining`` describes it.

    Args:
        tokenizer: WordPiece tokenizer: "bert" (bert-base-uncased), "speeches-wordpiece", or a path.
        seq_length: Tokens of a row, including [CLS], [SEP] and padding.
        order_prediction: Whether a row has two segments, whose order the model predicts; otherwise
            it has one segment.
        short_probability: Probability that the target length of a sample is drawn uniformly from 2
            to the length of a full row.
        mask_probability: Share of a row's tokens to mask; at least one token is masked.
        max_ngram: Largest number of neighbouring words that are masked together. The probability of
            n words is proportional to 1/n (words).
        whole_words: Whether all pieces of a word are masked together.
        options: Arguments of ``CorpusDataModule``: ``train``, ``val``, ``test``, ``split``,
            ``corpus``, ``data_dir``, ``cache_dir``, ``checksums``, and those of ``RowDataModule``:
            ``batch_size``, ``global_batch_size``, ``ramp_up``, ``num_workers``, ``seed``,
            ``train_samples``, ``pin_memory``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If data sources conflict, none is given, or rows are too short.

    Source: Shoeybi et al. 2019, section 4.2; Lan et al. 2019; Megatron-LM
    core/datasets/bert_dataset.py.
    """

    order_settings = (
        "corpus, split, weights, tokenizer, seq_length, order_prediction, short_probability or seed"
    )

    by_sentence = True

    def __init__(
        self,
        train: str | list[str] | dict[str, float] | None = None,
        *,
        tokenizer: str = "bert",
        seq_length: Count = 512,
        order_prediction: bool = True,
        short_probability: Probability = 0.1,
        mask_probability: Probability = 0.15,
        max_ngram: Count = 3,
        whole_words: bool = True,
        **options: Any,
    ) -> None:
        given = coerced_arguments(BERTDataModule.__init__, locals())
        super().__init__(train, tokenizer=tokenizer, seq_length=seq_length, **options)
        self.num_segments = 2 if order_prediction else 1
        self.short_probability: float = given["short_probability"]
        self.masking = NGramMasking(
            given["mask_probability"], given["max_ngram"], given["whole_words"]
        )
        # The options raise an error at once if rows are too short.
        PairOptions(self.seq_length, self.num_segments)

    @cached_property
    def pieces(self) -> WordPieces:
        """Special tokens of the tokenizer, and a mask of the pieces that continue a word."""
        return WordPieces.of(self.tokenizer)

    @override
    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        assert self.pieces.vocab_size, "a tokenizer without BERT's tokens raises here"

    @override
    def training_samples(self, num_samples: int | None) -> Samples:
        samples = blend_pairs(
            self.corpora("train"), self.weights, self._pair_options(self.seed), num_samples
        )
        for line in _summaries(samples):
            rank_zero_info(line)
        return samples

    @override
    def samples_once(self, corpora: Corpora) -> Samples:
        # A constant seed: `limit_val_batches` then compares runs on the same masked text.
        return blend_pairs(corpora, None, self._pair_options(0))

    @override
    def batches_of(self, samples: Samples) -> PairBatches:
        sentences = cast(SentenceSamples, samples)
        return PairBatches(sentences, self.pieces, self.masking, self.num_segments)

    def _pair_options(self, seed: int) -> PairOptions:
        options = PairOptions(
            self.seq_length, self.num_segments, self.short_probability, vocab_size=self.vocab_size
        )
        return replace(options, seed=seed, cache_dir=str(self.cache_folder))


def _summaries(samples: PairSamples | BlendedPairs) -> list[str]:
    parts = samples.parts if isinstance(samples, BlendedPairs) else (samples,)
    return [part.summary() for part in parts if isinstance(part, PairSamples)]
