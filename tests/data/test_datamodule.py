"""TokenDataModule gives a Trainer all tokens of its corpora, and rejects invalid settings."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from tests.corpora import SPEECHES, need
from tests.data.recorder import SEQ_LENGTH, Recorder, make_trainer, run, write_corpus


def test_epochs_of_lightning_have_different_orders_of_the_same_windows(
    tmp_path: Path, corpus: str
) -> None:
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9)
    windows = run(Recorder(), data, make_trainer(tmp_path, max_epochs=2))
    first, second = sum(windows[:11], []), sum(windows[11:], [])
    assert len(set(first)) == 99
    assert set(first) == set(second)
    assert first != second


def test_max_steps_counts_optimizer_steps_of_accumulated_batches(
    tmp_path: Path, corpus: str
) -> None:
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=2)
    batches = run(Recorder(), data, make_trainer(tmp_path, max_steps=5, accumulate_grad_batches=3))
    assert len(batches) == 15


def test_reading_batches_does_not_change_the_random_state_of_torch(corpus: str) -> None:
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        list(TokenDataModule(corpus, seq_length=4, num_workers=num_workers).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_takes_every_token_once_in_the_same_order(tmp_path: Path, corpus: str) -> None:
    val = write_corpus(tmp_path / "val", 50, first=1000)
    module = Recorder()
    data = TokenDataModule(corpus, val, seq_length=SEQ_LENGTH, batch_size=5)
    run(
        module,
        data,
        make_trainer(tmp_path, max_steps=2, num_sanity_val_steps=0, val_check_interval=1),
    )
    first, second = sum(module.validated[:3], []), sum(module.validated[3:], [])
    assert sorted(first) == list(range(1001, 1050))
    assert first == second


def test_named_sets_have_a_loader_each(tmp_path: Path, corpus: str) -> None:
    val = {
        "low": write_corpus(tmp_path / "low", 50, first=1000),
        "high": [write_corpus(tmp_path / name, 20, first=2000) for name in ("a", "b")],
    }
    test = {"only": write_corpus(tmp_path / "only", 30, first=3000)}
    data = TokenDataModule(corpus, MappingProxyType(val), test, seq_length=4)  # type: ignore[arg-type]
    data.setup("fit")
    assert data.set_names == {"val": ("low", "high"), "test": ("only",)}
    labels_of_sets = [
        sorted(int(t) for batch in loader for t in batch["labels"].flatten() if t != -100)
        for loader in (*data.val_dataloader(), *data.test_dataloader())
    ]
    assert labels_of_sets[0] == list(range(1001, 1050))
    assert labels_of_sets[1] == sorted(2 * [*range(2001, 2020)])
    assert labels_of_sets[2] == list(range(3001, 3030))
    for bad in ({}, {"": "a"}, {"a": []}):
        with pytest.raises(UnsupportedError, match="val must give each set a name and at least"):
            TokenDataModule(corpus, bad)  # type: ignore[arg-type]


def test_a_split_divides_the_documents(tmp_path: Path, corpus: str) -> None:
    data = TokenDataModule(corpus, split="80,15,5", seq_length=SEQ_LENGTH, batch_size=5)
    data.setup("fit")
    parts = {
        "train": data.train_dataloader(),
        "val": data.val_dataloader(),
        "test": data.test_dataloader(),
    }
    tokens = {
        name: {int(t) for batch in part for t in batch["labels"].flatten()}
        for name, part in parts.items()
    }
    tokens = {name: values - {-100} for name, values in tokens.items()}
    assert max(tokens["train"]) < 320 <= min(tokens["val"])
    assert max(tokens["val"]) < 380 <= min(tokens["test"])


def test_settings_of_other_types_become_plain_python_types(tmp_path: Path) -> None:
    blend = MappingProxyType({"a": Fraction(1, 4), "b": np.int64(3)})
    data = TokenDataModule(train=blend, data_dir=tmp_path)  # type: ignore[arg-type]
    assert (data.prefixes["train"], data.weights, data.data_dir) == (
        ["a", "b"],
        [0.25, 3.0],
        str(tmp_path),
    )
    with pytest.raises(
        UnsupportedError, match="split weights must be non-negative decimal"
    ) as caught:
        TokenDataModule(train="a", split=Path("x" * 5000))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_a_blend_takes_samples_in_proportion_to_its_weights(tmp_path: Path, corpus: str) -> None:
    second_corpus = write_corpus(tmp_path / "other", 400, first=5000)
    data = TokenDataModule({corpus: 1, second_corpus: 3}, seq_length=SEQ_LENGTH, batch_size=4)
    windows = sum(run(Recorder(), data, make_trainer(tmp_path, max_steps=50)), [])
    assert sum(window >= 5000 for window in windows) == 150


def write_text(prefix: Path, texts: list[str]) -> str:
    tokenizer = ByteTokenizer()
    with TokenFileWriter(prefix, tokenizer=tokenizer) as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), 256], num_bytes=len(text.encode()))
    return str(prefix)


def test_the_label_after_an_end_of_document_can_be_ignored(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "c", ["abc", "de"])
    plain = TokenDataModule(val=prefix, seq_length=6)
    masked = TokenDataModule(val=prefix, seq_length=6, mask_after_eod=True)
    [plain_batch], [masked_batch] = list(plain.val_dataloader()), list(masked.val_dataloader())
    assert plain_batch["tokens"].tolist() == [[97, 98, 99, 256, 100, 101]]
    assert plain_batch["labels"].tolist() == [[98, 99, 256, 100, 101, 256]]
    assert masked_batch["labels"].tolist() == [[98, 99, 256, -100, 101, 256]]


def test_separate_documents_have_lengths_and_no_labels_across_their_ends(tmp_path: Path) -> None:
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


def test_document_lengths_match_the_ends_of_documents_in_shuffled_passes_and_blends(
    tmp_path: Path,
) -> None:
    corpora = {str(write_text(tmp_path / name, texts)): 1 for name, texts in (
        ("a", ["abc", "d", "efgh", "ij"]), ("b", ["ABCDEFGHI", "JK"])
    )}  # fmt: skip
    orders: tuple[Literal["passes", "megatron"], ...] = ("passes", "megatron")
    for order in orders:
        data = TokenDataModule(
            corpora, seq_length=6, order=order, train_samples=12, documents="separate"
        )
        widths = set()
        for batch in data.train_dataloader():
            widths.add(batch["lengths"].shape)
            tokens, labels, [lengths] = batch["tokens"][0], batch["labels"][0], batch["lengths"]
            assert int(lengths.sum()) == 6
            ends = lengths.cumsum(0)[lengths > 0] - 1
            # Each document ends with 256, which only the end of a row may cut off.
            assert [int(tokens[end]) for end in ends[:-1]] == [256] * (len(ends) - 1)
            assert int((tokens[:-1] == 256).sum()) == len(ends) - 1
            assert [int(labels[end]) for end in ends[:-1]] == [-100] * (len(ends) - 1)
        assert len(widths) == 1, "all batches have the same number of lengths"


def test_tokenizer_properties_come_from_the_corpus_if_no_tokenizer_is_named(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "c", ["né", "abcd"])
    data = TokenDataModule(prefix, prefix)
    assert (data.vocab_size, data.eod) == (257, 256)
    assert data.bytes_per_token == pytest.approx(7 / 9)


def test_a_corpus_of_another_tokenizer_is_refused_at_setup(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "c", ["abc"])
    description = tmp_path / "c.json"
    fingerprint = ByteTokenizer.fingerprint
    description.write_text(
        description.read_text().replace(fingerprint, "0" * 64).replace('"bytes"', '"other"')
    )
    with pytest.raises(CorruptDataError, match="written with 'other' .* but 'bytes'"):
        TokenDataModule(prefix, tokenizer="bytes").setup("fit")
    with pytest.raises(CorruptDataError, match="must share a tokenizer"):
        TokenDataModule([prefix, write_text(tmp_path / "d", ["abc"])]).setup("fit")


def test_a_corpus_without_description_needs_a_tokenizer_for_its_vocabulary_only(
    corpus: str,
) -> None:
    data = TokenDataModule(corpus, seq_length=4)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].shape == (1, 4)
    assert data.bytes_per_token is None
    with pytest.raises(UnsupportedError, match="Pass the tokenizer"):
        _ = data.vocab_size


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", 400)
    data = TokenDataModule(val=prefix, tokenizer="bytes", seq_length=4, batch_size=64)
    with pytest.raises(CorruptDataError, match="vocabulary of 257 tokens"):
        list(data.val_dataloader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs train, val, test or corpus"),
        ({"train": "a", "corpus": "speeches"}, "because it defines all parts"),
        ({"train": "a", "val": "b", "split": "9,1"}, "split needs train"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        TokenDataModule(**arguments)


def test_the_speeches_corpus_needs_no_further_settings(tmp_path: Path) -> None:
    need(SPEECHES)
    data = TokenDataModule(corpus="speeches", data_dir=str(tmp_path), seq_length=128, batch_size=4)
    assert data.vocab_size == 257
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (4, 128)
    assert batch["tokens"].dtype == torch.int64
    assert data.bytes_per_token is not None
    assert math.isclose(data.bytes_per_token, 1, abs_tol=0.001)


@pytest.mark.parametrize("order", ["passes", "megatron"])
@pytest.mark.parametrize(
    "split",
    ["", "a,b", "1,2,3,4", "1,-1", "nan,1", "1/0,1", "1e99999999999,1", "0,0", "inf", "١,1"],
)
def test_invalid_splits_raise_at_once(split: str, order: Any) -> None:
    with pytest.raises(UnsupportedError, match="split weights"):
        TokenDataModule("a", split=split, order=order)


def test_an_empty_part_of_a_split_is_refused_when_its_loader_is_requested(corpus: str) -> None:
    data = TokenDataModule(corpus, split="1000,1,0", seq_length=SEQ_LENGTH)
    assert len(data.train_dataloader())
    assert data.test_dataloader() == []
    with pytest.raises(UnsupportedError, match="leaves no document of .* for val"):
        data.val_dataloader()


def test_mask_after_eod_needs_an_end_of_document_token(tmp_path: Path) -> None:
    class Endless(ByteTokenizer):
        eod = None

    with TokenFileWriter(tmp_path / "c", tokenizer=Endless()) as writer:
        writer.add_document(range(30), num_bytes=30)
    with pytest.raises(UnsupportedError, match="mask_after_eod needs an end-of-document token"):
        TokenDataModule(str(tmp_path / "c"), seq_length=4, mask_after_eod=True).train_dataloader()


STATE = {
    "epoch": 0,
    "consumed": 8,
    "batches": 0,
    "num_samples": 99,
    "global_batch_size": 4,
    "steps": 2,
    "order": "x",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed": -1}, "consumed in the data position .* whole number of at least 0: it is -1"),
        ({"consumed": 100}, "it has 100 of 99 samples"),
        ({"epoch": 1.0}, "epoch in the data position .* it is 1.0"),
        ({"epoch": True}, "it is True"),
        ({"num_samples": "99"}, "num_samples in the data position"),
        ({"steps": 2**70}, "steps in the data position"),
        ({"order": 3}, "in the order 3"),
    ],
)
def test_an_invalid_data_position_raises(corpus: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        TokenDataModule(corpus).load_state_dict({**STATE, **change})


@pytest.mark.parametrize("name", ["epoch", "consumed", "num_samples", "global_batch_size", "order"])
def test_a_data_position_without_a_required_field_raises(corpus: str, name: str) -> None:
    state = {key: value for key, value in STATE.items() if key != name}
    with pytest.raises(CheckpointMismatchError, match=f"{name}.* are missing"):
        TokenDataModule(corpus).load_state_dict(state)
