"""Checks of batches, of values that are not finite, and of hooks that may read gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_megatron import BERTPretraining, EncoderConfig
from lightning_megatron.errors import NonFiniteError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.step_checks import (
    FiniteWatch,
    NonFiniteValue,
    describe_values,
)
from lightning_megatron.strategy.checks.batch_checks import check_batch
from lightning_megatron.strategy.optimization.parameter_readers import gradient_reader
from lightning_megatron.strategy.optimization.training_state import checks_of
from lightning_megatron.strategy.private.loops import LRSearch
from tests.fits import Job, trainer_of
from tests.models.flash_stand_in import padded_on_the_right
from tests.refusals import check_refusals


def test_lengths_that_contradict_the_padding_mask_are_refused():
    sizes: dict[str, Any] = {"num_positions": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2}
    module = BERTPretraining(EncoderConfig.bert(vocab_size=20, **sizes))
    module.configure_model()
    valid = padded_on_the_right([8, 3], 8)
    sound = {"valid": valid, "lengths": torch.tensor([8, 3])}
    choices = {name: tensor.unflatten(0, (1, 2)) for name, tensor in sound.items()}
    wrong = sound | {"lengths": torch.tensor([1, 1])}
    # Lengths on a device are not read.
    on_device = {name: tensor.to("meta") for name, tensor in wrong.items()}
    for batch in (sound, {"valid": valid}, choices, on_device):
        check_batch(batch, module)
    check_batch(wrong, torch.nn.Module())  # type: ignore[arg-type]
    cases: list[tuple[dict[str, Any], str]] = [
        (sound | {"lengths": torch.tensor([8, 4])}, "row 1 has the length 4 and 3 valid tokens"),
        (sound | {"lengths": torch.tensor([7, 3])}, "row 0 has the length 7 and 8 valid tokens"),
        (sound | {"valid": valid.flip(1)}, "3 and 3 valid tokens"),
        (sound | {"lengths": torch.tensor([8, 3, 1])}, "shape is (3,)"),
        (choices | {"lengths": torch.tensor([[8, 4]])}, "row 1 has the length 4 and 3 valid"),
    ]
    check_refusals(lambda **batch: check_batch(batch, module), cases)


class Counts(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad(), torch.autograd.profiler.record_function("count"):
            self.count = sum(w.numel() for w in module.parameters() if w.requires_grad)


class Reads(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.value = [weight.grad for weight in module.parameters()]


def largest_value(module: torch.nn.Module) -> float:
    return max(float(w.grad.abs().max()) for w in module.parameters() if w.grad is not None)


class ReadsByFunction(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.value = largest_value(module)


class Before(L.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        self.count = 1


class Norm(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.value = trainer.precision_plugin.last_grad_norm  # type: ignore[attr-defined]


class Denies(Reads):
    reads_gradients = False


def test_first_hook_that_may_read_gradients_is_named():
    for callback, name in (
        (Counts(), None),
        (Norm(), None),
        (Denies(), None),
        (Reads(), "Reads.on_train_batch_end"),
        (ReadsByFunction(), "ReadsByFunction.on_train_batch_end"),
        (Before(), "Before.on_before_optimizer_step"),
    ):
        trainer = trainer_of(Job(), 1, callback)
        trainer.strategy.connect(L.LightningModule())
        assert gradient_reader(trainer) == name


def test_checks_are_off_by_default_with_loss_scales_and_learning_rate_searches():
    plain, search = trainer_of(Job()), trainer_of(Job(), 1, LRSearch(4))
    assert checks_of(None, False, plain) is None
    assert checks_of(None, True, plain) is False
    assert checks_of(None, False, search) is False
    assert checks_of(True, True, search) is True


def test_the_first_value_that_is_not_finite_is_named_before_later_values():
    text = describe_values(
        [
            NonFiniteValue(7, "gradient", 0, "a", "nan"),
            NonFiniteValue(7, "loss", 3, "", "nan"),
            *(NonFiniteValue(9, "weight", 0, f"w{number}", "inf") for number in range(7)),
        ]
    )
    for words in (
        "at training batch 7 the loss of rank 3 (nan) was not, before any other value.",
        "At batch 9 followed the gradient a of rank 0 (nan), the weight w0 of rank 0 (inf)",
        "and 3 more",
        "the batch that rank 3 had read",
    ):
        assert words in text
    values = [NonFiniteValue(7, "loss", rank, "", "nan") for rank in (3, 5)]
    assert "the batch that ranks 3, 5 had read" in describe_values(values)


def test_values_of_many_steps_are_read_in_between_and_a_nan_among_them_raises():
    watch = FiniteWatch(ParallelMesh.single())
    for step in range(3000):
        watch.begin(step, looks=False)
        watch.note("loss", torch.tensor(1.0 if step != 100 else torch.nan))
    assert len(watch._recorded) < 1100
    with pytest.raises(NonFiniteError, match="at training batch 100 the loss of rank 0"):
        watch.check()
    watch.check()
