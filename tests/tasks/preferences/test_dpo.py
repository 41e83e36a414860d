"""DPO has the losses of plain logits and of TRL, and keeps its reference after a restart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_megatron.errors import (
    CheckpointMismatchError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.models.lora import LoraSettings
from lightning_megatron.tasks.chat import ChatDataModule
from lightning_megatron.tasks.preferences import DPO, PreferenceDataModule
from lightning_megatron.tasks.preferences.pair_loss import PairLoss
from lightning_megatron.tasks.preferences.reference import ReferenceLogProbs
from tests import fits
from tests.data.recorder import StopAfter
from tests.fits import Job
from tests.tasks.chat.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.tasks.preferences.parts import as_messages, loss_and_rewards, perturbed

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


#: Loss, label smoothing, and whether there is no reference.
LOSSES: list[tuple[Any, float, bool]] = [
    ("sigmoid", 0.1, False),
    ("sigmoid", 0.0, True),
    ("ipo", 0.0, False),
]


def test_losses_and_rewards_are_those_of_plain_logits(folder):
    batch = pairs_of(folder).each_pair_once("train").batches[[0, 1, 2, -1]]
    auto, path = transformers.AutoModelForCausalLM, folder / "model"
    reference = auto.from_pretrained(path, dtype=torch.float64)
    model = perturbed(copy.deepcopy(reference))
    real = {key: value[:3] for key, value in batch.items()}
    with torch.no_grad():
        log_probs, counts = plain_log_probs(model, real)
        reference_log_probs, _ = plain_log_probs(reference, real)
    for name, smoothing, is_free in LOSSES:
        ratios = log_probs if is_free else log_probs - reference_log_probs
        options = {"loss_type": name, "label_smoothing": smoothing, "reference_free": is_free}
        loss, rewards = loss_and_rewards(module_of(folder, **options), model, reference, batch)
        expected = PairLoss(name, BETA, smoothing).of(ratios, counts).mean()
        assert float(loss.detach()) == pytest.approx(float(expected), rel=0, abs=1e-10)
        chosen, rejected = (BETA * ratios).mean(0).tolist()
        accuracy = float((ratios[:, 0] > ratios[:, 1]).double().mean())
        expected_rewards = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected,
            "rewards/accuracies": accuracy,
        }  # fmt: skip
        actual = {key: float(value) for key, value in rewards.items()}
        assert actual == pytest.approx(expected_rewards, rel=0, abs=1e-10)


def test_losses_of_a_pair_are_those_of_the_papers():
    chosen, rejected, counts = 0.7, 0.2, (4, 5)
    x, share = BETA * (chosen - rejected), 0.1
    right, wrong = (math.log1p(math.exp(-side * x)) for side in (1, -1))
    expected = {
        ("sigmoid", 0.0): right,
        ("sigmoid", share): (1 - share) * right + share * wrong,
        ("robust", share): ((1 - share) * right - share * wrong) / (1 - 2 * share),
        ("hinge", 0.0): 1 - x,
        ("ipo", 0.0): (chosen / 4 - rejected / 5 - 1 / (2 * BETA)) ** 2,
        ("apo_zero", 0.0): 1 - 1 / (1 + math.exp(-BETA * chosen)) + 1 / (1 + math.exp(-BETA * rejected)),
    }  # fmt: skip
    ratios, numbers = torch.tensor([[chosen, rejected]]).double(), torch.tensor([counts])
    for (name, smoothing), value in expected.items():
        loss = PairLoss(name, BETA, smoothing).of(ratios, numbers)
        assert float(loss) == pytest.approx(value, abs=1e-6), name


WHOLE_BATCHES = {"microbatch_size": None}


def trainer_of(folder: Path, *callbacks: Any, strategy: Any = WHOLE_BATCHES) -> Trainer:
    options = {"default_root_dir": folder, "gradient_clip_val": None}
    return fits.trainer_of(Job(strategy=strategy, steps=4, trainer=options), 1, *callbacks)


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
    strategy: Any = WHOLE_BATCHES, **options: Any,
) -> LossRecorder:  # fmt: skip
    trainer = trainer_of(folder, *callbacks, strategy=strategy)
    settings = {"learning_rate": 0.003, "schedule": "constant", **options}
    module = LossRecorder(str(folder / "model"), BETA, **settings)
    try:
        trainer.fit(module, pairs_of(folder, rows, global_batch_size=2), ckpt_path=ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        assert callbacks, "only a callback stops a run"
    return module


@pytest.mark.filterwarnings("ignore:The checkpoint was written with other training data")
@pytest.mark.parametrize("strategy", [None, WHOLE_BATCHES])
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
    close = 1e-12 if strategy else 1e-6
    assert second.losses == pytest.approx(uninterrupted.losses[2:], rel=0, abs=close)
    values = [module.pairs_at_start["train"]["values"] for module in (first, second)]
    assert values[0].shape == (NUM, 2)
    assert torch.equal(*values)
    write_lines(folder / "others.jsonl", preferences(NUM, seed=2))
    with pytest.raises(CheckpointMismatchError, match="must be the pairs whose reference"):
        fit(folder, ckpt_path=killed, rows="others.jsonl", strategy=strategy)
    if strategy is None:
        reloaded = DPO.load_from_checkpoint(killed, weights_only=True)
        assert reloaded.pair_loss == uninterrupted.pair_loss
        assert torch.equal(reloaded.reference.state()["train"]["values"], values[0])


def test_a_trained_model_is_refused_as_reference_unless_adapters_can_be_disabled(folder):
    pytest.importorskip("peft")
    data = pairs_of(folder, test=str(folder / "rows.jsonl"))
    with pytest.raises(UnsupportedError, match=r"this model has been trained.*\(lora\)"):
        trainer_of(folder).test(fit(folder), data, verbose=False)
    module = fit(folder, lora=LoraSettings(r=4, target_modules=["q_proj", "v_proj"]))
    data = pairs_of(folder, test=str(folder / "rows.jsonl"))
    [results] = trainer_of(folder).test(module, data, verbose=False)
    assert results["test_loss"] < math.log(2) - 0.01
    assert results["test_rewards/margins"] > 0.0
    names = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".lora_" in key for key in names)
    test, train = (module.reference.state()[part]["values"] for part in ("test", "train"))
    torch.testing.assert_close(test, train, rtol=0, atol=1e-10)


def test_unsupported_settings_and_data_are_refused(folder):
    for options, phrase in (
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "must be 0 with loss_type 'ipo'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "must be below 0.5"),
        ({"token_weighted": False}, "does not accept token_weighted and bytes_per_token"),
    ):
        with pytest.raises(ParallelPlanError, match=phrase):
            module_of(folder, **options)
    path = write_lines(folder / "chats.jsonl", conversations(NUM))
    data = ChatDataModule(path, str(folder / "model"), seq_length=250)
    with pytest.raises(UnsupportedError, match="module of the Trainer is ChatDataModule"):
        trainer_of(folder).fit(module_of(folder), data)


def test_log_probabilities_of_unknown_pairs_are_nan():
    reference, values = ReferenceLogProbs(), torch.arange(6.0).view(3, 2)
    pairs = torch.tensor([0, 3, 2**40])
    reference.load_state({"train": {"key": "", "pairs": pairs, "values": values}})
    assert torch.equal(reference.of("train", pairs.flip(0)), values.flip(0))
    actual = reference.of("train", torch.tensor([2, -1, 2**41]))
    assert actual.isnan().all(1).tolist() == [True, False, True]
    with pytest.raises(CheckpointMismatchError, match=r"they have \['key', 'values'"):
        reference.load_state({"train": {"key": "", "values": values}})


SMOOTHINGS = {"sigmoid": 0.0, "robust": 0.2, "hinge": 0.0, "ipo": 0.0, "apo_zero": 0.0}


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Any:
    """Return TRL's trainer, whose model differs from its reference model."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    auto, path = transformers.AutoModelForCausalLM, folder / "model"
    models = [auto.from_pretrained(path, dtype=torch.float64) for _ in range(2)]
    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"), beta=0.3, use_cpu=True, bf16=False, report_to="none",
        max_length=LENGTH + 1,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([as_messages(row) for row in preferences(NUM)])
    return trl.DPOTrainer(
        model=perturbed(models[0]), ref_model=models[1], args=settings, train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )  # fmt: skip


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.extras
@pytest.mark.parametrize("name", SMOOTHINGS)
def test_loss_gradients_and_rewards_match_trl(folder, trainer, name):
    batch = pairs_of(folder).each_pair_once("train").batches[list(range(NUM))]
    rows = list(trainer.train_dataset)
    for number, row in enumerate(rows):
        for side, key in enumerate(("chosen_ids", "rejected_ids")):
            ids = row["prompt_ids"] + row[key]
            assert batch["tokens"][number, side][: len(ids) - 1].tolist() == ids[:-1]
            labels = [label for label in batch["labels"][number, side].tolist() if label != -100]
            assert labels == row[key]
    trainer.loss_types, trainer.loss_weights = [name], [1.0]
    trainer.label_smoothing = SMOOTHINGS[name]
    model = trainer.model.train()
    expected_loss = trainer.compute_loss(model, trainer.data_collator(rows))
    expected = gradients(model, expected_loss)
    module = module_of(folder, loss_type=name, label_smoothing=SMOOTHINGS[name])
    loss, rewards = loss_and_rewards(module, model, trainer.ref_model, batch)
    # TRL's head computes log-probabilities in float32.
    torch.testing.assert_close(loss, expected_loss.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients(model, loss), expected, rtol=0, atol=1e-5)
    for key, value in rewards.items():
        assert float(value) == pytest.approx(trainer._metrics["train"][key][-1], abs=1e-5), key
