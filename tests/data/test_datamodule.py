"""TokenDataModule feeds a real Trainer, and a resumed run sees exactly the samples that the first has not finished."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.corpora import SPEECHES, need

SEQ_LENGTH = 4


class Recorder(LightningModule):
    """Record the first token of every row that is trained on: it names the window."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        assert batch["tokens"].shape == batch["labels"].shape
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        self.seen.append(batch["tokens"][:, 0].tolist())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated.append(batch["labels"][batch["labels"] != -100].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class EarlyAsker(Recorder):
    """Ask for the number of steps while optimizers are built, before the loops are restored."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class StopAfter(Callback):
    """Save a checkpoint after some batches, then break off as a killed job does."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def write_corpus(prefix: Path, num_tokens: int, first: int = 0) -> str:
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for start in range(first, first + num_tokens, 10):
            writer.add_document(np.arange(start, start + 10))
    return str(prefix)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", 400)


def make_trainer(root: Path, *callbacks: Callback, **options: Any) -> Trainer:
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{**defaults, "default_root_dir": root, "callbacks": list(callbacks), **options})


def run(module: Recorder, data: TokenDataModule, trainer: Trainer, ckpt_path: Path | None = None) -> list[list[int]]:
    with warnings.catch_warnings():
        # what Lightning says about workers, checkpoint folders and eval mode does not matter here
        warnings.simplefilter("ignore")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen


BY_STEPS = {"max_steps": 14, "max_epochs": -1}
BY_EPOCHS = {"max_epochs": 2}


@pytest.mark.parametrize("limits", [BY_STEPS, BY_EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("module_class", [Recorder, EarlyAsker])
def test_a_killed_run_continues_with_the_next_sample(
    tmp_path: Path, corpus: str, limits: dict[str, int], num_workers: int, module_class: type[Recorder]
) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9, num_workers=num_workers)

    whole = run(module_class(), data(), make_trainer(tmp_path, **limits))
    assert len(whole) == (14 if limits is BY_STEPS else 22)
    path = tmp_path / "killed.ckpt"
    # in the middle, at the end of an epoch, and in the second epoch
    for stop in (5,) if num_workers or limits is BY_STEPS else (5, 11, 15):
        first = run(module_class(), data(), make_trainer(tmp_path, StopAfter(stop, path), **limits))
        assert first == whole[:stop]
        rest = run(module_class(), data(), make_trainer(tmp_path, **limits), path)
        assert first + rest == whole


def test_epochs_of_lightning_take_other_orders_of_the_same_windows(tmp_path: Path, corpus: str) -> None:
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9)
    seen = run(Recorder(), data, make_trainer(tmp_path, max_epochs=2))
    first, second = sum(seen[:11], []), sum(seen[11:], [])
    assert len(set(first)) == 99
    assert set(first) == set(second)
    assert first != second


