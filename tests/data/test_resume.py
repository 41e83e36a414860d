"""A resumed run of TokenDataModule sees exactly the samples that are not finished yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.models.token_module import total_steps
from lightning_megatron.plan.global_batch import RampUp
from tests.data.recorder import (
    SEQ_LENGTH,
    Recorder,
    StopAfter,
    check_resumes,
    make_trainer,
    run,
    write_documents,
)
from tests.refusals import check_refusals


class EarlyStepCounter(Recorder):
    """Module that reads the number of steps in configure_optimizers, before loops are restored."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps = total_steps(self.trainer)
        return super().configure_optimizers()


class LateStrategy(SingleDeviceStrategy):
    """Strategy that restores checkpoints after building optimizers, like sharded strategies."""

    restore_checkpoint_after_setup = property(lambda self: True)


STEPS, EPOCHS = {"max_steps": 14, "max_epochs": -1}, {"max_epochs": 2}
RAMP: dict[str, Any] = {"global_batch_size": 9, "ramp_up": RampUp(3, 3, 60), "batch_size": None}
LATE = {"strategy": LateStrategy, "accelerator": "auto"}
WHOLE: dict[str, Any] = {"documents": "whole", "batch_size": 4}
#: Options of the data and the Trainer, stops, and the number of batches of an uninterrupted run.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], int]] = {
    "steps": ({}, STEPS, (5,), 14),
    "steps and workers": ({"num_workers": 2}, STEPS, (5,), 14),
    # In the middle and at the end of the first epoch, and in the second epoch.
    "epochs": ({}, EPOCHS, (5, 11, 15), 22),
    "steps, restored late": ({"num_workers": 1}, {**STEPS, **LATE}, (5,), 14),
    "epochs, restored late": ({}, {**EPOCHS, **LATE}, (5,), 22),
    "short epochs of a run by steps": ({"batch_size": 4}, {"max_steps": 20, "limit_train_batches": 5}, (7, 10), 20),
    "limited epochs": ({"batch_size": 4}, {"max_epochs": 3, "limit_train_batches": 5}, (3, 5, 12), 15),
    "growing batches": (RAMP, {"max_epochs": 3}, (8, 38, 40), 41),
    "growing batches, limited": (RAMP, {"max_epochs": 3, "limit_train_batches": 0.5}, (8, 18), 0),
    "growing batches by steps": (RAMP, {"max_epochs": 3, "max_steps": 30}, (8, 29), 30),
    "weighted blend": ({"train": "weights"}, STEPS, (4, 12), 14),
    "blend by sizes": ({"train": "sizes"}, EPOCHS, (4, 12), 0),
    "Megatron's blend": ({"train": "weights", "order": "megatron"}, EPOCHS, (4, 12), 0),
    "Megatron's split": ({"train": "sizes", "order": "megatron", "split": "80,10,10"}, STEPS, (4, 12), 14),
    "whole documents": ({"train": "mixed", "seq_length": 8, "balance_attention": True, **WHOLE}, {"max_steps": 9}, (5,), 9),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_continues_with_the_next_sample(tmp_path, corpus, name):
    options, limits, stops, number = RUNS[name]
    a, b = (str(tmp_path / prefix) for prefix in "ab")
    for index, prefix in enumerate((a, b)):
        with TokenFileWriter(prefix, dtype="i4") as writer:
            for start in range(1000 * index, 1000 * index + 200, 10):
                writer.add_document(range(start, start + 10), lengths=[3, 7])
    write_documents(tmp_path / "mixed", [7, 3, 2, 9, 4, 4, 2, 12, 3, 5] * 4)
    trains = {"weights": {a: 0.7, b: 0.3}, "sizes": [a, b], "mixed": str(tmp_path / "mixed")}
    step_counts = []

    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        chosen = {"seq_length": SEQ_LENGTH, "batch_size": 9, **options}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        data = TokenDataModule(trains.get(chosen.pop("train", ""), corpus), **chosen)
        more = {key: value() if callable(value) else value for key, value in limits.items()}
        trainer = make_trainer(tmp_path, *callbacks, limit_val_batches=0, **more)
        module = Recorder() if name == "steps" else EarlyStepCounter()
        rows = run(module, data, trainer, ckpt_path)
        step_counts.append(getattr(module, "num_steps", None))
        return rows

    uninterrupted = check_resumes(trained, tmp_path, *stops)
    assert len(uninterrupted) == number or not number
    assert set(step_counts) <= {len(uninterrupted), None}
    if "growing" in name:
        # The first ten batches have 3 samples up to sample 29, the next five 6, and later ones 9.
        sizes = [len(batch) for batch in uninterrupted]
        assert (sizes[:7], sizes[-1]) == ([3] * 7, 9)


