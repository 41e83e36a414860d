"""Fits with the delayed recipe of FP8: graphs, recomputation, and checkpoints of every recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs, MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.models.layered import layered_modules
from tests.strategy.graph_fits import fit
from tests.strategy.tiny import TinyLM, loader

DELAYED = FP8("delayed", history=3, margin=1, emulate=True)


def history_of(module: TinyLM) -> Tensor:
    (model,) = layered_modules(module)
    assert model.delayed_scales is not None
    return model.delayed_scales.history.clone()


@pytest.mark.parametrize(("mode", "accumulated"), [("segments", 1), ("full", 3)])
def test_graphs_and_recomputation_equal_eager_steps_with_delayed_scales(
    mode: Any, accumulated: int
) -> None:
    # Graphs of the first batches are captured before any step has ended.
    graphs = CudaGraphs(mode, warmup_steps=1, evaluation=True)
    runs, histories = [], []
    for cuda_graphs, recompute in ((None, None), (graphs, None), (graphs, "full"), (None, "full")):
        module = TinyLM()
        layout = {"fp8": DELAYED, "recompute": recompute}
        number = 24 * accumulated
        options = {"accumulate_grad_batches": accumulated, "num_samples": number, "max_steps": 6}
        runs.append(fit(cuda_graphs, 1, layout, module=module, **options))
        histories.append(history_of(module))
    expected, *actual_runs = runs
    assert expected.losses[-1] < expected.losses[0]
    assert float(histories[0].min()) > 0
    for actual, history in zip(actual_runs, histories[1:], strict=True):
        assert not actual.mode or actual.num_graphs[-1] > 0
        assert actual.differences_from(expected) == []
        assert torch.equal(history, histories[0])


class CheckpointFits:
    """Fits of one model with checkpoints.

    Args:
        folder: Folder of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(
        self, fp8: FP8 | None, steps: int, start: str | None = None, save: str | None = None
    ) -> tuple[TinyLM, dict[str, Tensor]]:
        seed_everything(3, verbose=False)
        module = TinyLM()
        trainer = Trainer(
            strategy=MegatronStrategy(fp8=fp8, microbatch_size=2, check_microbatches=False),
            **{"accelerator": "cpu", "devices": 1, "precision": "64-true", "max_steps": steps},
            **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
            enable_model_summary=False,
        )
        # Every epoch has one batch, so every checkpoint is at the end of an epoch.
        trainer.fit(module, loader(4), ckpt_path=None if start is None else self.folder / start)
        if save is not None:
            trainer.save_checkpoint(self.folder / save)
        return module, {
            name: tensor.detach().clone() for name, tensor in module.state_dict().items()
        }


def test_checkpoints_load_under_every_recipe_and_keep_the_history_of_delayed_scales(
    tmp_path: Path,
) -> None:
    fits = CheckpointFits(tmp_path)
    fits.train(DELAYED, 3, save="delayed")
    uninterrupted, weights = fits.train(DELAYED, 6)
    resumed, resumed_weights = fits.train(DELAYED, 6, "delayed", "again")
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)
    assert torch.equal(history_of(resumed), history_of(uninterrupted))
    # Without the history the next step would have other scales.
    names = [
        name
        for name in OpenCheckpoint.open(tmp_path / "delayed").tensors
        if name.startswith("fp8.")
    ]
    assert len(names) == len(history_of(uninterrupted))
    for recipe in (None, FP8(emulate=True)):
        fits.train(recipe, 6, "delayed", "other")
        assert not any(
            name.startswith("fp8.") for name in OpenCheckpoint.open(tmp_path / "other").tensors
        )
        # The fourth step has its own scales, and the history has the last three steps.
        module, _ = fits.train(DELAYED, 9, "other")
        assert float(history_of(module).min()) > 0
    # A longer history begins with the saved steps; layers without a saved history start their own.
    longer = FP8("delayed", history=5, emulate=True)
    module, _ = fits.train(longer, 6, "again")
    assert torch.equal(history_of(module)[:, :3], history_of(uninterrupted))
    assert not bool(history_of(module)[:, 3:].any())
    fits.train(FP8("delayed", history=3, emulate=True, last_bf16=1), 3, save="fewer")
    module, _ = fits.train(DELAYED, 4, "fewer")
    assert float(history_of(module)[:, 0].min()) > 0
    # A consolidated file has weights and optimizer states alone.
    consolidate(tmp_path / "delayed", tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert not any(name.startswith("fp8.") for name in saved["state_dict"])


def test_a_second_fit_of_a_module_continues_with_its_delayed_scales() -> None:
    module = TinyLM()
    layout = {"fp8": DELAYED}
    fit(None, 1, layout, module=module)
    before = history_of(module)
    fit(None, 1, layout, module=module, max_steps=1)
    assert torch.equal(history_of(module)[:, 1:], before[:, :-1])
    fit(None, 1, {}, module=module, max_steps=1)
    assert layered_modules(module)[0].delayed_scales is None
