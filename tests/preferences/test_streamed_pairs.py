"""DPO on streamed pairs trains in every layout as in one process, also after a change of layout in
the middle of a section, and as without streaming if the files fit into one section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_megatron import DPO, MegatronStrategy, PreferenceDataModule, Streaming
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.preferences.reference import ReferenceLogProbs
from tests.chat_folder import preferences, save_chat_llama, write_lines
from tests.world import run_world

pytest.importorskip("transformers")

LENGTH, STEPS, SAVED_AFTER = 160, 6, 3
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}}
#: Sections that are shorter than a pass. The checkpoint after six pairs is in the middle of one.
SHORT = Streaming(4)
#: Layouts that write a checkpoint, and those that continue from it.
CHANGES = {"tp2": "dp2", "dp2": "pp2", "pp2": "tp2"}


class ValueRecorder(Callback):
    """Callback that records the logged values of all steps, and may save a checkpoint."""

    def __init__(self, path: Path | None) -> None:
        self.logged: list[dict[str, float]] = []
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if self.path is not None and trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def train(
    root: Path,
    strategy: Any,
    devices: int,
    streaming: Streaming | None,
    files: tuple[str, ...] = ("a.jsonl", "b.jsonl"),
    save: str | None = None,
    resume: str | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Return the logged values of each step."""
    seed_everything(1, verbose=False)
    data = PreferenceDataModule(
        [str(root / name) for name in files], str(root / "model"), seq_length=LENGTH,
        global_batch_size=2, streaming=streaming,
    )  # fmt: skip
    recorder = ValueRecorder(None if save is None else root / save)
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy,
        max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[recorder],
    )  # fmt: skip
    module = DPO(str(root / "model"), beta=0.3, learning_rate=0.003, schedule="constant", **options)
    trainer.fit(module, data, ckpt_path=None if resume is None else root / resume)
    return recorder.logged


def train_all(rank: int, size: int, root: Path) -> dict[str, list[dict[str, float]]]:
    def run(name: str, **options: Any) -> list[dict[str, float]]:
        strategy = MegatronStrategy(microbatch_size=1, **LAYOUTS[name])
        return train(root, strategy, size, SHORT, **options)

    runs = {name: run(name, save=f"{name}.ckpt") for name in LAYOUTS}
    for first_layout, next_layout in CHANGES.items():
        resumed = run(next_layout, resume=f"{first_layout}.ckpt")
        runs[f"{first_layout} continues as {next_layout}"] = (
            runs[first_layout][:SAVED_AFTER] + resumed
        )
    return runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama with a chat template, and two files of pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    save_chat_llama(folder / "model")
    rows = preferences(9)
    write_lines(folder / "a.jsonl", rows[:5])
    write_lines(folder / "b.jsonl", rows[5:])
    return folder


def test_layouts_train_like_one_process_and_continue_in_other_layouts(root: Path) -> None:
    single_process = train(root, MegatronStrategy(), 1, SHORT, save="one.ckpt")
    assert len(single_process) == STEPS
    assert single_process[-1]["train_loss"] < single_process[0]["train_loss"] - 0.01
    assert (
        train(root, MegatronStrategy(), 1, SHORT, resume="one.ckpt") == single_process[SAVED_AFTER:]
    )
    for runs in run_world(train_all, 2, root):
        assert len(runs) == 6
        for name, logged in runs.items():
            assert len(logged) == STEPS
            for actual, expected in zip(logged, single_process, strict=True):
                assert actual == pytest.approx(expected, rel=0, abs=1e-10), name


@pytest.mark.parametrize("options", [{}, {"reference_free": True}, {"lora": {"r": 4}}], ids=str)
def test_a_section_of_a_complete_file_trains_like_an_unstreamed_file(
    root: Path, options: dict[str, Any]
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    runs = [
        train(root, MegatronStrategy(), 1, streaming, ("a.jsonl",), **options)
        for streaming in (None, Streaming(), SHORT)
    ]
    assert runs[0] == runs[1]
    # Smaller sections have another order.
    assert runs[0] != runs[2]


def test_log_probabilities_of_unknown_pairs_are_nan() -> None:
    reference = ReferenceLogProbs()
    numbers = torch.tensor([0, 3, 2**40])
    values = torch.arange(6.0).view(3, 2)
    reference.load_state({"train": {"key": "", "pairs": numbers, "values": values}})
    actual = reference.of("train", torch.tensor([2**40, 3, 0]))
    assert torch.equal(actual, values.flip(0))
    actual = reference.of("train", torch.tensor([2, -1, 2**41]))
    assert actual.isnan().all(1).tolist() == [True, False, True]
    with pytest.raises(
        CheckpointMismatchError, match=r"train pairs .* they have \['key', 'values'"
    ):
        reference.load_state({"train": {"key": "", "values": values}})
