"""DPO has the tokens, losses, gradients and rewards of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.data.preference_datamodule import PreferenceDataModule
from lightning_megatron.preferences.dpo import DPO
from tests.chat_folder import preferences, save_chat_llama, write_lines
from tests.preferences.parts import as_messages, loss_and_rewards, perturbed

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extras

LENGTH, NUM = 160, 6
LOSSES = {"sigmoid": 0.0, "robust": 0.2, "hinge": 0.0, "ipo": 0.0, "apo_zero": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    save_chat_llama(folder / "model")
    write_lines(folder / "rows.jsonl", preferences(NUM))
    return folder


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Any:
    """Return TRL's trainer, whose model differs from its reference model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"), beta=0.3, use_cpu=True, bf16=False, report_to="none",
        max_length=LENGTH + 1,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([as_messages(row) for row in preferences(NUM)])
    return trl.DPOTrainer(
        model=perturbed(model),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float64
        ),
        args=settings,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_and_rewards_match_trl(folder, trainer, name):
    data = PreferenceDataModule(
        str(folder / "rows.jsonl"), str(folder / "model"), seq_length=LENGTH
    )
    batch = data.each_pair_once("train").batches[list(range(NUM))]
    rows = list(trainer.train_dataset)
    for number, row in enumerate(rows):
        for side, key in enumerate(("chosen_ids", "rejected_ids")):
            ids = row["prompt_ids"] + row[key]
            assert batch["tokens"][number, side][: len(ids) - 1].tolist() == ids[:-1]
            labels = [label for label in batch["labels"][number, side].tolist() if label != -100]
            assert labels == row[key]

    trainer.loss_types, trainer.loss_weights = [name], [1.0]
    trainer.label_smoothing = LOSSES[name]
    model = trainer.model.train()
    expected_loss = trainer.compute_loss(model, trainer.data_collator(rows))
    expected = gradients(model, expected_loss)

    module = DPO(str(folder / "model"), 0.3, name, LOSSES[name])
    loss, rewards = loss_and_rewards(module, model, trainer.ref_model, batch)
    actual = gradients(model, loss)
    # TRL's head computes log-probabilities in float32.
    torch.testing.assert_close(loss, expected_loss.double(), rtol=0, atol=1e-5)
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=0, atol=1e-5)
    for key, value in rewards.items():
        assert float(value) == pytest.approx(trainer._metrics["train"][key][-1], abs=1e-5), key
