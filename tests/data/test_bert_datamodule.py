"""Rows of BERTDataModule consist of sentences, and depend only on seed, row number and epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron import BERTDataModule, BERTPretraining, EncoderConfig
from lightning_megatron.data.pair_batches import PairBatches, _truncated_sizes
from lightning_megatron.data.pair_samples import PairOptions, PairSamples
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.bert_corpus import VOCABULARY, write_sentences, write_vocabulary
from tests.data.recorder import Watcher, check_resumes, make_trainer, run
from tests.refusals import check_refusals

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
            assert any(
                sample_tokens[at : at + len(first)] == first for at in range(len(sample_tokens))
            )
            assert any(
                sample_tokens[at : at + len(second)] == second for at in range(len(sample_tokens))
            )
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


@pytest.mark.parametrize(
    ("limits", "num_workers", "stops"),
    [
        ({"max_steps": 9, "max_epochs": -1}, 0, (2, 5)),
        ({"max_steps": 9, "max_epochs": -1}, 2, (5,)),
        ({"max_epochs": 3}, 0, (5,)),
    ],
)
def test_a_killed_run_continues_with_the_next_row(
    tmp_path, corpus, vocabulary, limits, num_workers, stops
):
    def trained(*callbacks: Any, ckpt_path: Path | None = None) -> list:
        data = module_of(corpus, vocabulary, global_batch_size=16, num_workers=num_workers)
        return run(RowRecorder(), data, make_trainer(tmp_path, *callbacks, **limits), ckpt_path)

    uninterrupted = check_resumes(trained, tmp_path, *stops)
    assert len(uninterrupted) >= 6
    rows = [row for batch in uninterrupted for row in batch]
    # Two rows of few tokens may have the same masks by chance.
    assert len(set(rows)) > 0.9 * len(rows)


def test_validation_has_every_sample_once_with_the_same_masks(tmp_path, corpus, vocabulary):
    rows_of_runs = []
    for seed, batch_size in ((1, 4), (2, 16)):
        data = module_of(corpus, vocabulary, val=corpus, seed=seed, batch_size=batch_size)
        module = RowRecorder()
        trainer = make_trainer(
            tmp_path, max_epochs=2, num_sanity_val_steps=0, limit_train_batches=1
        )
        run(module, data, trainer)
        rows = [
            row for batch in module.validated for row in batch if any(v > 0 for v in row[LENGTH:])
        ]
        half = len(rows) // 2
        # Both epochs of the Trainer have the same rows.
        assert rows[:half] == rows[half:]
        assert len(set(rows[:half])) > 0.9 * half
        rows_of_runs.append(rows[:half])
    assert rows_of_runs[0] == rows_of_runs[1]
    options = PairOptions(LENGTH, seed=0)
    assert len(rows_of_runs[0]) == len(PairSamples(TokenFile(corpus), options))


def test_named_sets_have_the_losses_of_each_set_validated_alone(tmp_path, corpus, vocabulary):
    second_corpus = write_sentences(tmp_path / "other", vocabulary, num_documents=9, seed=5)
    sets = {"one": corpus, "both": [corpus, second_corpus]}
    config = EncoderConfig.bert(
        vocab_size=VOCABULARY, num_positions=LENGTH, num_layers=1, hidden_size=16, num_heads=2
    )
    pl.seed_everything(1, verbose=False)
    module = BERTPretraining(config)
    metrics = {}
    for name, val in {**sets, "all": sets}.items():
        trainer = make_trainer(tmp_path)
        trainer.validate(
            module, module_of(corpus, vocabulary, val=val, batch_size=4), verbose=False
        )
        metrics[name] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    tokens = {name: metrics["all"][f"val_tokens/{name}"] for name in sets}
    for mean in ("loss", "lm_loss", "order_loss"):
        key = f"val_{mean}"
        alone = {name: metrics[name][key] for name in sets}
        assert {name: metrics["all"][f"{key}/{name}"] for name in sets} == pytest.approx(alone)
        total = sum(alone[name] * tokens[name] for name in sets) / sum(tokens.values())
        assert metrics["all"][key] == pytest.approx(total)
    assert metrics["one"]["val_loss"] != pytest.approx(metrics["both"]["val_loss"], rel=1e-5)


def test_two_ranks_share_the_samples_of_one_process(corpus, vocabulary):
    data = module_of(corpus, vocabulary)
    samples = data.training_samples(64)
    expected = [
        row
        for batch in data.loader_of(samples, TokenBatchSampler(64, 8))
        for row in row_tuples(batch)
    ]
    loaders = [
        data.loader_of(samples, TokenBatchSampler(64, 4, rank, 2, seed=0)) for rank in range(2)
    ]
    actual = [
        row for pair in zip(*loaders, strict=True) for batch in pair for row in row_tuples(batch)
    ]
    assert len(expected) == 64
    assert actual == expected


def test_a_split_is_disjoint_and_a_blend_has_its_shares(tmp_path, corpus, vocabulary):
    data = module_of(corpus, vocabulary, split="6,2,2")
    data.setup()
    ranges = [data._corpora(part)[0][1] for part in ("train", "val", "test")]
    assert [
        number for documents in ranges if documents is not None for number in documents
    ] == list(range(len(TokenFile(corpus).document_starts) - 1))
    bounds = np.unique(TokenFile(corpus).document_index)
    sentences = data.training_samples(300)
    assert ranges[0] is not None
    assert sentences._index[:, 1].max() <= bounds[ranges[0].stop]
    assert len(data.val_dataloader()) > 0

    second_corpus = write_sentences(tmp_path / "other", vocabulary, num_documents=9, seed=5)
    blend = module_of({corpus: 0.25, second_corpus: 0.75}, vocabulary).training_samples(80)
    assert np.bincount(blend.choices).tolist() == [20, 60]
    exhaustive = module_of([corpus, second_corpus], vocabulary).training_samples(None)
    options = PairOptions(LENGTH)
    assert len(exhaustive) == sum(
        len(PairSamples(TokenFile(prefix), options)) for prefix in (corpus, second_corpus)
    )
    longer = module_of({corpus: 0.25, second_corpus: 0.75}, vocabulary).training_samples(160)
    assert blend.order_key == longer.order_key != exhaustive.order_key
    for number in range(80):
        assert np.array_equal(blend[number], longer[number])


def test_a_stored_index_equals_a_newly_built_index(corpus, vocabulary):
    built_and_stored = [module_of(corpus, vocabulary).training_samples(100) for _ in range(2)]
    folder = Path(corpus).parent / "index_cache"
    assert any(path.name == "samples.npy" for path in folder.rglob("*.npy"))
    expected = PairSamples(
        TokenFile(corpus), PairOptions(LENGTH, vocab_size=VOCABULARY), num_samples=100
    )
    for samples in built_and_stored:
        assert np.array_equal(samples._index, expected._index)
        assert samples.order_key == expected.order_key


def test_the_log_counts_omitted_documents_and_truncated_tokens(tmp_path, vocabulary):
    with TokenFileWriter(tmp_path / "a", vocab_size=VOCABULARY) as writer:
        writer.add_document(np.full(10, 7))
        writer.add_document([])
        writer.add_document(np.full(100, 7), lengths=[40, 60])
    options = PairOptions(LENGTH, short_probability=0.0)
    line = PairSamples(TokenFile(tmp_path / "a"), options).summary()
    assert "1 samples from 2 documents, of which 1 are left out with fewer than 2 sentences" in line
    assert "71.0% of the tokens are cut" in line


def test_invalid_data_and_settings_are_refused(tmp_path, corpus, vocabulary):
    with TokenFileWriter(tmp_path / "whole", vocab_size=VOCABULARY) as writer:
        for _ in range(3):
            writer.add_document(np.full(10, 7))
    with pytest.raises(CorruptDataError, match="preprocess --split-sentences"):
        module_of(str(tmp_path / "whole"), vocabulary).training_samples(5)
    BERTDataModule(corpus, tokenizer=vocabulary, seq_length=4, order_prediction=False)
    check_refusals(
        lambda **options: BERTDataModule(corpus, tokenizer=vocabulary, **options),
        [
            ({"seq_length": 4}, "seq_length must be at least 5"),
            ({"mask_probability": 1.0}, "mask_probability"),
            ({"short_probability": -0.1}, "short_probability"),
            ({"max_ngram": 0}, "max_ngram"),
        ],
    )
    with TokenFileWriter(tmp_path / "bytes", vocab_size=257) as writer:
        writer.add_document(np.full(20, 200), lengths=[10, 10])
    with pytest.raises(CorruptDataError, match="vocabulary of 61 tokens: sample 0"):
        module_of(str(tmp_path / "bytes"), vocabulary).training_samples(5)[0]
    with pytest.raises(UnsupportedError, match=r"'bytes' lacks \[PAD\]"):
        BERTDataModule(str(tmp_path / "bytes"), tokenizer="bytes").setup("fit")
