"""Tests that optimizer states of replaced Hugging Face models are exchanged with one process of
ordinary Lightning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from tests.swap import expert_models
from tests.swap.test_language_models import exact_twin
from tests.sweeps import chosen
from tests.world import run_world

peft = pytest.importorskip("peft")

V, STEPS, SAVED_AFTER = 53, 4, 2
TP, PP = {"tp": 2}, {"pp": 2, "microbatch_size": 2}
#: Cases and the layouts in which each case trains; ``gpt2`` stores projections transposed,
#: ``gpt_neox`` stores rows of one head after the other, and ``mixtral`` all experts of a layer in
#: one tensor.
LAYOUTS: dict[str, dict[str, dict[str, int]]] = chosen(
    {
        "llama": {"tp": TP, "pp": PP},
        "gpt2": {"tp": TP, "pp": PP},
        "gpt_neox": {"tp": TP, "pp": PP},
        "mixtral": {"tp": TP, "pp": PP, "ep": {**TP, "ep": 2, "etp": 1}},
        "llama with an adapter": {"tp": TP, "pp": PP},
        "gpt_neox with an adapter": {"tp": TP},
    },
    "gpt2",
    "mixtral",
    "gpt_neox",
    "llama with an adapter",
    "gpt_neox with an adapter",
)


class Texts(Dataset):
    """The same four texts in every step, because Lightning's own strategies restart an epoch."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, V, (8,), generator=torch.Generator().manual_seed(index % 4))


class FineTune(LightningModule):
    """Train with weight decay for some parameters, chosen by name as in Hugging Face's scripts."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.losses: list[float] = []
        name = case.removesuffix(" with an adapter")
        model: Any = (
            expert_models.exact_twin_of(name, num_hidden_layers=2)
            if name == "mixtral"
            else exact_twin(name)
        )
        if case != name:
            targets = "all-linear" if name == "llama" else ["query_key_value", "dense"]
            config = peft.LoraConfig(
                r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights="gaussian"
            )
            torch.manual_seed(3)
            model = peft.get_peft_model(model, config).double()
        self.model = model.eval()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        logits = self.model(input_ids=batch).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        undecayed = [
            p
            for name, p in self.named_parameters()
            if "norm" in name or "bias" in name or "ln_" in name
        ]
        decayed = [
            p for p in self.parameters() if all(p is not parameter for parameter in undecayed)
        ]
        groups = [
            {"params": decayed, "weight_decay": 0.3},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


def train(
    case: str, layout: dict[str, int] | None, devices: int, steps: int, path: Path | None = None
) -> Trainer:
    """Return the trainer of a run, from its start or from a checkpoint."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(FineTune(case), DataLoader(Texts(), batch_size=4), ckpt_path=path)
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    module: Any = trainer.lightning_module
    return list(module.losses)


def train_in_parts(rank: int, size: int, folder: Path) -> dict[tuple[str, str], list[float]]:
    """Save a training of every case and layout, and return the losses of trainings that continue
    from a file of one process.
    """
    losses = {}
    for case, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            train(case, layout, size, SAVED_AFTER).save_checkpoint(folder / f"{case}.{name}")
            losses[case, name] = losses_of(
                train(case, layout, size, STEPS, folder / f"{case}.ckpt")
            )
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the first steps of every case in one process."""
    path = tmp_path_factory.mktemp("states")
    for case in LAYOUTS:
        train(case, None, 1, SAVED_AFTER).save_checkpoint(path / f"{case}.ckpt")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str], list[float]]]:
    return run_world(train_in_parts, 2, folder)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_training_continues_in_one_process_and_from_one_process(
    case: str, folder: Path, ranks: Any
) -> None:
    uninterrupted = losses_of(train(case, None, 1, STEPS))
    assert uninterrupted[0] > uninterrupted[-1]
    for name in LAYOUTS[case]:
        file = folder / f"{case}.{name}.ckpt"
        consolidate(folder / f"{case}.{name}", file)
        continued = losses_of(train(case, None, 1, STEPS, file))
        assert continued == pytest.approx(uninterrupted[SAVED_AFTER:], abs=1e-9), (
            f"{name} to one process"
        )
        for losses in ranks:
            assert losses[case, name] == pytest.approx(uninterrupted[SAVED_AFTER:], abs=1e-9), (
                f"one process to {name}"
            )
