"""DPO has the losses of the papers' formulas, and keeps its reference after a restart, also of streams."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_megatron import (
    DPO,
    ChatDataModule,
    MegatronStrategy,
    PreferenceDataModule,
    Streaming,
)
from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from lightning_megatron.models.lora import LoraSettings
from lightning_megatron.preferences.reference import ReferenceLogProbs
from tests.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.data.recorder import StopAfter
from tests.preferences.parts import loss_and_rewards, perturbed

transformers = pytest.importorskip("transformers")

LENGTH, NUM, BETA = 160, 9, 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    save_chat_llama(folder / "model")
    write_lines(folder / "rows.jsonl", preferences(NUM))
    return folder


def pairs_of(folder: Path, rows: str = "rows.jsonl", **options: Any) -> PreferenceDataModule:
    return PreferenceDataModule(
        str(folder / rows), str(folder / "model"), seq_length=LENGTH, **options
    )


def module_of(folder: Path, **options: Any) -> DPO:
    settings = {"beta": BETA, "learning_rate": 0.003, "schedule": "constant", **options}
    return DPO(str(folder / "model"), **settings)


def plain_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each answer and its number of tokens, row by row."""
    log_probs, counts = [], []
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        for row, row_labels in zip(tokens, labels, strict=True):
            logits = model(input_ids=row[None]).logits[0].log_softmax(-1)
            is_label = row_labels != -100
            log_probs.append(logits[is_label].gather(1, row_labels[is_label][:, None]).sum())
            counts.append(int(is_label.sum()))
    shape = len(batch["tokens"]), 2
    return torch.stack(log_probs).view(shape), torch.tensor(counts).view(shape)


def expected_loss(name: str, smoothing: float, ratios: Tensor, counts: Tensor) -> float:
    """Return the mean loss of pairs by the formula of the papers, one pair at a time."""

    def minus_log_sigmoid(value: float) -> float:
        return math.log1p(math.exp(-value))

    total = 0.0
    for (chosen, rejected), (long, short) in zip(ratios.tolist(), counts.tolist(), strict=True):
        logit = BETA * (chosen - rejected)
        right, wrong = minus_log_sigmoid(logit), minus_log_sigmoid(-logit)
        total += {
            "sigmoid": (1 - smoothing) * right + smoothing * wrong,
            "robust": ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing),
            "hinge": max(0.0, 1 - logit),
            "ipo": (chosen / long - rejected / short - 1 / (2 * BETA)) ** 2,
            "apo_zero": 1
            - 1 / (1 + math.exp(-BETA * chosen))
            + 1 / (1 + math.exp(-BETA * rejected)),
        }[name]
    return total / len(ratios)


#: Loss, label smoothing, and whether there is no reference.
LOSSES: list[tuple[Any, float, bool]] = [
    ("sigmoid", 0.0, False),
    ("sigmoid", 0.1, False),
    ("sigmoid", 0.0, True),
    ("robust", 0.2, False),
    *((name, 0.0, False) for name in ("hinge", "ipo", "apo_zero")),
]


def test_losses_match_the_formulas_on_plain_logits(folder):
    batch = pairs_of(folder).each_pair_once("train").batches[[0, 1, 2, -1]]
    auto = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(folder / "model", dtype=torch.float64)
    model = perturbed(copy.deepcopy(reference))
    real = {key: value[:3] for key, value in batch.items()}
    with torch.no_grad():
        (log_probs, counts), (reference_log_probs, _) = (
            plain_log_probs(network, real) for network in (model, reference)
        )
    for name, smoothing, is_reference_free in LOSSES:
        ratios = log_probs if is_reference_free else log_probs - reference_log_probs
        module = module_of(
            folder, loss_type=name, label_smoothing=smoothing, reference_free=is_reference_free
        )
        loss, rewards = loss_and_rewards(module, model, reference, batch)
        assert loss.dtype == torch.float64
        expected = expected_loss(name, smoothing, ratios, counts)
        assert float(loss.detach()) == pytest.approx(expected, rel=0, abs=1e-10)
        means = (BETA * ratios).mean(0)
        assert {key: float(value) for key, value in rewards.items()} == pytest.approx(
            {
                "rewards/chosen": float(means[0]),
                "rewards/rejected": float(means[1]),
                "rewards/margins": float(means[0] - means[1]),
                "rewards/accuracies": float((ratios[:, 0] > ratios[:, 1]).double().mean()),
            },
            rel=0,
            abs=1e-10,
        )


