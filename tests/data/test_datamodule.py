"""TokenDataModule gives a Trainer all tokens of its corpora, and rejects invalid settings."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.corpora import SPEECHES, need
from tests.data.recorder import SEQ_LENGTH, Recorder, make_trainer, run, write_corpus
from tests.refusals import check_refusals


def test_epochs_of_lightning_have_different_orders_of_the_same_windows(tmp_path, corpus):
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9)
    windows = run(Recorder(), data, make_trainer(tmp_path, max_epochs=2))
    first, second = sum(windows[:11], []), sum(windows[11:], [])
    assert len(set(first)) == 99
    assert set(first) == set(second)
    assert first != second
    # max_steps counts optimizer steps of accumulated batches.
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=2)
    trainer = make_trainer(tmp_path, max_steps=5, accumulate_grad_batches=3)
    assert len(run(Recorder(), data, trainer)) == 15


def test_reading_batches_does_not_change_the_random_state_of_torch(corpus):
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        list(TokenDataModule(corpus, seq_length=4, num_workers=num_workers).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_takes_every_token_once_in_the_same_order(tmp_path, corpus):
    val, module = write_corpus(tmp_path / "val", 50, first=1000), Recorder()
    data = TokenDataModule(corpus, val, seq_length=SEQ_LENGTH, batch_size=5)
    options = {"max_steps": 2, "num_sanity_val_steps": 0, "val_check_interval": 1}
    run(module, data, make_trainer(tmp_path, **options))
    first, second = sum(module.validated[:3], []), sum(module.validated[3:], [])
    assert sorted(first) == list(range(1001, 1050))
    assert first == second


def test_named_sets_have_a_loader_each(tmp_path, corpus):
    val = {
        "low": write_corpus(tmp_path / "low", 50, first=1000),
        "high": [write_corpus(tmp_path / name, 20, first=2000) for name in ("a", "b")],
    }
    test = {"only": write_corpus(tmp_path / "only", 30, first=3000)}
    data = TokenDataModule(corpus, MappingProxyType(val), test, seq_length=4)
    data.setup("fit")
    assert data.set_names == {"val": ("low", "high"), "test": ("only",)}
    labels_of_sets = [
        sorted(int(t) for batch in loader for t in batch["labels"].flatten() if t != -100)
        for loader in (*data.val_dataloader(), *data.test_dataloader())
    ]
    twice = sorted(2 * [*range(2001, 2020)])
    assert labels_of_sets == [[*range(1001, 1050)], twice, [*range(3001, 3030)]]


def test_a_split_divides_the_documents_and_a_blend_has_its_shares(tmp_path, corpus):
    data = TokenDataModule(corpus, split="80,15,5", seq_length=SEQ_LENGTH, batch_size=5)
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    train, val, test = (
        {int(t) for batch in loader for t in batch["labels"].flatten()} - {-100}
        for loader in loaders
    )
    assert max(train) < 320 <= min(val)
    assert max(val) < 380 <= min(test)
    data = TokenDataModule(corpus, split="1000,1,0", seq_length=SEQ_LENGTH)
    assert len(data.train_dataloader())
    assert data.test_dataloader() == []
    with pytest.raises(UnsupportedError, match="leaves no document of .* for val"):
        data.val_dataloader()
    second = write_corpus(tmp_path / "other", 400, first=5000)
    data = TokenDataModule({corpus: 1, second: 3}, seq_length=SEQ_LENGTH, batch_size=4)
    windows = sum(run(Recorder(), data, make_trainer(tmp_path, max_steps=50)), [])
    assert sum(window >= 5000 for window in windows) == 150


def write_text(prefix: Path, texts: list[str]) -> str:
    tokenizer = ByteTokenizer()
    with TokenFileWriter(prefix, tokenizer=tokenizer) as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), 256], num_bytes=len(text.encode()))
    return str(prefix)


def test_the_label_after_an_end_of_document_can_be_ignored(tmp_path):
    prefix = write_text(tmp_path / "c", ["abc", "de"])
    for masked, label in ((False, 100), (True, -100)):
        data = TokenDataModule(val=prefix, seq_length=6, mask_after_eod=masked)
        [batch] = list(data.val_dataloader())
        assert batch["tokens"].tolist() == [[97, 98, 99, 256, 100, 101]]
        assert batch["labels"].tolist() == [[98, 99, 256, label, 101, 256]]

    class Endless(ByteTokenizer):
        eod = None

    with TokenFileWriter(tmp_path / "d", tokenizer=Endless()) as writer:
        writer.add_document(range(30), num_bytes=30)
    with pytest.raises(UnsupportedError, match="mask_after_eod needs an end-of-document token"):
        TokenDataModule(str(tmp_path / "d"), seq_length=4, mask_after_eod=True).train_dataloader()


def test_separate_documents_have_lengths_and_no_labels_across_their_ends(tmp_path):
    prefix = write_text(tmp_path / "c", ["abc", "d", "efgh"])
    joined = list(TokenDataModule(val=prefix, seq_length=7).val_dataloader())
    batches = list(TokenDataModule(val=prefix, seq_length=7, documents="separate").val_dataloader())
    actual = {}
    for batch, joined_batch in zip(batches, joined, strict=True):
        assert torch.equal(batch["tokens"], joined_batch["tokens"]), "the index stays what it was"
        assert batch["lengths"].shape == (1, 3)
        has_label = batch["labels"] != -100
        assert torch.equal(batch["labels"][has_label], joined_batch["labels"][has_label])
        actual[int(batch["tokens"][0, 0])] = (batch["lengths"].tolist(), batch["labels"].tolist())
    assert actual == {
        97: ([[4, 2, 1]], [[98, 99, 256, -100, 256, -100, 102]]),
        102: ([[3, 0, 0]], [[103, 104, 256, -100, -100, -100, -100]]),
    }


@pytest.mark.parametrize("order", ["passes", "megatron"])
def test_document_lengths_match_the_ends_of_documents_in_shuffled_passes_and_blends(
    tmp_path, order
):
    texts = {"a": ["abc", "d", "efgh", "ij"], "b": ["ABCDEFGHI", "JK"]}
    corpora = {write_text(tmp_path / name, text): 1 for name, text in texts.items()}
    options = {"seq_length": 6, "train_samples": 12, "documents": "separate"}
    widths = set()
    for batch in TokenDataModule(corpora, order=order, **options).train_dataloader():
        widths.add(batch["lengths"].shape)
        tokens, labels, [lengths] = batch["tokens"][0], batch["labels"][0], batch["lengths"]
        assert int(lengths.sum()) == 6
        ends = (lengths.cumsum(0)[lengths > 0] - 1)[:-1]
        # Each document ends with 256, which only the end of a row may cut off.
        assert tokens[ends].tolist() == [256] * len(ends)
        assert int((tokens[:-1] == 256).sum()) == len(ends)
        assert labels[ends].tolist() == [-100] * len(ends)
    assert len(widths) == 1, "all batches have the same number of lengths"


def test_tokenizer_properties_come_from_the_corpus_if_no_tokenizer_is_named(tmp_path, corpus):
    prefix = write_text(tmp_path / "c", ["né", "abcd"])
    data = TokenDataModule(prefix, prefix)
    assert (data.vocab_size, data.eod) == (257, 256)
    assert data.bytes_per_token == pytest.approx(7 / 9)
    # A corpus without description needs a tokenizer for its vocabulary only.
    data = TokenDataModule(corpus, seq_length=4)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].shape == (1, 4)
    assert data.bytes_per_token is None
    with pytest.raises(UnsupportedError, match="Pass the tokenizer"):
        _ = data.vocab_size


def test_corpora_of_other_tokenizers_or_vocabularies_are_refused(tmp_path, corpus):
    prefix, description = write_text(tmp_path / "c", ["abc"]), tmp_path / "c.json"
    text = description.read_text().replace(ByteTokenizer.fingerprint, "0" * 64)
    description.write_text(text.replace('"bytes"', '"other"'))
    with pytest.raises(CorruptDataError, match="written with 'other' .* but 'bytes'"):
        TokenDataModule(prefix, tokenizer="bytes").setup("fit")
    with pytest.raises(CorruptDataError, match="must share a tokenizer"):
        TokenDataModule([prefix, write_text(tmp_path / "d", ["abc"])]).setup("fit")
    data = TokenDataModule(val=corpus, tokenizer="bytes", seq_length=4, batch_size=64)
    with pytest.raises(CorruptDataError, match="vocabulary of 257 tokens"):
        list(data.val_dataloader())


def test_settings_become_plain_python_types_or_are_refused(tmp_path):
    blend = MappingProxyType({"a": Fraction(1, 4), "b": np.int64(3)})
    data = TokenDataModule(train=blend, data_dir=tmp_path)
    actual = (data.prefixes["train"], data.weights, data.data_dir)
    assert actual == (["a", "b"], [0.25, 3.0], str(tmp_path))
    splits = (
        "",
        "a,b",
        "1,2,3,4",
        "1,-1",
        "nan,1",
        "1/0,1",
        "1e99999999999,1",
        "0,0",
        "inf",
        "١,1",
    )
    check_refusals(
        TokenDataModule,
        [
            ({}, "needs train, val, test or corpus"),
            ({"train": "a", "corpus": "speeches"}, "because it defines all parts"),
            ({"train": "a", "val": "b", "split": "9,1"}, "split needs train"),
            ({"train": "a", "split": Path("x" * 5000)}, "must be non-negative decimal"),
            *(
                ({"train": "a", "val": val}, "val must give each set a name")
                for val in ({}, {"": "a"}, {"a": []})
            ),
            *(
                ({"train": "a", "split": split, "order": order}, "split weights")
                for split in splits
                for order in ("passes", "megatron")
            ),
        ],
    )


def test_the_speeches_corpus_needs_no_further_settings(tmp_path):
    need(SPEECHES)
    data = TokenDataModule(corpus="speeches", data_dir=str(tmp_path), seq_length=128, batch_size=4)
    assert data.vocab_size == 257
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (4, 128)
    assert batch["tokens"].dtype == torch.int64
    assert math.isclose(data.bytes_per_token, 1, abs_tol=0.001)
