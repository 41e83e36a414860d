"""Batches of a task grow at the start of a training as they do in a plain loop, in every layout and
after a restart while they grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_megatron import BERTClassifier, GlueDataModule, RampUp
from lightning_megatron.errors import ParallelPlanError
from tests.finetuning.fits import BATCH, STEPS, module_and_data, train_reference, trainer_of
from tests.finetuning.folders import write_tasks
from tests.sweeps import chosen
from tests.world import run_world

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")
#: Sizes of the batches: 4 up to row 5, 6 up to row 11, and 8 after it.
RAMP, SIZES = RampUp(4, 2, 12), (4, 4, 6, 8)
SAVED_AFTER = 2
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "pp2": {"pp": 2}}
KINDS = chosen(["classes", "options", "spans"], "classes")


class StepRecorder(Callback):
    """Callback that records losses and learning rates of all steps, and may save a checkpoint."""

    def __init__(self, save_after: int | None = None, path: str = "") -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.save_after = save_after
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == self.save_after:
            trainer.save_checkpoint(self.path)


def train(
    kind: str,
    folder: str,
    layout: dict[str, Any],
    size: int,
    save: str | None = None,
    resume: str | None = None,
) -> list[float]:
    """Return the loss of each step."""
    seed_everything(1234, verbose=False)
    steps = StepRecorder(SAVED_AFTER if save else None, save or "")
    trainer = trainer_of(
        {"microbatch_size": 1, **layout}, size, callbacks=[steps], limit_val_batches=0
    )
    module, data = module_and_data(kind, folder, ramp_up=RAMP)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return steps.losses


def train_all(rank: int, size: int, folder: str, kind: str, single_path: str) -> dict[str, Any]:
    losses: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        losses[name] = train(kind, folder, layout, size, save=f"{folder}/{kind}_{name}")
    losses["one to dp2"] = train(kind, folder, {}, size, resume=single_path)
    losses["dp2 to pp2"] = train(kind, folder, {"pp": 2}, size, resume=f"{folder}/{kind}_dp2")
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("growing")
    write_tasks(root, "Bert")
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_losses_match_a_plain_loop_with_growing_batches(folder: Path, kind: str) -> None:
    expected, _ = train_reference(kind, str(folder), SIZES)
    close = {"rel": 0, "abs": 1e-10}
    checkpoint = str(folder / f"{kind}_one")
    losses = train(kind, str(folder), {}, 1, save=checkpoint)
    assert losses == pytest.approx(expected.losses, **close)
    assert len(losses) == STEPS
    # A restart in the same layout changes no bit.
    assert train(kind, str(folder), {}, 1, resume=checkpoint) == losses[SAVED_AFTER:]
    for losses_of_runs in run_world(train_all, 2, str(folder), kind, checkpoint):
        assert len(losses_of_runs) == 4
        for name, actual in losses_of_runs.items():
            expected_losses = expected.losses[SAVED_AFTER:] if " to " in name else expected.losses
            assert actual == pytest.approx(expected_losses, **close), name


def train_by_epochs(
    folder: Path, resume: Path | None = None, save_after: int | None = None
) -> StepRecorder:
    """Train for three epochs of 40 rows with a learning rate that ends at zero."""
    seed_everything(1234, verbose=False)
    saved = str(folder / f"epochs_{save_after}")
    steps = StepRecorder(save_after, saved)
    trainer = trainer_of(
        {"microbatch_size": 1}, 1, callbacks=[steps], limit_val_batches=0, max_steps=-1,
        max_epochs=3,
    )  # fmt: skip
    module = BERTClassifier(
        str(folder / "classes"), 3, learning_rate=0.01, schedule="linear", min_lr_ratio=0.0,
        warmup_share=0.25,
    )  # fmt: skip
    data = GlueDataModule(
        "mnli", str(folder / "classes_files"), str(folder / "classes"), seq_length=16,
        global_batch_size=BATCH, ramp_up=RAMP,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return steps


def test_the_schedule_of_epochs_ends_with_the_last_step(folder: Path) -> None:
    # The first epoch has six batches (4, 4, 6, and three of 8), and each later epoch has five.
    uninterrupted = train_by_epochs(folder)
    assert len(uninterrupted.losses) == 6 + 5 + 5
    assert uninterrupted.rates.index(max(uninterrupted.rates)) == 0.25 * 16
    assert max(uninterrupted.rates) == pytest.approx(0.01)
    # The last step has the rate of one step before zero.
    assert uninterrupted.rates[-1] == pytest.approx(0.01 / (16 - 4))
    for stop in (2, 6, 8):
        saved = train_by_epochs(folder, save_after=stop)
        assert saved.losses == uninterrupted.losses
        resumed = train_by_epochs(folder, resume=folder / f"epochs_{stop}")
        assert resumed.rates == uninterrupted.rates[stop:]
        assert resumed.losses == uninterrupted.losses[stop:]


def test_a_ramp_up_that_misses_the_global_batch_size_is_refused(folder: Path) -> None:
    with pytest.raises(ParallelPlanError, match="ramp_up must grow from start to global_batch"):
        module_and_data("classes", str(folder), ramp_up=RampUp(3, 2, 12))
    with pytest.raises(ParallelPlanError, match="ramp_up needs global_batch_size"):
        module_and_data("classes", str(folder), ramp_up=RAMP, global_batch_size=None)