def test_invalid_settings_raise(folder):
    with pytest.raises(ParallelPlanError, match="beta must be a finite number above 0"):
        module_of(folder, beta=0)
    with pytest.raises(ParallelPlanError, match=r"must be 0 with loss_type 'ipo'"):
        module_of(folder, loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(ParallelPlanError, match=r"must be below 0.5"):
        module_of(folder, loss_type="robust", label_smoothing=0.5)
    with pytest.raises(ParallelPlanError, match="token_weighted and bytes_per_token"):
        module_of(folder, token_weighted=False)
    with pytest.raises(ParallelPlanError, match="lora.r must be a whole number"):
        module_of(folder, lora={"r": 0})


def trainer_of(folder: Path, *callbacks: Any, steps: int = 4, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"strategy": MegatronStrategy(), "precision": "64-true"}
    return Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=list(callbacks), default_root_dir=folder, **{**defaults, **options},
    )  # fmt: skip


class LossRecorder(DPO):
    """DPO that records the losses of the steps."""

    losses: tuple[float, ...] = ()

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses = (*self.losses, float(self.trainer.callback_metrics["train_loss"]))

    def on_train_start(self) -> None:
        super().on_train_start()
        self.pairs_at_start = self.reference.state()


def fit(
    folder: Path, *callbacks: Any, ckpt_path: Path | None = None, rows: str = "rows.jsonl",
    strategy: Any = None, streaming: Streaming | None = None, **options: Any,
) -> LossRecorder:  # fmt: skip
    seed_everything(1, verbose=False)
    module = LossRecorder(
        str(folder / "model"), BETA, learning_rate=0.003, schedule="constant", **options
    )
    trainer = trainer_of(folder, *callbacks, strategy=strategy or MegatronStrategy())
    try:
        data = pairs_of(folder, rows, global_batch_size=2, streaming=streaming)
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        assert callbacks, "only a callback stops a run"
    return module


@pytest.mark.filterwarnings("ignore:The checkpoint was written with other training data")
@pytest.mark.parametrize("strategy", ["auto", None])
def test_a_restarted_training_keeps_its_reference(folder, tmp_path, strategy):
    uninterrupted = fit(folder, strategy=strategy)
    assert uninterrupted.losses[0] == pytest.approx(math.log(2), rel=0, abs=1e-12)
    assert uninterrupted.losses[-1] < 0.6
    killed = tmp_path / "killed.ckpt"
    first = fit(folder, StopAfter(2, killed), strategy=strategy)
    second = fit(folder, ckpt_path=killed, strategy=strategy)
    # The callback stops the run before the module's hook keeps the second loss.
    assert first.losses == pytest.approx(uninterrupted.losses[:1], rel=0, abs=1e-12)
    # Without the strategy, Lightning loads the weights before it converts the module to float64.
    close = 1e-12 if strategy is None else 1e-6
    assert second.losses == pytest.approx(uninterrupted.losses[2:], rel=0, abs=close)
    values = [module.pairs_at_start["train"]["values"] for module in (first, second)]
    assert values[0].shape == (NUM, 2)
    assert torch.equal(*values)
    write_lines(folder / "others.jsonl", preferences(NUM, seed=2))
    with pytest.raises(CheckpointMismatchError, match="must be the pairs whose reference"):
        fit(folder, ckpt_path=killed, rows="others.jsonl", strategy=strategy)
    if strategy == "auto":
        reloaded = DPO.load_from_checkpoint(killed, weights_only=True)
        assert reloaded.pair_loss == uninterrupted.pair_loss
        assert torch.equal(reloaded.reference.state()["train"]["values"], values[0])