@pytest.mark.parametrize("batch_size", [4, 16])
def test_another_batch_size_continues_at_the_same_sample(tmp_path: Path, corpus: str, batch_size: int) -> None:
    path, limits = tmp_path / "killed.ckpt", {"max_steps": 12, "max_epochs": -1}
    whole = run(Recorder(), TokenDataModule(corpus, seq_length=4, batch_size=1), make_trainer(tmp_path, max_steps=300))
    order = [window for [window] in whole]
    first = run(
        Recorder(),
        TokenDataModule(corpus, seq_length=4, batch_size=8),
        make_trainer(tmp_path, StopAfter(5, path), **limits),
    )
    rest = run(
        Recorder(), TokenDataModule(corpus, seq_length=4, batch_size=batch_size), make_trainer(tmp_path, **limits), path
    )
    assert len(rest) == 7
    taken = sum(first + rest, [])
    assert taken == order[: len(taken)]


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_run_by_epochs_may_change_its_batch_size_within_one(tmp_path: Path, corpus: str, batch_size: int) -> None:
    path = tmp_path / "killed.ckpt"

    def data(size: int) -> TokenDataModule:
        return TokenDataModule(corpus, corpus, seq_length=4, batch_size=size)

    limits = {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    order = sum(run(Recorder(), data(1), make_trainer(tmp_path, **limits)), [])
    first = run(Recorder(), data(8), make_trainer(tmp_path, StopAfter(5, path), **limits))
    module = Recorder()
    rest = run(module, data(batch_size), make_trainer(tmp_path, **limits), path)
    per_epoch = [(99 - 40) // batch_size, 99 // batch_size, 99 // batch_size]
    assert len(rest) == sum(per_epoch)
    assert sum(first + rest[: per_epoch[0]], []) == order[: 40 + per_epoch[0] * batch_size]
    second = rest[per_epoch[0] : per_epoch[0] + per_epoch[1]]
    assert sum(second, []) == order[99 : 99 + per_epoch[1] * batch_size]
    assert len(module.validated) == 3


class LateStrategy(SingleDeviceStrategy):
    """Restore checkpoints after the optimizers were built, as sharded strategies do."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize("limits", [BY_STEPS, BY_EPOCHS], ids=["steps", "epochs"])
def test_a_strategy_that_restores_late_continues_with_the_next_sample(
    tmp_path: Path, corpus: str, limits: dict[str, int]
) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        return make_trainer(tmp_path, *callbacks, strategy=LateStrategy(), accelerator="auto", **limits)

    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9, num_workers=1)

    whole = run(EarlyAsker(), data(), trainer())
    path = tmp_path / "killed.ckpt"
    first = run(EarlyAsker(), data(), trainer(StopAfter(5, path)))
    assert first + run(EarlyAsker(), data(), trainer(), path) == whole


def test_checkpoints_of_validation_within_an_epoch_resume(tmp_path: Path, corpus: str) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, corpus, seq_length=SEQ_LENGTH, batch_size=9)

    class SaveAfterValidation(Callback):
        def on_validation_end(self, trainer: Trainer, _: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    limits = {"max_epochs": 2, "val_check_interval": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    whole = run(Recorder(), data(), make_trainer(tmp_path, SaveAfterValidation(), **limits))
    for step in (3, 9, 14):
        assert run(Recorder(), data(), make_trainer(tmp_path, **limits), tmp_path / f"{step}.ckpt") == whole[step:]


def test_a_finished_run_goes_on_with_more_steps_where_it_stopped(tmp_path: Path, corpus: str) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    whole = run(Recorder(), data(), make_trainer(tmp_path, max_steps=50))
    trainer = make_trainer(tmp_path, max_steps=20)
    first = run(Recorder(), data(), trainer)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    rest = run(Recorder(), data(), make_trainer(tmp_path, max_steps=50), tmp_path / "end.ckpt")
    assert first + rest == whole


def test_short_epochs_of_a_run_by_steps_follow_each_other(tmp_path: Path, corpus: str) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    whole = run(Recorder(), data(), make_trainer(tmp_path, max_steps=20))
    limits = {"max_steps": 20, "limit_train_batches": 5}
    assert run(Recorder(), data(), make_trainer(tmp_path, **limits)) == whole
    path = tmp_path / "killed.ckpt"
    for stop in (7, 10):
        first = run(Recorder(), data(), make_trainer(tmp_path, StopAfter(stop, path), **limits))
        assert first + run(Recorder(), data(), make_trainer(tmp_path, **limits), path) == whole


def test_limited_epochs_resume_in_the_next_epoch(tmp_path: Path, corpus: str) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    limits = {"max_epochs": 3, "limit_train_batches": 5}
    whole = run(Recorder(), data(), make_trainer(tmp_path, **limits))
    assert len(whole) == 15
    path = tmp_path / "killed.ckpt"
    for stop in (3, 5, 10, 12):
        first = run(Recorder(), data(), make_trainer(tmp_path, StopAfter(stop, path), **limits))
        assert first + run(Recorder(), data(), make_trainer(tmp_path, **limits), path) == whole


def test_checkpoints_at_the_end_of_epochs_resume(tmp_path: Path, corpus: str) -> None:
    def data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9)

    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = run(Recorder(), data(), make_trainer(tmp_path, keep, max_epochs=3))
    rest = run(Recorder(), data(), make_trainer(tmp_path, max_epochs=3), tmp_path / "epoch=0.ckpt")
    assert rest == whole[11:]


def test_accumulation_counts_batches_and_not_steps(tmp_path: Path, corpus: str) -> None:
    data = TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=2)
    seen = run(Recorder(), data, make_trainer(tmp_path, max_steps=5, accumulate_grad_batches=3))
    assert len(seen) == 15


def test_other_training_data_start_from_their_beginning_with_a_warning(tmp_path: Path, corpus: str) -> None:
    path = tmp_path / "killed.ckpt"
    first, second = (TokenDataModule(corpus, seq_length=4, batch_size=4, seed=seed) for seed in (1, 2))
    run(Recorder(), first, make_trainer(tmp_path, StopAfter(3, path), max_steps=9))
    fresh = run(Recorder(), second, make_trainer(tmp_path, max_steps=9))
    module = Recorder()
    with pytest.warns(UserWarning, match="written with other training data"):
        make_trainer(tmp_path, max_steps=9).fit(module, datamodule=second, ckpt_path=path)
    assert module.seen == fresh[:6]


class TwoReplicas(DDPStrategy):
    """Say that this one process is one of two data-parallel ranks."""

    index = 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 2, "rank": self.index}


@pytest.mark.parametrize("stop", [None, 4])
def test_lightning_leaves_the_sampler_of_a_distributed_run_alone(tmp_path: Path, corpus: str, stop: int | None) -> None:
    def data(batch_size: int) -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=batch_size)

    whole = run(Recorder(), data(8), make_trainer(tmp_path, max_steps=10))
    path = tmp_path / "killed.ckpt"
    if stop is not None:
        run(Recorder(), data(8), make_trainer(tmp_path, StopAfter(stop, path), max_steps=10))
    ranks = []
    for index in range(2):
        strategy = TwoReplicas()
        strategy.index = index
        trainer = make_trainer(tmp_path, max_steps=10, strategy=strategy, devices=1)
        ranks.append(run(Recorder(), data(4), trainer, path if stop else None))
        torch.distributed.destroy_process_group()
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole[stop or 0 :]


def test_reading_batches_leaves_the_random_numbers_of_models_alone(corpus: str) -> None:
    before = torch.get_rng_state()
    for num_workers in (0, 1):
        list(TokenDataModule(corpus, seq_length=4, num_workers=num_workers).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_takes_every_token_once_in_the_same_order(tmp_path: Path, corpus: str) -> None:
    val = write_corpus(tmp_path / "val", 50, first=1000)
    module = Recorder()
    data = TokenDataModule(corpus, val, seq_length=SEQ_LENGTH, batch_size=5)
    run(module, data, make_trainer(tmp_path, max_steps=2, num_sanity_val_steps=0, val_check_interval=1))
    first, second = sum(module.validated[:3], []), sum(module.validated[3:], [])
    assert sorted(first) == list(range(1001, 1050))
    assert first == second


def test_a_split_divides_the_documents(tmp_path: Path, corpus: str) -> None:
    data = TokenDataModule(corpus, split="80,15,5", seq_length=SEQ_LENGTH, batch_size=5)
    data.setup("fit")
    parts = {
        "train": data.train_dataloader(),
        "val": data.val_dataloader(),
        "test": data.test_dataloader(),
    }
    tokens = {name: {int(t) for batch in part for t in batch["labels"].flatten()} for name, part in parts.items()}
    tokens = {name: found - {-100} for name, found in tokens.items()}
    assert max(tokens["train"]) < 320 <= min(tokens["val"])
    assert max(tokens["val"]) < 380 <= min(tokens["test"])


def test_a_blend_takes_weights(tmp_path: Path, corpus: str) -> None:
    other = write_corpus(tmp_path / "other", 400, first=5000)
    data = TokenDataModule({corpus: 1, other: 3}, seq_length=SEQ_LENGTH, batch_size=4)
    seen = sum(run(Recorder(), data, make_trainer(tmp_path, max_steps=50)), [])
    assert sum(window >= 5000 for window in seen) == 150


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
    [batch], [other] = list(plain.val_dataloader()), list(masked.val_dataloader())
    assert batch["tokens"].tolist() == [[97, 98, 99, 256, 100, 101]]
    assert batch["labels"].tolist() == [[98, 99, 256, 100, 101, 256]]
    assert other["labels"].tolist() == [[98, 99, 256, -100, 101, 256]]


def test_facts_of_the_tokenizer_come_from_the_corpus_if_none_is_named(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "c", ["né", "abcd"])
    data = TokenDataModule(prefix, prefix)
    assert (data.vocab_size, data.eod) == (257, 256)
    assert data.bytes_per_token == pytest.approx(7 / 9)


def test_a_corpus_of_another_tokenizer_is_refused_at_setup(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "c", ["abc"])
    description = tmp_path / "c.json"
    fingerprint = ByteTokenizer.fingerprint
    description.write_text(description.read_text().replace(fingerprint, "0" * 64).replace('"bytes"', '"other"'))
    with pytest.raises(CorruptDataError, match="written with 'other' .* but 'bytes'"):
        TokenDataModule(prefix, tokenizer="bytes").setup("fit")
    with pytest.raises(CorruptDataError, match="must share a tokenizer"):
        TokenDataModule([prefix, write_text(tmp_path / "d", ["abc"])]).setup("fit")


def test_a_corpus_without_description_needs_a_tokenizer_for_its_vocabulary_only(corpus: str) -> None:
    data = TokenDataModule(corpus, seq_length=4)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].shape == (1, 4)
    assert data.bytes_per_token is None
    with pytest.raises(UnsupportedError, match="Name the tokenizer"):
        _ = data.vocab_size


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", 400)
    data = TokenDataModule(val=prefix, tokenizer="bytes", seq_length=4, batch_size=64)
    with pytest.raises(CorruptDataError, match="vocabulary of 257 tokens"):
        list(data.val_dataloader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no data are named"),
        ({"train": "a", "corpus": "speeches"}, "brings its own parts"),
        ({"train": "a", "val": "b", "split": "9,1"}, "split divides"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        TokenDataModule(**arguments)


def test_the_speeches_need_no_further_settings(tmp_path: Path) -> None:
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
