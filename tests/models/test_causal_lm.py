"""CausalLM trains, logs, applies weight decay and resumes under an ordinary Trainer."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import WeightDecaySchedule, WSDSchedule
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.lr_schedules import WarmupSchedule

CONFIG = GPTConfig.gpt2(
    vocab_size=20, max_seq_length=8, num_layers=1, hidden_size=16, num_heads=2, hidden_dropout=0.1
)


class Counting(L.LightningDataModule):
    """Data of sequences that count upwards, whose next token is always predictable."""

    bytes_per_token = 2.0

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        rows = [(torch.arange(9) + start) % 20 for start in range(16)]
        return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_trainer(tmp_path: Path, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **options)


def test_a_causal_lm_learns_logs_and_predicts(tmp_path):
    L.seed_everything(1)
    module, data = CausalLM(CONFIG, learning_rate=1e-2, warmup_steps=4), Counting()
    trainer = make_trainer(tmp_path, max_epochs=20)
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    assert metrics["val_loss"] < 0.7
    assert metrics["train_loss"] < 1.5
    assert metrics["val_bits_per_byte"] == pytest.approx(
        float(metrics["val_loss"]) / math.log(2) / 2.0
    )
    test_metrics = trainer.test(module, data, verbose=False)[0]
    assert test_metrics["test_loss"] == pytest.approx(float(metrics["val_loss"]))
    losses = trainer.predict(module, data)
    assert losses is not None
    assert losses[0].shape == (4, 8)
    assert float(torch.cat(losses).mean()) == pytest.approx(test_metrics["test_loss"], rel=1e-5)


class Unread(Counting):
    bytes_per_token = property(lambda self: pytest.fail("nobody asked for bits per byte"))


def test_bytes_of_tokens_are_read_only_for_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(CausalLM, "weights_of_means", (("loss", "tokens"),))
    results = make_trainer(tmp_path).validate(CausalLM(CONFIG), Unread(), verbose=False)
    assert list(results[0]) == ["val_loss"]


def test_matrices_decay_and_vectors_do_not():
    module = CausalLM(CONFIG, weight_decay=0.3, max_steps=10)
    module.configure_model()
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.dim() == 2 for p in groups[0]["params"])
    assert all(p.dim() == 1 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def test_the_learning_rate_warms_up_and_decays():
    for shape, middle, end in (("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)):
        schedule = WarmupSchedule(shape, warmup_steps=4, num_steps=24, min_ratio=0.1)
        factors = [schedule.factor(step) for step in (0, 1, 2, 3, 4, 14, 24, 1000)]
        assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, middle, end, end])
    with pytest.raises(UnsupportedError, match="cosine schedule needs a last step"):
        WarmupSchedule("cosine", 0, None, 0.0)


RATE_SCHEDULE = partial(WSDSchedule, num_steps=8, decay_steps=4, decay="linear", warmup_steps=2)
WEIGHT_DECAY_SCHEDULE = partial(WeightDecaySchedule, start=0.0, end=0.4, num_steps=8)


def test_a_fit_follows_its_schedules_and_checkpoints_restore_them(tmp_path):
    trainer, path = make_trainer(tmp_path, max_steps=6), tmp_path / "one.ckpt"
    schedules = {"lr_schedule": RATE_SCHEDULE, "weight_decay_schedule": WEIGHT_DECAY_SCHEDULE}
    module = CausalLM(CONFIG, learning_rate=0.01, **schedules, token_weighted=False)
    trainer.fit(module, Counting())
    matrices, vectors = trainer.optimizers[0].param_groups
    assert (matrices["lr"], matrices["weight_decay"]) == pytest.approx((0.005, 0.3))
    assert (vectors["lr"], vectors["weight_decay"]) == pytest.approx((0.005, 0.0))
    trainer.save_checkpoint(path)
    loaded = CausalLM.load_from_checkpoint(path, weights_only=False)
    assert loaded.config == CONFIG
    assert torch.equal(loaded.model.embedding.word.weight, module.model.embedding.word.weight)
    resumed = make_trainer(tmp_path, max_steps=7)
    resumed.fit(loaded, Counting(), ckpt_path=path, weights_only=False)
    group = resumed.optimizers[0].param_groups[0]
    assert (group["lr"], group["weight_decay"]) == pytest.approx((0.0025, 0.35))


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"lr_schedule": RATE_SCHEDULE, "warmup_steps": 3}, r"warmup_steps \(3\) must be 0 with lr_schedule"),
    ({"lr_schedule": partial(RATE_SCHEDULE, decay_steps=9)}, r"lr_schedule \(WSDSchedule\): warmup_steps"),
    ({"lr_schedule": partial(RATE_SCHEDULE, speed=9)}, r"lr_schedule \(WSDSchedule\): .*'speed'"),
    ({"lr_schedule": lambda optimizer: None}, "lr_schedule must be a functools.partial"),
    ({"lr_schedule": {"class_path": "os.system"}}, "lr_schedule must be a functools.partial"),
    ({"lr_schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau needs a metric"),
    ({"weight_decay_schedule": WEIGHT_DECAY_SCHEDULE, "weight_decay": 0.0}, r"WeightDecaySchedule\): .* must be above 0"),
]  # fmt: skip


def test_invalid_schedules_raise_in_the_constructor():
    for options, message in INVALID:
        with pytest.raises(ParallelPlanError, match=message):
            CausalLM(CONFIG, **options)


def test_a_device_mesh_of_another_strategy_is_refused():
    module = CausalLM(CONFIG)
    module._device_mesh = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="CausalLM cannot be sharded over a object"):
        module.configure_model()