def test_a_trained_model_is_refused_as_reference_unless_adapters_can_be_disabled(folder):
    pytest.importorskip("peft")
    rows = str(folder / "rows.jsonl")
    lora = LoraSettings(r=4, target_modules=["q_proj", "v_proj"])
    values = {}
    for name, options in {"whole": {}, "lora": {"lora": lora}}.items():
        module = fit(folder, **options)
        data = pairs_of(folder, test=rows)
        tester = trainer_of(folder)
        if name == "whole":
            with pytest.raises(UnsupportedError, match=r"this model has been trained.*\(lora\)"):
                tester.test(module, data, verbose=False)
            continue
        [results] = tester.test(module, data, verbose=False)
        assert results["test_loss"] < math.log(2) - 0.01
        assert results["test_rewards/margins"] > 0.0
        values = module.reference.state()
        names = {key for key, parameter in module.named_parameters() if parameter.requires_grad}
        assert names
        assert all(".lora_" in key for key in names)
    torch.testing.assert_close(
        values["test"]["values"], values["train"]["values"], rtol=0, atol=1e-10
    )


def test_named_sets_have_the_values_of_each_set_validated_alone(folder):
    sets = {
        "few": write_lines(folder / "few.jsonl", preferences(3, seed=3)),
        "many": write_lines(folder / "many.jsonl", preferences(5, seed=4)),
    }
    metrics = {}
    for name, val in {**sets, "all": sets}.items():
        seed_everything(1, verbose=False)
        module, trainer = module_of(folder), trainer_of(folder, steps=2)
        data = pairs_of(folder, global_batch_size=2, val=val)
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        metrics[name] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert module.reference.state().keys() == {"train", "val/few", "val/many"}
    for mean in ("loss", *(f"rewards/{kind}" for kind in ("chosen", "margins", "accuracies"))):
        few, many = (metrics[name][f"val_{mean}"] for name in sets)
        actual = [metrics["all"][f"val_{mean}{end}"] for end in ("/few", "/many", "")]
        expected = [few, many, (3 * few + 5 * many) / 8]
        assert actual == pytest.approx(expected, rel=0, abs=1e-12)
    assert metrics["few"]["val_loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_a_reference_needs_numbered_pairs(folder):
    rows = write_lines(folder / "chat.jsonl", conversations(4))
    data = ChatDataModule(rows, str(folder / "model"), seq_length=250)
    with pytest.raises(UnsupportedError, match="the Trainer is ChatDataModule"):
        trainer_of(folder, strategy="auto").fit(module_of(folder), data)


def test_a_section_of_a_complete_file_trains_like_an_unstreamed_file(folder):
    for options in ({}, {"reference_free": True}):
        unstreamed, whole, sections = (
            fit(folder, streaming=streaming, **options).losses
            for streaming in (None, Streaming(), Streaming(4))
        )
        assert unstreamed == whole
        # Smaller sections have another order.
        assert unstreamed != sections


def test_log_probabilities_of_unknown_pairs_are_nan():
    reference = ReferenceLogProbs()
    numbers = torch.tensor([0, 3, 2**40])
    values = torch.arange(6.0).view(3, 2)
    reference.load_state({"train": {"key": "", "pairs": numbers, "values": values}})
    actual = reference.of("train", torch.tensor([2**40, 3, 0]))
    assert torch.equal(actual, values.flip(0))
    actual = reference.of("train", torch.tensor([2, -1, 2**41]))
    assert actual.isnan().all(1).tolist() == [True, False, True]
    with pytest.raises(CheckpointMismatchError, match=r"they have \['key', 'values'"):
        reference.load_state({"train": {"key": "", "values": values}})
