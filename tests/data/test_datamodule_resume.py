"""A resumed run of TokenDataModule sees exactly the samples that are not finished yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.models.step_count import total_steps
from lightning_megatron.plan.global_batch import RampUp
from tests.data.recorder import SEQ_LENGTH, Recorder, make_trainer, run


class EarlyStepCounter(Recorder):
    """Module that reads the number of steps in configure_optimizers, before loops are restored."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps = total_steps(self.trainer)
        return super().configure_optimizers()


class StopAfter(Callback):
    """Callback that saves a checkpoint after some batches and then interrupts the run."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


BY_STEPS = {"max_steps": 14, "max_epochs": -1}
BY_EPOCHS = {"max_epochs": 2}


@pytest.mark.parametrize("limits", [BY_STEPS, BY_EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("module_class", [Recorder, EarlyStepCounter])
def test_a_killed_run_continues_with_the_next_sample(
    tmp_path: Path,
    corpus: str,
    limits: dict[str, int],
    num_workers: int,
    module_class: type[Recorder],
) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9, num_workers=num_workers)

    uninterrupted = run(module_class(), make_data(), make_trainer(tmp_path, **limits))
    assert len(uninterrupted) == (14 if limits is BY_STEPS else 22)
    path = tmp_path / "killed.ckpt"
    # The stops lie in the middle and at the end of the first epoch, and in the second epoch.
    for stop in (5,) if num_workers or limits is BY_STEPS else (5, 11, 15):
        first = run(
            module_class(), make_data(), make_trainer(tmp_path, StopAfter(stop, path), **limits)
        )
        assert first == uninterrupted[:stop]
        resumed = run(module_class(), make_data(), make_trainer(tmp_path, **limits), path)
        assert first + resumed == uninterrupted


@pytest.mark.parametrize("module_class", [Recorder, EarlyStepCounter])
@pytest.mark.parametrize(
    "limits",
    [{}, {"limit_train_batches": 7}, {"limit_train_batches": 0.5}, {"max_steps": 30}],
    ids=str,
)
def test_a_killed_run_with_growing_batches_continues_in_any_epoch(
    tmp_path: Path, corpus: str, limits: dict[str, Any], module_class: type[Recorder]
) -> None:
    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        module = module_class()
        data = TokenDataModule(
            corpus, seq_length=SEQ_LENGTH, global_batch_size=9, ramp_up=RampUp(3, 3, 60)
        )
        trainer = make_trainer(tmp_path, *callbacks, **{"max_epochs": 3, **limits})
        rows = run(module, data, trainer, ckpt_path)
        if isinstance(module, EarlyStepCounter):
            step_counts.append(module.num_steps)
        return rows

    step_counts: list[float] = []
    uninterrupted = trained()
    sizes = [len(batch) for batch in uninterrupted]
    # The first ten batches have 3 samples up to sample 29, the next five 6, and later batches 9.
    assert sizes[:7] == [3] * 7
    assert sizes[-1] == 9
    killed = tmp_path / "killed.ckpt"
    for stop in (2, 8, len(uninterrupted) - 3, len(uninterrupted) - 1):
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted
    assert set(step_counts) <= {len(uninterrupted)}


@pytest.mark.parametrize("batch_size", [4, 16])
def test_another_batch_size_continues_at_the_same_sample(
    tmp_path: Path, corpus: str, batch_size: int
) -> None:
    path, limits = tmp_path / "killed.ckpt", {"max_steps": 12, "max_epochs": -1}
    uninterrupted = run(
        Recorder(),
        TokenDataModule(corpus, seq_length=4, batch_size=1),
        make_trainer(tmp_path, max_steps=300),
    )
    order = [window for [window] in uninterrupted]
    first = run(
        Recorder(),
        TokenDataModule(corpus, seq_length=4, batch_size=8),
        make_trainer(tmp_path, StopAfter(5, path), **limits),
    )
    resumed = run(
        Recorder(),
        TokenDataModule(corpus, seq_length=4, batch_size=batch_size),
        make_trainer(tmp_path, **limits),
        path,
    )
    assert len(resumed) == 7
    taken = sum(first + resumed, [])
    assert taken == order[: len(taken)]


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_run_by_epochs_may_change_its_batch_size_within_an_epoch(
    tmp_path: Path, corpus: str, batch_size: int
) -> None:
    path = tmp_path / "killed.ckpt"

    def make_data(size: int) -> TokenDataModule:
        return TokenDataModule(corpus, corpus, seq_length=4, batch_size=size)

    limits = {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    order = sum(run(Recorder(), make_data(1), make_trainer(tmp_path, **limits)), [])
    first = run(Recorder(), make_data(8), make_trainer(tmp_path, StopAfter(5, path), **limits))
    module = Recorder()
    resumed = run(module, make_data(batch_size), make_trainer(tmp_path, **limits), path)
    per_epoch = [(99 - 40) // batch_size, 99 // batch_size, 99 // batch_size]
    assert len(resumed) == sum(per_epoch)
    assert sum(first + resumed[: per_epoch[0]], []) == order[: 40 + per_epoch[0] * batch_size]
    second = resumed[per_epoch[0] : per_epoch[0] + per_epoch[1]]
    assert sum(second, []) == order[99 : 99 + per_epoch[1] * batch_size]
    assert len(module.validated) == 3


@pytest.mark.parametrize("limits", [BY_STEPS, BY_EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("order", ["passes", "megatron"])
@pytest.mark.parametrize("mixture", ["weights", "sizes", "split"])
def test_blends_and_splits_of_several_sequences_continue_with_the_next_sample(
    tmp_path: Path, limits: dict[str, int], order: Literal["passes", "megatron"], mixture: str
) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    for number, prefix in enumerate(prefixes):
        with TokenFileWriter(prefix, dtype="i4") as writer:
            for start in range(1000 * number, 1000 * number + 200, 10):
                writer.add_document(range(start, start + 10), lengths=[3, 7])

    def make_data() -> TokenDataModule:
        train = {prefixes[0]: 0.7, prefixes[1]: 0.3} if mixture == "weights" else prefixes
        split = "80,10,10" if mixture == "split" else None
        return TokenDataModule(train, split=split, seq_length=SEQ_LENGTH, batch_size=9, order=order)

    options = {**limits, "limit_val_batches": 0}
    uninterrupted = run(Recorder(), make_data(), make_trainer(tmp_path, **options))
    path = tmp_path / "killed.ckpt"
    for stop in (4, 12):
        first = run(
            Recorder(), make_data(), make_trainer(tmp_path, StopAfter(stop, path), **options)
        )
        assert first == uninterrupted[:stop]
        assert (
            first + run(Recorder(), make_data(), make_trainer(tmp_path, **options), path)
            == uninterrupted
        )


class LateStrategy(SingleDeviceStrategy):
    """Strategy that restores checkpoints after building optimizers, like sharded strategies."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize("limits", [BY_STEPS, BY_EPOCHS], ids=["steps", "epochs"])
