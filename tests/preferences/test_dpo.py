"""DPO has the losses of the papers' formulas, and keeps its reference after a restart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_megatron import DPO, MegatronStrategy, PreferenceDataModule
from lightning_megatron.errors import (
    CheckpointMismatchError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.models.lora import LoraSettings
from tests.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.data.test_datamodule_resume import StopAfter
from tests.preferences.parts import measured, moved

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
    given = {"beta": BETA, "learning_rate": 0.003, "schedule": "constant", **options}
    return DPO(str(folder / "model"), **given)


def plain_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each answer and its number of tokens, row by row."""
    found, counts = [], []
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        for row, wanted in zip(tokens, labels, strict=True):
            logits = model(input_ids=row[None]).logits[0].log_softmax(-1)
            is_label = wanted != -100
            found.append(logits[is_label].gather(1, wanted[is_label][:, None]).sum())
            counts.append(int(is_label.sum()))
    shape = len(batch["tokens"]), 2
    return torch.stack(found).view(shape), torch.tensor(counts).view(shape)


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


@pytest.mark.parametrize(
    ("name", "smoothing", "is_free"),
    [
        ("sigmoid", 0.0, False),
        ("sigmoid", 0.1, False),
        ("sigmoid", 0.0, True),
        ("robust", 0.2, False),
        ("hinge", 0.0, False),
        ("ipo", 0.0, False),
        ("apo_zero", 0.0, False),
    ],
)
def test_losses_are_those_of_the_formulas_on_plain_logits(
    folder: Path, name: Any, smoothing: float, is_free: bool
) -> None:
    batch = pairs_of(folder).each_pair_once("train").batches[[0, 1, 2, -1]]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64
    )
    model = moved(copy.deepcopy(reference))
    real = {key: value[:3] for key, value in batch.items()}
    with torch.no_grad():
        (own, counts), (base, _) = (plain_log_probs(one, real) for one in (model, reference))
    ratios = own if is_free else own - base
    module = module_of(folder, loss_type=name, label_smoothing=smoothing, reference_free=is_free)
    loss, rewards = measured(module, model, reference, batch)
    assert loss.dtype == torch.float64
    wanted = expected_loss(name, smoothing, ratios, counts)
    assert float(loss.detach()) == pytest.approx(wanted, rel=0, abs=1e-10)
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


def test_settings_are_checked(folder: Path) -> None:
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


class Kept(DPO):
    """Callback that records the losses of the steps."""

    losses: tuple[float, ...] = ()

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses = (*self.losses, float(self.trainer.callback_metrics["train_loss"]))

    def on_train_start(self) -> None:
        super().on_train_start()
        self.pairs_at_start = self.reference.state()


def fit(
    folder: Path, *callbacks: Any, ckpt_path: Path | None = None, rows: str = "rows.jsonl",
    strategy: Any = None, **options: Any,
) -> Kept:  # fmt: skip
    seed_everything(1, verbose=False)
    module = Kept(str(folder / "model"), BETA, learning_rate=0.003, schedule="constant", **options)
    trainer = trainer_of(folder, *callbacks, strategy=strategy or MegatronStrategy())
    try:
        trainer.fit(module, pairs_of(folder, rows, global_batch_size=2), ckpt_path=ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        assert callbacks, "only a callback stops a run"
    return module


@pytest.mark.filterwarnings("ignore:The checkpoint was written with other training data")
@pytest.mark.parametrize("strategy", ["auto", None])
def test_a_restarted_training_keeps_its_reference(
    folder: Path, tmp_path: Path, strategy: str | None
) -> None:
    whole = fit(folder, strategy=strategy)
    assert whole.losses[0] == pytest.approx(math.log(2), rel=0, abs=1e-12)
    assert whole.losses[-1] < 0.6
    killed = tmp_path / "killed.ckpt"
    first = fit(folder, StopAfter(2, killed), strategy=strategy)
    second = fit(folder, ckpt_path=killed, strategy=strategy)
    # The callback stops the run before the module's hook keeps the second loss.
    assert first.losses == pytest.approx(whole.losses[:1], rel=0, abs=1e-12)
    # Without the strategy, Lightning loads the weights before it converts the module to float64.
    close = 1e-12 if strategy is None else 1e-6
    assert second.losses == pytest.approx(whole.losses[2:], rel=0, abs=close)
    values = [one.pairs_at_start["train"]["values"] for one in (first, second)]
    assert values[0].shape == (NUM, 2)
    assert torch.equal(*values)
    write_lines(folder / "others.jsonl", preferences(NUM, seed=2))
    with pytest.raises(CheckpointMismatchError, match="must be the pairs whose reference"):
        fit(folder, ckpt_path=killed, rows="others.jsonl", strategy=strategy)
    if strategy == "auto":
        again = DPO.load_from_checkpoint(killed, weights_only=True)
        assert again.pair_loss == whole.pair_loss
        assert torch.equal(again.reference.state()["train"]["values"], values[0])


def test_a_trained_model_is_not_a_reference_but_adapters_can_be_disabled(folder: Path) -> None:
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
        [found] = tester.test(module, data, verbose=False)
        assert found["test_loss"] < math.log(2) - 0.01
        assert found["test_rewards/margins"] > 0.0
        values = module.reference.state()
        names = {key for key, one in module.named_parameters() if one.requires_grad}
        assert names
        assert all(".lora_" in key for key in names)
    torch.testing.assert_close(
        values["test"]["values"], values["train"]["values"], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("strategy", ["auto", None])
def test_named_sets_have_the_values_of_sets_alone(folder: Path, strategy: str | None) -> None:
    sets = {
        "few": write_lines(folder / "few.jsonl", preferences(3, seed=3)),
        "many": write_lines(folder / "many.jsonl", preferences(5, seed=4)),
    }
    found = {}
    for name, val in {**sets, "all": sets}.items():
        seed_everything(1, verbose=False)
        module = module_of(folder, learning_rate=0.003, schedule="constant")
        trainer = trainer_of(folder, strategy=strategy or MegatronStrategy(), steps=2)
        trainer.fit(module, pairs_of(folder, global_batch_size=2, val=val))
        trainer.validate(module, pairs_of(folder, global_batch_size=2, val=val), verbose=False)
        found[name] = {key: float(one) for key, one in trainer.callback_metrics.items()}
    assert module.reference.state().keys() == {"train", "val/few", "val/many"}
    means = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    close = {"rel": 0, "abs": 1e-12 if strategy is None else 1e-6}
    for mean in means:
        few, many = (found[name][f"val_{mean}"] for name in sets)
        both = found["all"]
        assert both[f"val_{mean}/few"] == pytest.approx(few, **close)
        assert both[f"val_{mean}/many"] == pytest.approx(many, **close)
        assert both[f"val_{mean}"] == pytest.approx((3 * few + 5 * many) / 8, **close)
    assert found["few"]["val_loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_a_reference_needs_numbered_pairs(folder: Path) -> None:
    from lightning_megatron import ChatDataModule

    rows = write_lines(folder / "chat.jsonl", conversations(4))
    data = ChatDataModule(rows, str(folder / "model"), seq_length=250)
    with pytest.raises(UnsupportedError, match="the Trainer is ChatDataModule"):
        trainer_of(folder, strategy="auto").fit(module_of(folder), data)
