"""Streamed text has the rows of TokenDataModule on token files, and runs resume within a file."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_megatron import (
    CausalLM,
    GPTConfig,
    MegatronStrategy,
    Streaming,
    TextDataModule,
    TokenDataModule,
)
from lightning_megatron.data.preprocess import EncodingOptions, preprocess
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from tests.chat_folder import write_lines
from tests.data.recorder import Watcher, make_trainer, run
from tests.data.test_datamodule_resume import StopAfter

LENGTH = 32


def texts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return documents of 0 to 120 bytes; some are empty, and some are longer than a row."""
    draws = random.Random(seed)
    rows = [{"text": "é" * draws.choice([0, 1, 3, 9, 14, 60]), "id": at} for at in range(count)]
    return [{**row, "text": f"{row['text']}{row['id']}" * bool(row["text"])} for row in rows]


def stream_of(paths: str | list[str], **options: Any) -> TextDataModule:
    return TextDataModule(paths, "bytes", **{"seq_length": LENGTH, **options})


def batch_of(data: Any, samples: Any, numbers: list[int]) -> dict[str, torch.Tensor]:
    batch = data.loader_of(samples, None).batches[numbers]
    width = int((batch["lengths"] != 0).sum(1).max())
    assert not batch["lengths"][:, width:].any()
    return {**batch, "lengths": batch["lengths"][:, :width]}


@pytest.mark.parametrize("windows", [1, 4])
def test_streamed_rows_match_rows_of_token_files(tmp_path: Path, windows: int) -> None:
    path = write_lines(tmp_path / "rows.jsonl", texts(60))
    preprocess(
        [path], str(tmp_path / "rows"), EncodingOptions("bytes", append_eod=True), progress=False
    )
    prefix = str(tmp_path / "rows")
    options: dict[str, Any] = {"seq_length": LENGTH, "seed": 5, "context_windows": windows}
    files = TokenDataModule(prefix, prefix, documents="whole", **options)
    files.setup("fit")
    stream = stream_of(path, val=path, **options)
    stream.setup("fit")
    count = 2 * len(files.training_samples(None)) + 3
    numbers = list(range(count))
    actual = batch_of(stream, stream.training_samples(None), numbers)
    expected = batch_of(files, files.training_samples(count), numbers)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(actual[name], values), name
    validated = [loader.val_dataloader() for loader in (stream, files)]
    assert len(validated[0]) == len(validated[1])
    for streamed, from_files in zip(*validated, strict=True):
        assert all(torch.equal(streamed[name], from_files[name]) for name in streamed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_document_comes_once_in_each_pass(tmp_path: Path, num_workers: int) -> None:
    rows = texts(40)
    paths = [
        write_lines(tmp_path / "a.jsonl", rows[:11]), write_lines(tmp_path / "b.jsonl", rows[11:])
    ]  # fmt: skip
    data = stream_of(paths, seq_length=200, num_workers=num_workers, streaming=Streaming(7))
    samples = data.training_samples(None)
    for number in range(2):
        documents = []
        position = next(position for position in range(99) if samples.pass_of(position) == number)
        while samples.pass_of(position) == number:
            start = 0
            for size in samples.lengths(position):
                documents.append(
                    bytes(samples[position][start : start + size - 1].tolist()).decode()
                )
                start += size
            assert samples[position].tolist().count(256) == len(samples.lengths(position))
            position += 1
        assert sorted(documents) == sorted(row["text"] for row in rows if row["text"])
    samples.close()


def test_a_model_has_the_same_losses_as_on_token_files(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", texts(60))
    prefix = str(tmp_path / "rows")
    preprocess([path], prefix, EncodingOptions("bytes", append_eod=True), progress=False)
    options: dict[str, Any] = {"seq_length": LENGTH, "global_batch_size": 4}
    losses = []
    for data in (
        stream_of(path, val=path, **options),
        TokenDataModule(prefix, prefix, documents="whole", **options),
    ):
        seed_everything(1, verbose=False)
        config = GPTConfig.gpt2(
            vocab_size=257, max_seq_length=LENGTH, num_layers=1, hidden_size=16, num_heads=2
        )
        trainer = make_trainer(
            tmp_path, strategy=MegatronStrategy(), precision="64-true", max_steps=3,
            val_check_interval=3, enable_checkpointing=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            # Lightning recommends workers.
            warnings.simplefilter("ignore")
            trainer.fit(CausalLM(config, learning_rate=0.05, schedule="constant"), data)
        names = ("train_loss", "val_loss")
        losses.append([float(trainer.callback_metrics[name]) for name in names])
    assert losses[0] == losses[1]


class DocumentWatcher(Watcher):
    """Watcher of rows of documents."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        assert set(batch) == {"tokens", "labels", "lengths"}
        return super().names_of(batch)


@pytest.mark.parametrize("limits", [{"max_steps": 14}, {"max_epochs": 2}], ids=str)
def test_a_killed_run_continues_with_the_next_row(tmp_path: Path, limits: dict[str, int]) -> None:
    for at in range(3):
        write_lines(tmp_path / f"{at}.jsonl", texts(25, seed=at))

    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        data = stream_of(str(tmp_path), global_batch_size=4, streaming=Streaming(9))
        return run(DocumentWatcher(), data, make_trainer(tmp_path, *callbacks, **limits), ckpt_path)

    uninterrupted = trained()
    assert len(uninterrupted) > 9
    killed = tmp_path / "killed.ckpt"
    for stop in (3, 9):
        first = trained(StopAfter(stop, killed))
        assert first + trained(ckpt_path=killed) == uninterrupted


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = texts(30)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    from_parquet, from_lines = (
        stream_of(path).training_samples(None) for path in (str(tmp_path / "rows.parquet"), lines)
    )
    assert [from_parquet[at].tolist() for at in range(40)] == [
        from_lines[at].tolist() for at in range(40)
    ]
    data = stream_of(str(tmp_path / "rows.parquet"), json_key="content")
    with pytest.raises(CorruptDataError, match=r"rows\.parquet, row 1 has no text under the key"):
        data.training_samples(None)[0]


def test_bad_rows_and_settings_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [*texts(3), {"content": "a"}])
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:4 has no text under the key 'text'"):
        stream_of(path).training_samples(None)[0]
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:4 has no text"):
        stream_of(path, val=path).setup("fit")
    empty = write_lines(tmp_path / "empty.jsonl", [{"text": ""}] * 3)
    reason = "must have a document of at least 2 tokens.*3 were read"
    with pytest.raises(CorruptDataError, match=reason):
        stream_of(empty, append_eod=False).training_samples(None)[0]
    with pytest.raises(CorruptDataError, match=reason):
        stream_of(path, val=empty, append_eod=False).setup("fit")
    with pytest.raises(UnsupportedError, match="documents must be files .* names none"):
        stream_of(str(tmp_path / "none.jsonl"))
    with pytest.raises(ParallelPlanError, match=r"context_windows \(3\) must be a power of two"):
        stream_of(path, context_windows=3)
    with pytest.raises(UnsupportedError, match="needs max_steps, max_epochs or max_time"):
        make_trainer(tmp_path, max_epochs=-1).fit(DocumentWatcher(), datamodule=stream_of(path))