def test_a_strategy_that_restores_late_continues_with_the_next_sample(
    tmp_path: Path, corpus: str, limits: dict[str, int]
) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        return make_trainer(
            tmp_path, *callbacks, strategy=LateStrategy(), accelerator="auto", **limits
        )

    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9, num_workers=1)

    uninterrupted = run(EarlyStepCounter(), make_data(), trainer())
    path = tmp_path / "killed.ckpt"
    first = run(EarlyStepCounter(), make_data(), trainer(StopAfter(5, path)))
    assert first + run(EarlyStepCounter(), make_data(), trainer(), path) == uninterrupted


def test_checkpoints_of_validation_within_an_epoch_resume(tmp_path: Path, corpus: str) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, corpus, seq_length=SEQ_LENGTH, batch_size=9)

    class SaveAfterValidation(Callback):
        def on_validation_end(self, trainer: Trainer, _: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    limits = {
        "max_epochs": 2,
        "val_check_interval": 3,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
    }
    uninterrupted = run(
        Recorder(), make_data(), make_trainer(tmp_path, SaveAfterValidation(), **limits)
    )
    for step in (3, 9, 14):
        assert (
            run(
                Recorder(), make_data(), make_trainer(tmp_path, **limits), tmp_path / f"{step}.ckpt"
            )
            == uninterrupted[step:]
        )


def test_a_finished_run_with_more_steps_continues_where_it_stopped(
    tmp_path: Path, corpus: str
) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    uninterrupted = run(Recorder(), make_data(), make_trainer(tmp_path, max_steps=50))
    trainer = make_trainer(tmp_path, max_steps=20)
    first = run(Recorder(), make_data(), trainer)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    resumed = run(
        Recorder(), make_data(), make_trainer(tmp_path, max_steps=50), tmp_path / "end.ckpt"
    )
    assert first + resumed == uninterrupted


def test_short_epochs_of_a_run_by_steps_follow_each_other(tmp_path: Path, corpus: str) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    one_epoch = run(Recorder(), make_data(), make_trainer(tmp_path, max_steps=20))
    limits = {"max_steps": 20, "limit_train_batches": 5}
    assert run(Recorder(), make_data(), make_trainer(tmp_path, **limits)) == one_epoch
    path = tmp_path / "killed.ckpt"
    for stop in (7, 10):
        first = run(
            Recorder(), make_data(), make_trainer(tmp_path, StopAfter(stop, path), **limits)
        )
        assert (
            first + run(Recorder(), make_data(), make_trainer(tmp_path, **limits), path)
            == one_epoch
        )


def test_limited_epochs_resume_in_the_next_epoch(tmp_path: Path, corpus: str) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=4)

    limits = {"max_epochs": 3, "limit_train_batches": 5}
    uninterrupted = run(Recorder(), make_data(), make_trainer(tmp_path, **limits))
    assert len(uninterrupted) == 15
    path = tmp_path / "killed.ckpt"
    for stop in (3, 5, 10, 12):
        first = run(
            Recorder(), make_data(), make_trainer(tmp_path, StopAfter(stop, path), **limits)
        )
        assert (
            first + run(Recorder(), make_data(), make_trainer(tmp_path, **limits), path)
            == uninterrupted
        )


