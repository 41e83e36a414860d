"""Tests that the pipeline_plan to which refusals lead step by step trains as one process."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import UnsupportedError
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.strategy.checks.run_checks import pipelined_module
from lightning_megatron.swap import parallelize
from tests.proof.fine_tuning import trainer_of
from tests.proof.test_calls import Texts, V
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 16}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pooler_dropout": 0.0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
}


def build_model(kind: str) -> nn.Module:
    """Return a model of random weights."""
    torch.manual_seed(0)
    if kind == "Transformer":
        return Transformer(vocab_size=V, ninp=16, nhead=2, nhid=24, nlayers=2, dropout=0.0)
    model_class = getattr(transformers, kind)
    if kind == "CLIPModel":
        vision = {**VISION, "image_size": 8, "patch_size": 4}
        return model_class(
            model_class.config_class(text_config={**SIZES, "eos_token_id": 2}, vision_config=vision)
        )
    if kind == "T5ForConditionalGeneration":
        return model_class(model_class.config_class(**T5, decoder_start_token_id=0))
    extra = (
        {**RELATIVE, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 16}
        if "Deberta" in kind
        else {}
    )
    return model_class(model_class.config_class(**SIZES, **UNDROPPED, **extra))


class Train(LightningModule):
    """Train a model of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.losses = kind, []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model: Any = build_model(self.kind).train()

    def loss_of(self, tokens: Tensor) -> Tensor:
        if self.kind == "Transformer":
            return F.nll_loss(self.model(tokens, tokens.flip(1)), tokens.flatten())
        if self.kind == "CLIPModel":
            pixels = (tokens[:, :1, None, None] / 40).sin().expand(-1, 3, 8, 8)
            output = self.model(input_ids=tokens, pixel_values=pixels)
            return (output.text_embeds * output.image_embeds).sum(-1).mean()
        if self.kind == "ElectraForQuestionAnswering":
            return self.model(
                tokens, start_positions=tokens[:, 0] % 4, end_positions=tokens[:, 1] % 4
            ).loss
        labels = tokens[:, 0] % 2 if "Sequence" in self.kind else tokens % 2
        return self.model(tokens, labels=labels).loss

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


KINDS = (
    "Transformer", "ElectraForQuestionAnswering", "T5ForConditionalGeneration", "CLIPModel",
    "DebertaV2ForSequenceClassification",
)  # fmt: skip


def plan_of_refusals(kind: str) -> dict[str, str]:
    """Return the plan to which refusals lead."""
    plan: dict[str, str] | None = None
    for _ in range(5):
        module, mesh = Train(kind), mesh_of(pp=2)
        module.configure_model()
        try:
            parallelize(module, mesh, None, plan)
            executor = PipelineExecutor(mesh, pipelined_module(module, mesh))
            assert executor.model is not None
            (part,) = split_batch(next(iter(DataLoader(Texts(), batch_size=2))), None)
            executor.plans.of(Trial(), executor.model, module.loss_of, part)
        except UnsupportedError as error:
            *_, named = re.findall(r"pipeline_plan (\{.*?\})", str(error))
            plan = ast.literal_eval(named)
        else:
            assert plan is not None, "a table or the model itself has stages"
            return plan
    raise AssertionError(f"refusals lead to no end: {plan}")


def fit(kind: str, layout: dict[str, Any] | None, devices: int) -> list[float]:
    seed_everything(1, verbose=False)
    module = Train(kind)
    trainer_of(layout, devices, 2, max_epochs=1).fit(module, DataLoader(Texts(), batch_size=4))
    return module.losses


def fit_all(rank: int, size: int, plans: dict[str, dict[str, str]]) -> dict[str, list[float]]:
    return {kind: fit(kind, {"pp": 2, "pipeline_plan": plan}, size) for kind, plan in plans.items()}


def test_plans_that_refusals_name_train_as_one_process() -> None:
    plans = {kind: plan_of_refusals(kind) for kind in KINDS}
    assert plans["CLIPModel"] == {
        "model.vision_model.encoder.layers": "blocks",
        "model.text_model": "last",
    }
    reports = run_world(fit_all, 2, plans)
    for kind in KINDS:
        losses = fit(kind, None, 1)
        assert losses[0] != losses[1]
        for report in reports:
            assert report[kind] == pytest.approx(losses, abs=2e-6), kind


def test_the_error_for_a_module_without_blocks_asks_for_blocks_of_one_kind() -> None:
    with pytest.raises(
        UnsupportedError, match="at least 2 blocks of one kind, and this module has none"
    ):
        pipelined_module(BoringModel(), mesh_of(pp=2))
