"""Tests that training on streamed conversations is the same in every layout, also when it continues
in another layout in the middle of a file.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_megatron import ChatDataModule, HuggingFaceCausalLM, MegatronStrategy, Streaming
from tests.chat_folder import conversations, save_chat_llama, write_lines
from tests.sweeps import chosen
from tests.world import run_world

pytest.importorskip("transformers")

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}}
BY_STEPS = {"max_steps": 5, "max_epochs": -1}
BY_PASSES = {"max_epochs": 2}
#: Layout that writes a checkpoint, and layout that continues from it.
CHANGES = chosen(
    [(saver, follower) for saver in LAYOUTS for follower in LAYOUTS if saver != follower],
    ("dp2", "pp2"),
)
PASSES = chosen(list(LAYOUTS), "pp2")


class Losses(Callback):
    """Losses of all steps, and a checkpoint after some of them."""

    def __init__(self, save_after: int | None, path: Path) -> None:
        self.values: list[float] = []
        self.save_after, self.path = save_after, path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))
        if len(self.values) == self.save_after:
            trainer.save_checkpoint(self.path)


def train(
    folder: str,
    root: Path,
    strategy: Any,
    devices: int,
    limits: dict[str, int],
    save: tuple[int, str] | None = None,
    resume: str | None = None,
) -> list[float]:
    """Return the loss of each step."""
    seed_everything(1, verbose=False)
    paths = [str(root / name) for name in ("a.jsonl", "b.jsonl")]
    data = ChatDataModule(
        paths, folder, seq_length=250, global_batch_size=4, streaming=Streaming(7)
    )
    losses = Losses(save[0] if save else None, root / (save[1] if save else ""))
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy,
        callbacks=[losses], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root, **limits,
    )  # fmt: skip
    module = HuggingFaceCausalLM(folder, learning_rate=0.01, schedule="constant")
    with warnings.catch_warnings():
        # Lightning recommends workers, and asks for `weights_only` of its own checkpoints.
        warnings.simplefilter("ignore")
        trainer.fit(module, data, ckpt_path=root / resume if resume else None)
    return losses.values


def train_all(rank: int, size: int, folder: str, root: Path) -> dict[str, list[float]]:
    losses = {}

    def run(name: str, limits: dict[str, int], **options: Any) -> list[float]:
        strategy = MegatronStrategy(microbatch_size=1, **LAYOUTS[name])
        return train(folder, root, strategy, size, limits, **options)

    for name in dict.fromkeys(saver for saver, _ in CHANGES):
        losses[name] = run(name, BY_STEPS, save=(2, f"{name}.ckpt"))
    for saver, follower in CHANGES:
        later = run(follower, BY_STEPS, resume=f"{saver}.ckpt")
        losses[f"{saver} goes on as {follower}"] = losses[saver][:2] + later
    for name in PASSES:
        losses[f"{name} by passes"] = run(name, BY_PASSES)
    return losses


def test_layouts_train_as_one_process_and_continue_each_others_checkpoints(tmp_path: Path) -> None:
    folder = save_chat_llama(tmp_path / "model")
    rows = conversations(40)
    write_lines(tmp_path / "a.jsonl", rows[:17])
    write_lines(tmp_path / "b.jsonl", rows[17:])
    by_steps = train(folder, tmp_path, MegatronStrategy(), 1, BY_STEPS)
    by_passes = train(folder, tmp_path, MegatronStrategy(), 1, BY_PASSES)
    assert len(by_steps) == 5
    assert by_passes[:5] == by_steps
    assert len(by_passes) > 5
    for reports in run_world(train_all, 2, folder, tmp_path):
        assert len(reports) >= 3
        for name, losses in reports.items():
            expected = by_passes if name.endswith("passes") else by_steps
            assert losses == pytest.approx(expected, rel=0, abs=1e-10), name
