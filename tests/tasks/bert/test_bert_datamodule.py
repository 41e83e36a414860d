"""Rows of BERTDataModule consist of sentences, and depend only on seed, row number and epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.tasks.bert import BERTDataModule
from lightning_megatron.tasks.bert.pair_batches import PairBatches, _truncated_sizes
from lightning_megatron.tasks.bert.pair_samples import PairOptions, PairSamples
from tests.data.recorder import Watcher, make_trainer, run
from tests.tasks.bert.bert_corpus import VOCABULARY, write_sentences, write_vocabulary

LENGTH = 32
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    return write_vocabulary(tmp_path / "vocab.txt")


@pytest.fixture
def corpus(tmp_path: Path, vocabulary: str) -> str:
    return write_sentences(tmp_path / "corpus", vocabulary)


def module_of(corpus: Any, vocabulary: str, **options: Any) -> BERTDataModule:
    return BERTDataModule(corpus, tokenizer=vocabulary, seq_length=LENGTH, **options)


def rows_of(data: BERTDataModule, count: int = 200) -> tuple[PairBatches, dict[str, torch.Tensor]]:
    samples = data.training_samples(count)
    batches = data.loader_of(samples, TokenBatchSampler(count, 1)).batches
    assert isinstance(batches, PairBatches)
    return batches, batches[list(range(count))]


def test_a_row_holds_two_parts_of_one_document_in_order_or_swapped(corpus, vocabulary):
    batches, rows = rows_of(module_of(corpus, vocabulary))
    text = TokenFile(corpus).tokens.tolist()
    num_untruncated = 0
    for row in range(200):
        labels = rows["labels"][row]
        unmasked = torch.where(labels == -100, rows["tokens"][row], labels)
        size = int(rows["valid"][row].sum())
        assert rows["valid"][row, :size].all()
        assert rows["lengths"][row] == size
        assert (rows["tokens"][row, size:] == 0).all()
        assert (labels[size:] == -100).all()
        tokens = unmasked[:size].tolist()
        assert (tokens[0], tokens[-1]) == (CLS, SEP)
        border = tokens.index(SEP)
        types = rows["token_types"][row].tolist()
        assert types == [0] * (border + 1) + [1] * (size - border - 1) + [0] * (LENGTH - size)
        first, second = tokens[1:border], tokens[border + 1 : -1]
        sentences, target = batches.samples.sentences(row)
        assert len(first) + len(second) == min(target, sum(map(len, sentences)))
        sample_tokens = [token for sentence in sentences for token in sentence.tolist()]
        assert " ".join(map(str, sample_tokens)) in " ".join(map(str, text))
        if rows["order"][row]:
            first, second = second, first
        if len(first) + len(second) == len(sample_tokens):
            assert first + second == sample_tokens
            ends = np.cumsum([len(sentence) for sentence in sentences])[:-1].tolist()
            assert len(first) in ends
            num_untruncated += 1
        else:
            for part in (first, second):
                starts = range(len(sample_tokens))
                assert any(sample_tokens[at : at + len(part)] == part for at in starts)
    assert 20 < num_untruncated < 180
    assert 0.4 < rows["order"].double().mean() < 0.6


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 60))
def test_truncation_removes_tokens_of_the_longer_segment_one_by_one(first, second, target):
    expected = [first, second]
    while sum(expected) > target:
        expected[0 if expected[0] > expected[1] else 1] -= 1
    assert _truncated_sizes(first, second, target) == tuple(expected)


def test_rows_of_one_segment_or_without_a_sample(corpus, vocabulary):
    batches, rows = rows_of(module_of(corpus, vocabulary, order_prediction=False))
    assert not rows["order"].any()
    assert not rows["token_types"].any()
    unmasked = torch.where(rows["labels"] == -100, rows["tokens"], rows["labels"])
    assert ((unmasked == SEP).sum(1) == 1).all()
    assert batches.samples.sentences(0)[1] <= LENGTH - 2
    batches, _ = rows_of(module_of(corpus, vocabulary))
    empty = batches[[-1]]
    assert empty["tokens"][0].tolist() == [CLS] + [0] * (LENGTH - 1)
    assert empty["valid"][0].tolist() == [True] + [False] * (LENGTH - 1)
    assert empty["lengths"][0] == 1
    assert (empty["labels"] == -100).all()


def test_rows_depend_only_on_seed_row_number_and_epoch(corpus, vocabulary):
    _, rows = rows_of(module_of(corpus, vocabulary))
    batches, _ = rows_of(module_of(corpus, vocabulary), count=500)
    for number in (7, 3, 180):
        actual = batches[[number]]
        for name, values in rows.items():
            assert torch.equal(actual[name][0], values[number]), name
    _, rows_of_seed_2 = rows_of(module_of(corpus, vocabulary, seed=2))
    assert not torch.equal(rows_of_seed_2["tokens"], rows["tokens"])
    stored, _ = rows_of(module_of(corpus, vocabulary), count=500)
    assert np.array_equal(stored.samples._index, batches.samples._index), "read from the cache"
    # The same sample in another epoch has other masks.
    batches.epoch = 1
    assert not torch.equal(batches[[7]]["labels"][0], rows["labels"][7])


class RowRecorder(Watcher):
    """Module that records each row of training and validation."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        return row_tuples(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated.append(row_tuples(batch))