def test_checkpoints_at_the_end_of_epochs_resume(tmp_path: Path, corpus: str) -> None:
    def make_data() -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=9)

    checkpoints = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    uninterrupted = run(Recorder(), make_data(), make_trainer(tmp_path, checkpoints, max_epochs=3))
    resumed = run(
        Recorder(), make_data(), make_trainer(tmp_path, max_epochs=3), tmp_path / "epoch=0.ckpt"
    )
    assert resumed == uninterrupted[11:]


def test_changed_training_data_restart_from_the_beginning_with_a_warning(
    tmp_path: Path, corpus: str
) -> None:
    path = tmp_path / "killed.ckpt"
    first, second = (
        TokenDataModule(corpus, seq_length=4, batch_size=4, seed=seed) for seed in (1, 2)
    )
    run(Recorder(), first, make_trainer(tmp_path, StopAfter(3, path), max_steps=9))
    fresh = run(Recorder(), second, make_trainer(tmp_path, max_steps=9))
    module = Recorder()
    with pytest.warns(UserWarning, match="written with other training data"):
        make_trainer(tmp_path, max_steps=9).fit(module, datamodule=second, ckpt_path=path)
    assert module.seen == fresh[:6]


class TwoReplicas(DDPStrategy):
    """Strategy that reports two data-parallel ranks."""

    index = 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 2, "rank": self.index}


@pytest.mark.parametrize("stop", [None, 4])
def test_lightning_does_not_replace_the_sampler_of_a_distributed_run(
    tmp_path: Path, corpus: str, stop: int | None
) -> None:
    def make_data(batch_size: int) -> TokenDataModule:
        return TokenDataModule(corpus, seq_length=SEQ_LENGTH, batch_size=batch_size)

    single_process = run(Recorder(), make_data(8), make_trainer(tmp_path, max_steps=10))
    path = tmp_path / "killed.ckpt"
    if stop is not None:
        run(Recorder(), make_data(8), make_trainer(tmp_path, StopAfter(stop, path), max_steps=10))
    ranks = []
    for index in range(2):
        strategy = TwoReplicas()
        strategy.index = index
        trainer = make_trainer(tmp_path, max_steps=10, strategy=strategy, devices=1)
        ranks.append(run(Recorder(), make_data(4), trainer, path if stop else None))
        torch.distributed.destroy_process_group()
    assert [a + b for a, b in zip(*ranks, strict=True)] == single_process[stop or 0 :]
