"""TokenDataModule and its samples give a Trainer all tokens of its corpora, cache their index under a full
key, and reject invalid settings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data import samples as samples_module
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.samples import GPTSamples, SampleOptions, Samples
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.data.recorder import (
    SEQ_LENGTH,
    Recorder,
    make_trainer,
    run,
    write_corpus,
    write_documents,
)
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


def test_validations_have_the_same_order_and_no_loader_draws_from_torch(tmp_path, corpus):
    module, data = Recorder(), TokenDataModule(corpus, corpus, seq_length=SEQ_LENGTH)
    options = {"max_steps": 2, "num_sanity_val_steps": 0, "val_check_interval": 1}
    run(module, data, make_trainer(tmp_path, **options))
    half = len(module.validated) // 2
    assert module.validated[:half] == module.validated[half:]
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        list(TokenDataModule(corpus, seq_length=4, num_workers=num_workers).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bundled_corpus_has_its_loaders_without_a_trainer(tmp_path):
    data = TokenDataModule(corpus="speeches", data_dir=str(tmp_path), seq_length=SEQ_LENGTH)
    loader = data.val_dataloader()
    assert next(iter(loader))["tokens"].shape == (1, SEQ_LENGTH)
    assert data.bytes_per_token_of("test") == pytest.approx(1.0, rel=0.01)


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


class Endless(ByteTokenizer):
    eod = None


def test_the_label_after_an_end_of_document_can_be_ignored(tmp_path):
    prefix = write_text(tmp_path / "c", ["abc", "de"])
    with TokenFileWriter(tmp_path / "d", tokenizer=Endless()) as writer:
        writer.add_document(range(30), num_bytes=30)
    with pytest.raises(UnsupportedError, match="mask_after_eod needs an end-of-document token"):
        TokenDataModule(str(tmp_path / "d"), seq_length=4, mask_after_eod=True).train_dataloader()
    for masked, label in ((False, 100), (True, -100)):
        data = TokenDataModule(val=prefix, seq_length=6, mask_after_eod=masked)
        [batch] = list(data.val_dataloader())
        assert batch["tokens"].tolist() == [[97, 98, 99, 256, 100, 101]]
        assert batch["labels"].tolist() == [[98, 99, 256, label, 101, 256]]


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
def test_lengths_of_shuffled_passes_and_blends_end_with_the_documents(tmp_path, order):
    texts = {"a": ["abc", "d", "efgh", "ij"], "b": ["ABCDEFGHI", "JK"]}
    corpora = {write_text(tmp_path / name, text): 1 for name, text in texts.items()}
    options = {"seq_length": 6, "train_samples": 12, "documents": "separate"}
    for batch in TokenDataModule(corpora, order=order, **options).train_dataloader():
        tokens, labels, [lengths] = batch["tokens"][0], batch["labels"][0], batch["lengths"]
        assert int(lengths.sum()) == 6
        ends = (lengths.cumsum(0)[lengths > 0] - 1)[:-1]
        # Each document ends with 256, which only the end of a row may cut off.
        assert tokens[ends].tolist() == [256] * len(ends)
        assert int((tokens[:-1] == 256).sum()) == len(ends)
        assert labels[ends].tolist() == [-100] * len(ends)


def test_corpora_of_other_tokenizers_and_invalid_settings_are_refused(tmp_path):
    prefix, description = write_text(tmp_path / "c", ["abc"]), tmp_path / "c.json"
    text = description.read_text().replace(ByteTokenizer.fingerprint, "0" * 64)
    description.write_text(text.replace('"bytes"', '"other"'))
    with pytest.raises(CorruptDataError, match="must share a tokenizer"):
        TokenDataModule([prefix, write_text(tmp_path / "d", ["abc"])]).setup("fit")
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
    named = "val must give each set a name"
    check_refusals(
        TokenDataModule,
        [
            ({}, "needs train, val, test or corpus"),
            ({"train": "a", "corpus": "speeches"}, "because it defines all parts"),
            ({"train": "a", "val": "b", "split": "9,1"}, "split needs train"),
            ({"train": "a", "split": Path("x" * 5000)}, "must be non-negative decimal"),
            *(({"train": "a", "val": val}, named) for val in ({}, {"": "a"}, {"a": []})),
            *(({"train": "a", "split": split}, "split weights") for split in splits),
        ],
    )


def windows_of(samples: Samples) -> list[list[int]]:
    return [samples[number].tolist() for number in range(len(samples))]


def test_sequential_samples_overlap_in_one_token(tmp_path):
    corpus = write_documents(tmp_path / "c", [3, 0, 5, 2])
    samples = GPTSamples(corpus, SampleOptions(4, order="sequential"))
    assert windows_of(samples) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    with pytest.raises(IndexError):
        samples[3]
    assert len(corpus.document_starts) == 4  # the empty document has nothing to split
    (part,) = windows_of(GPTSamples(corpus, SampleOptions(4, order="sequential"), range(1, 2)))
    assert part == [3, 4, 5, 6, 7], "a range has only its tokens"
    with TokenFileWriter(tmp_path / "d", vocab_size=100) as writer:
        writer.add_document(np.arange(10), lengths=[4, 6])
        writer.add_document(np.arange(50, 55), lengths=[2, 3])
    samples = GPTSamples(TokenFile(tmp_path / "d"), SampleOptions(9), documents=range(1))
    assert samples[0].tolist() == list(range(10)), "all sequences of a document"


def test_few_tokens_and_wrong_ids_are_refused(tmp_path):
    with pytest.raises(CorruptDataError, match=r"has 4 tokens in documents \[0, 1\); .* needs 9"):
        GPTSamples(write_documents(tmp_path / "c", [4]), SampleOptions(8))
    options = SampleOptions(4, order="sequential", vocab_size=10)
    samples = GPTSamples(write_documents(tmp_path / "d", [20]), options)
    assert samples[1].tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(CorruptDataError, match=r"of 10 tokens: sample 2 .* holds 8 to 12"):
        samples[2]


def test_the_index_is_cached_under_a_key_with_every_option(tmp_path, monkeypatch, caplog):
    corpus, cache = write_documents(tmp_path / "c", [50, 50]), tmp_path / "cache"
    options = SampleOptions(8, cache_dir=str(cache))
    first = GPTSamples(corpus, options, num_samples=30)

    def num_indices() -> int:
        return sum(path.is_dir() for path in cache.iterdir())

    for change in ({"seed": 1}, {"seq_length": 9}, {"order": "megatron"}, {"tokenizer": "abc"}):
        before = num_indices()
        changed = GPTSamples(corpus, dataclasses.replace(options, **change), num_samples=30)
        assert num_indices() == before + 1, change
        assert first.order_key != changed.order_key
    GPTSamples(corpus, options, range(1), num_samples=30)
    longer = GPTSamples(corpus, options, num_samples=31)
    other = GPTSamples(write_documents(tmp_path / "d", [60, 40]), options, num_samples=30)
    assert num_indices() == before + 4
    assert longer.order_key == first.order_key != other.order_key
    monkeypatch.setattr(samples_module, "index_passes", lambda *_: pytest.fail("built again"))
    for lock in cache.glob("*.lock"):
        lock.unlink()
    assert windows_of(GPTSamples(corpus, options, num_samples=30)) == windows_of(first)
    assert not list(cache.glob("*.lock")), "an existing cache is read without writing"
    assert caplog.text == ""


def test_without_a_writable_cache_the_index_stays_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    corpora = [(write_documents(tmp_path / f"c{n}", [50], n), None) for n in (0, 99)]
    blends = []
    for cache in (str(tmp_path / "cache"), None, str(tmp_path / "file" / "cache")):
        assert caplog.text == ""
        blends.append(
            windows_of(blend_samples(corpora, [1, 2], SampleOptions(8, cache_dir=cache), 9))
        )
    assert "is built in memory" in caplog.text
    assert blends[0] == blends[1] == blends[2]
