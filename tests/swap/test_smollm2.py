"""SmolLM2-135M on three ranks has the loss and the continuation of transformers, trains and is
exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, ParallelPlanError
from lightning_megatron.checkpoint.hugging_face import export_model
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from tests.corpora import SPEECHES, need
from tests.smollm2 import save_smollm2
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WINDOW = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


def text_of(folder: Path) -> Tensor:
    """Return the beginning of the latest speech, two windows of tokens."""
    speech = max((need(SPEECHES) / "speeches").glob("2026*")).read_text(encoding="utf-8")
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(speech).ids
    return torch.tensor(tokens[: 2 * WINDOW]).view(2, WINDOW)


def swapped(folder: Path, mesh: ParallelMesh) -> Any:
    """Return the model, of which each rank has read its own weights."""
    root = nn.Module()
    with build_on_meta():
        root.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert all(parameter.is_meta for parameter in root.parameters()), "no rank holds the full model"
    parallelize(root, mesh)
    return root.model


def evaluate(rank: int, size: int, folder: Path) -> tuple[float, list[int], int]:
    """Return the loss on the speech, the greedy continuation of a sentence, and the number of elements
    that this rank holds.
    """
    mesh = ParallelMesh.single()
    if size > 1:
        mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=True)
    model = swapped(folder, mesh).eval()
    text = text_of(folder)
    with torch.no_grad():
        loss = model(input_ids=text, labels=text).loss
        continuation = model.generate(sentence(folder), max_new_tokens=5, do_sample=False)[
            0
        ].tolist()
    return float(loss), continuation, sum(parameter.numel() for parameter in model.parameters())


class FineTune(LightningModule):
    """Train repeatedly on the beginning of the speech."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.losses = folder, []

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(folder: Path, size: int, path: str) -> tuple[list[float], Tensor]:
    """Train three steps, save the weights, and return the losses and the logits for a sentence
    afterwards.
    """
    module, batch = FineTune(folder), text_of(folder)[0, :64].view(2, 32)
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy=MegatronStrategy(tp=size, microbatch_size=2), max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch] * 3, batch_size=None))
    trainer.save_checkpoint(path, weights_only=True)
    with torch.no_grad():
        return module.losses, module.model.eval()(input_ids=sentence(folder)).logits


def evaluate_and_train(rank: int, size: int, folder: Path, path: str) -> tuple[Any, Any]:
    return evaluate(rank, size, folder), train(folder, size, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trained") / "model.ckpt")


@pytest.fixture(scope="module")
def ranks(folder: Path, trained: str) -> list[tuple[Any, Any]]:
    """Return the results of three ranks."""
    return run_world(evaluate_and_train, 3, folder, trained)


def sentence(folder: Path) -> Tensor:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor([tokenizer.encode("The capital of France is").ids])


def test_three_ranks_have_the_loss_and_continuation_of_transformers(
    folder: Path, ranks: list[tuple[Any, Any]]
) -> None:
    twin, text = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(),
        text_of(folder),
    )
    with torch.no_grad():
        logits = twin(text).logits
        expected = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()))
        continuation = twin.generate(sentence(folder), max_new_tokens=5, do_sample=False)[
            0
        ].tolist()
    assert "Paris" in tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        continuation
    )
    single, *evaluations = evaluate(0, 1, folder), *(evaluation for evaluation, _ in ranks)
    for loss, actual, num_elements in (single, *evaluations):
        assert loss == pytest.approx(expected, abs=1e-4)
        assert actual == continuation
        assert num_elements == single[2] or 0.3 < num_elements / single[2] < 0.36


def test_a_model_trained_on_three_ranks_is_exported_with_the_same_logits(
    ranks: list[tuple[Any, Any]], trained: str, folder: Path, tmp_path: Path
) -> None:
    losses, _ = ranks[0][1]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
    export_model(trained, tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype="float32"
    ).eval()
    with torch.no_grad():
        expected = exported(sentence(folder)).logits
    for _, (_, actual) in ranks:
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_nine_heads_on_two_ranks_are_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=36,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=1,
        intermediate_size=16,
    )
    root = nn.ModuleDict({"model": transformers.LlamaForCausalLM(config)})
    with pytest.raises(
        ParallelPlanError,
        match=r"num_attention_heads \(9\) must be a multiple of tp \(2\).* 1, 3 or 9",
    ):
        parallelize(root, mesh_of(tp=2))
