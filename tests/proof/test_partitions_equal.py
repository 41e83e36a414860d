"""Tests that every division of layers among stages trains as one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F

from tests.proof.fine_tuning import LABELS, LENGTH, FineTune, InOrder, V, trainer_of
from tests.proof.test_layouts_equal import check
from tests.proof.test_own_stages import PLANS, Plain
from tests.proof.training import STEPS, Job, Report, train
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

# Four layers on four processes.
PARTITIONS: dict[str, dict[str, Any]] = {
    "pp2, none in the last stage": {"pp": 2, "stage_layers": [4, 0]},
    "pp2, none in the first stage": {"pp": 2, "stage_layers": "E|t*4L"},
    "pp4, none at both ends": {"pp": 4, "stage_layers": "E|(tt|)*2L"},
    "pp4, by cost": {"pp": 4},
    "pp2 vpp2, uneven": {"pp": 2, "vpp": 2, "stage_layers": [0, 1, 2, 1]},
    "pp2 vpp2, none in the last chunk": {"pp": 2, "vpp": 2, "stage_layers": [1, 2, 1, 0]},
}
KINDS = ("gpt2-tied", "llama-untied", "post-norm", "experts, some layers")
JOBS = chosen(
    {
        f"{kind}, {name}": Job(kind, layout=layout, compares=kind == KINDS[0])
        for name, layout in PARTITIONS.items()
        for kind in (KINDS if "pp4, none" in name or "last chunk" in name else KINDS[:1])
    },
    "gpt2-tied, pp2, none in the last stage",
    "llama-untied, pp4, none at both ends",
    "post-norm, pp2 vpp2, none in the last chunk",
    "experts, some layers, pp2 vpp2, none in the last chunk",
)
SAVED_AFTER = 2
WAYS = chosen(
    {
        "to other numbers": ("pp4, none at both ends", "pp2 vpp2, uneven"),
        "to the numbers by cost": ("pp2, none in the last stage", "pp4, by cost"),
        "from the numbers by cost": ("pp4, by cost", "pp2, none in the first stage"),
    },
    "to other numbers",
    "from the numbers by cost",
)


def train_all(rank: int, size: int, folder: str) -> dict[str, Report]:
    """Run all jobs, and each change from one partition to another."""
    reports = {
        name: train(job, size, "cpu", os.path.join(folder, str(number)))
        for number, (name, job) in enumerate(JOBS.items())
    }
    for way, (before, after) in WAYS.items():
        saved = os.path.join(folder, way)
        job = Job(KINDS[0], layout=PARTITIONS[before], compares=False)
        train(job, size, "cpu", saved, steps=SAVED_AFTER)
        job = Job(KINDS[0], layout=PARTITIONS[after], compares=False)
        reports[way] = train(job, size, "cpu", resume_from=saved)
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Report]]:
    """Train on four processes, and return their reports."""
    return run_world(train_all, 4, str(tmp_path_factory.mktemp("partitions")))


@pytest.fixture(scope="module")
def twins() -> dict[str, Report]:
    """Train every kind in this process, with plain Lightning."""
    return {kind: train(Job(kind), 1, "cpu") for kind in KINDS}


@pytest.mark.parametrize("name", JOBS)
def test_every_partition_trains_as_one_process(name, reports, twins):
    check(JOBS[name], [ranks[name] for ranks in reports], twins[JOBS[name].kind])


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_one_partition_continues_under_another(way, reports, twins):
    close = {"rtol": 0.0, "atol": 1e-10}
    twin = twins[KINDS[0]]
    for ranks in reports:
        assert len(ranks[way].losses) == STEPS - SAVED_AFTER
        for actual, expected in ((ranks[way].losses, twin.losses), (ranks[way].norms, twin.norms)):
            torch.testing.assert_close(
                torch.tensor(actual), torch.tensor(expected[SAVED_AFTER:]), **close
            )


SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout"), 0.0
)
BERT = {
    **SIZES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": LABELS,
}
MODELS = {
    "GPT2LMHeadModel": (
        "tokens",
        {
            "vocab_size": V,
            "n_positions": LENGTH,
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 4,
            **NO_DROPOUT,
        },
    ),
    "BertForMaskedLM": ("masked", BERT),
    "BertForSequenceClassification": ("classes", BERT),
    "BertForQuestionAnswering": ("classes", {**BERT, "num_labels": 2}),
    "RobertaForMultipleChoice": ("classes", BERT),
    # These models keep their own code.
    "Starcoder2ForCausalLM": (
        "tokens",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "pad_token_id": None,
            "sliding_window": 5,
            # No family computes this activation.
            "hidden_act": "tanh",
            **NO_DROPOUT,
        },
    ),
    "Plain": ("tokens", {}),
}
PARTED = chosen(
    [(kind, name) for kind in MODELS for name in PARTITIONS],
    ("GPT2LMHeadModel", "pp4, by cost"),
    ("GPT2LMHeadModel", "pp2 vpp2, uneven"),
    ("BertForMaskedLM", "pp4, none at both ends"),
    ("BertForMaskedLM", "pp2 vpp2, uneven"),
    ("BertForSequenceClassification", "pp2, none in the last stage"),
    ("BertForQuestionAnswering", "pp2 vpp2, uneven"),
    ("RobertaForMultipleChoice", "pp4, by cost"),
    ("Starcoder2ForCausalLM", "pp2, none in the first stage"),
    ("Starcoder2ForCausalLM", "pp4, by cost"),
    ("Plain", "pp2 vpp2, uneven"),
    ("Plain", "pp2 vpp2, none in the last chunk"),
)


class TrainOutsideModel(FineTune):
    """Train a model of random weights, without code for this package."""

    def __init__(self, kind: str) -> None:
        super().__init__("", MODELS[kind][0])
        self.kind = kind

    def configure_model(self) -> None:
        torch.manual_seed(0)
        if self.kind == "Plain":
            model = Plain()
            del model.body.blocks[4]
        else:
            kind = getattr(transformers, self.kind)
            model = kind(kind.config_class(**MODELS[self.kind][1]))
        self.model = model.double()

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        if self.kind.endswith(("ForQuestionAnswering", "ForMultipleChoice")):
            loss = self.model(**self.of_answers(batch)).loss
            self.log("loss", loss, sync_dist=True)
            return loss
        if "LM" not in self.kind or self.task != "tokens":
            return super().training_step(batch, number)
        # The models' own losses of tokens are in float32.
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def of_answers(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return arguments to find an answer in a row, or to choose one of two rows."""
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        if self.kind.endswith("ForQuestionAnswering"):
            spans = {"start_positions": tokens[:, 0] % 4, "end_positions": tokens[:, 1] % 4}
            return {"input_ids": tokens, "attention_mask": mask, **spans}
        pairs = {"input_ids": (tokens, tokens.flip(1)), "attention_mask": (mask, mask.flip(1))}
        call = {name: torch.stack(pair, 1) for name, pair in pairs.items()}
        return {**call, "labels": tokens[:, 0] % 2}