def row_tuples(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    joined = torch.cat([batch["tokens"], batch["labels"], batch["order"][:, None]], dim=1)
    return [tuple(row) for row in joined.tolist()]


def test_validation_has_every_sample_once_with_the_same_masks(tmp_path, corpus, vocabulary):
    rows_of_runs = []
    for seed, batch_size in ((1, 4), (2, 16)):
        data = module_of(corpus, vocabulary, val=corpus, seed=seed, batch_size=batch_size)
        module, limits = RowRecorder(), {"num_sanity_val_steps": 0, "limit_train_batches": 1}
        run(module, data, make_trainer(tmp_path, max_epochs=2, **limits))
        rows = [row for batch in module.validated for row in batch if max(row[LENGTH:]) > 0]
        half = len(rows) // 2
        assert rows[:half] == rows[half:], "both epochs of the Trainer have the same rows"
        assert len(set(rows[:half])) > 0.9 * half
        rows_of_runs.append(rows[:half])
    assert rows_of_runs[0] == rows_of_runs[1]
    assert len(rows_of_runs[0]) == len(PairSamples(TokenFile(corpus), PairOptions(LENGTH, seed=0)))


def test_a_split_is_disjoint_and_a_blend_has_its_shares(tmp_path, corpus, vocabulary):
    data = module_of(corpus, vocabulary, split="6,2,2")
    data.setup()
    ranges = [data.corpora(part)[0][1] for part in ("train", "val", "test")]
    num_documents = len(TokenFile(corpus).document_starts) - 1
    assert [n for documents in ranges for n in documents] == list(range(num_documents))
    bounds = np.unique(TokenFile(corpus).document_index)
    assert data.training_samples(300)._index[:, 1].max() <= bounds[ranges[0].stop]
    assert len(data.val_dataloader()) > 0
    second_corpus = write_sentences(tmp_path / "other", vocabulary, num_documents=9, seed=5)
    weights = {corpus: 0.25, second_corpus: 0.75}
    blend, longer = (module_of(weights, vocabulary).training_samples(n) for n in (80, 160))
    assert np.bincount(blend.choices).tolist() == [20, 60]
    assert blend.order_key == longer.order_key
    for number in range(80):
        first, again = (samples.sentences(number)[0] for samples in (blend, longer))
        assert np.array_equal(np.concatenate(first), np.concatenate(again))
    once = module_of([corpus, second_corpus], vocabulary).training_samples(None)
    sizes = [len(PairSamples(TokenFile(p), PairOptions(LENGTH))) for p in weights]
    assert (len(once), once.order_key != blend.order_key) == (sum(sizes), True)


def test_invalid_data_and_settings_are_refused(tmp_path, corpus, vocabulary):
    for name, vocab_size, documents in (
        ("whole", VOCABULARY, [(np.full(10, 7), None)] * 3),
        ("bytes", 257, [(np.full(20, 200), [10, 10])]),
    ):
        with TokenFileWriter(tmp_path / name, vocab_size=vocab_size) as writer:
            for tokens, lengths in documents:
                writer.add_document(tokens, lengths=lengths)
    with pytest.raises(CorruptDataError, match="preprocess --split_sentences"):
        module_of(str(tmp_path / "whole"), vocabulary).training_samples(5)
    with pytest.raises(CorruptDataError, match="vocabulary of 61 tokens: sample 0"):
        module_of(str(tmp_path / "bytes"), vocabulary).training_samples(5).sentences(0)
    with pytest.raises(UnsupportedError, match=r"'bytes' lacks \[PAD\]"):
        BERTDataModule(str(tmp_path / "bytes"), tokenizer="bytes").setup("fit")
    with pytest.raises(
        (ParallelPlanError, UnsupportedError), match="seq_length must be at least 5"
    ):
        BERTDataModule(corpus, tokenizer=vocabulary, seq_length=4)