@pytest.mark.parametrize("batch_size", [4, 16])
def test_another_batch_size_continues_at_the_same_sample(tmp_path, corpus, batch_size):
    def trained(size: int, *callbacks: Callback, ckpt_path: Path | None = None, **limits: Any):
        module = Recorder()
        data = TokenDataModule(corpus, corpus, seq_length=4, batch_size=size)
        options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, **limits}
        run(module, data, make_trainer(tmp_path, *callbacks, **options), ckpt_path)
        return module

    path, limits = tmp_path / "killed.ckpt", {"max_epochs": 3}
    order = sum(trained(1, **limits).seen, [])
    first = trained(8, StopAfter(5, path), **limits).seen
    module = trained(batch_size, ckpt_path=path, **limits)
    per_epoch = [(99 - 40) // batch_size, 99 // batch_size, 99 // batch_size]
    resumed = module.seen
    assert len(resumed) == sum(per_epoch)
    assert len(module.validated) == 3
    assert sum(first + resumed[: per_epoch[0]], []) == order[: 40 + per_epoch[0] * batch_size]
    second = resumed[per_epoch[0] : per_epoch[0] + per_epoch[1]]
    assert sum(second, []) == order[99 : 99 + per_epoch[1] * batch_size]


def test_checkpoints_of_validation_and_ends_of_epochs_resume(tmp_path, corpus):
    class SaveAfterValidation(Callback):
        def on_validation_end(self, trainer: Trainer, _: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    limits = {"max_epochs": 2, "val_check_interval": 3, "limit_val_batches": 2}

    def trained(*callbacks: Callback, name: str | None = None) -> list[list[int]]:
        data = TokenDataModule(corpus, corpus, seq_length=SEQ_LENGTH, batch_size=9)
        trainer = make_trainer(tmp_path, *callbacks, num_sanity_val_steps=0, **limits)
        return run(Recorder(), data, trainer, None if name is None else tmp_path / f"{name}.ckpt")

    ends = ModelCheckpoint(
        tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    uninterrupted = trained(SaveAfterValidation(), ends)
    for name, step in (("3", 3), ("9", 9), ("14", 14), ("epoch=0", 11)):
        assert trained(name=name) == uninterrupted[step:], name


def test_changed_training_data_restart_from_the_beginning_with_a_warning(tmp_path, corpus):
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


def test_an_invalid_data_position_is_refused(corpus):
    state = {"epoch": 0, "consumed": 8, "batches": 0, "num_samples": 99}
    state |= {"global_batch_size": 4, "steps": 2, "order": "x"}
    changes = [
        ({"consumed": -1}, "whole number of at least 0: it is -1"),
        ({"consumed": 100}, "it has 100 of 99 samples"),
        ({"epoch": True}, "it is True"),
        ({"num_samples": "99"}, "num_samples in the data position"),
        ({"order": 3}, "in the order 3"),
    ]
    cases = [(({**state, **change},), phrase) for change, phrase in changes]
    cases.append((({"epoch": 0},), "are missing"))
    check_refusals(TokenDataModule(corpus).load_state_dict, cases, CheckpointMismatchError)