def train_from_outside(kind: str, layout: dict[str, Any] | None, devices: int) -> list[float]:
    """Return the losses of all steps."""
    seed_everything(1, verbose=False)
    module = TrainOutsideModel(kind)
    if kind == "Plain" and layout is not None:
        layout = {**layout, "pipeline_plan": PLANS["pipeline_plan"]}
    if layout is not None:
        # One partition of each model makes the trial of its microbatches.
        is_uneven = layout["pp"] == 2 and layout.get("stage_layers") == [0, 1, 2, 1]
        layout = {**layout, "check_microbatches": is_uneven}
    trainer_of(layout, devices, 2, max_steps=STEPS, precision="64-true").fit(
        module, InOrder(module.task)
    )
    return module.losses


def train_all_from_outside(rank: int, size: int) -> dict[tuple[str, str], list[float]]:
    """Train every model under its partitions."""
    return {(kind, name): train_from_outside(kind, PARTITIONS[name], size) for kind, name in PARTED}


def test_models_without_code_for_this_package_train_as_one_process() -> None:
    plain = {kind: train_from_outside(kind, None, 1) for kind in MODELS}
    assert all(len(set(losses)) == STEPS for losses in plain.values())
    for rank, reports in enumerate(run_world(train_all_from_outside, 4)):
        for (kind, name), losses in reports.items():
            assert losses == pytest.approx(plain[kind], abs=1e-10), f"{kind}, {name}, rank {rank}"
