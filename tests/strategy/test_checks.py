"""Checks of batches, of values that are not finite, and of hooks that may read gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_megatron import BERTPretraining, EncoderConfig, NonFiniteError
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.checks.batch_checks import check_batch
from lightning_megatron.strategy.optimization.finite_watch import (
    FiniteWatch,
    NonFiniteValue,
    checks_of,
    describe,
)
from lightning_megatron.strategy.optimization.parameter_readers import gradient_reader
from lightning_megatron.strategy.private.loops import LRSearch
from tests.models.flash_stand_in import padded_on_the_right


def make_module() -> BERTPretraining:
    sizes: dict[str, Any] = {
        "vocab_size": 20, "num_positions": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 2,
    }  # fmt: skip
    module = BERTPretraining(EncoderConfig.bert(**sizes))
    module.configure_model()
    return module


def make_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {"valid": padded_on_the_right([8, 3], 8), "lengths": torch.tensor(lengths)}


def test_lengths_that_match_the_padding_mask_are_accepted() -> None:
    module = make_module()
    check_batch(make_batch([8, 3]), module)
    check_batch({"valid": make_batch([8, 3])["valid"]}, module)
    choices = {name: tensor.unflatten(0, (1, 2)) for name, tensor in make_batch([8, 3]).items()}
    check_batch(choices, module)
    with pytest.raises(ParallelPlanError, match="row 1 has the length 4 and 3 valid tokens"):
        check_batch(choices | {"lengths": torch.tensor([[8, 4]])}, module)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([8, 4])}, "row 1 has the length 4 and 3 valid tokens"),
        ({"lengths": torch.tensor([7, 3])}, "row 0 has the length 7 and 8 valid tokens"),
        ({"valid": padded_on_the_right([8, 3], 8).flip(1)}, "row 1 .* 3 and 3 valid tokens"),
        ({"lengths": torch.tensor([8, 3, 1])}, r"of valid \(2, 8\), .* shape is \(3,\)"),
    ],
)
def test_lengths_that_contradict_the_padding_mask_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        check_batch(make_batch([8, 3]) | changes, make_module())


def test_lengths_on_a_device_are_not_read() -> None:
    on_device = {name: tensor.to("meta") for name, tensor in make_batch([1, 1]).items()}
    check_batch(on_device, make_module())
    check_batch(make_batch([1, 1]), torch.nn.Module())  # type: ignore[arg-type]


class Counts(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad(), torch.autograd.profiler.record_function("count"):
            self.count = sum(
                weight.numel() for weight in module.parameters() if weight.requires_grad
            )


class Reads(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.value = [weight.grad for weight in module.parameters()]


def largest_value(module: torch.nn.Module) -> float:
    return max(
        float(weight.grad.abs().max()) for weight in module.parameters() if weight.grad is not None
    )


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


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (Counts, None),
        (Norm, None),
        (Denies, None),
        (Reads, "Reads.on_train_batch_end"),
        (ReadsByFunction, "ReadsByFunction.on_train_batch_end"),
        (Before, "Before.on_before_optimizer_step"),
    ],
)
def test_first_hook_that_may_read_gradients_is_named(
    callback: type[L.Callback], name: str | None
) -> None:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback()]
    )
    trainer.strategy.connect(L.LightningModule())
    assert gradient_reader(trainer) == name


def test_checks_are_off_by_default_with_loss_scales_and_learning_rate_searches() -> None:
    plain, search = L.Trainer(logger=False), L.Trainer(logger=False, callbacks=[LRSearch(4)])
    assert checks_of(None, False, plain) is None
    assert checks_of(None, True, plain) is False
    assert checks_of(None, False, search) is False
    assert checks_of(True, True, search) is True


def test_the_first_value_that_is_not_finite_is_named_before_later_values() -> None:
    text = describe(
        [
            NonFiniteValue(7, "gradient", 0, "a", "nan"),
            NonFiniteValue(7, "loss", 3, "", "nan"),
            *(NonFiniteValue(9, "weight", 0, f"w{number}", "inf") for number in range(7)),
        ]
    )
    assert "at training batch 7 the loss of rank 3 (nan) was not, before any other value." in text
    assert (
        "At batch 9 so were the gradient a of rank 0 (nan), the weight w0 of rank 0 (inf)" in text
    )
    assert "and 3 more" in text
    assert "the batch that rank 3 had read" in text


def test_many_steps_are_summed_and_a_nan_among_them_raises() -> None:
    watch = FiniteWatch(ParallelMesh.single())
    for step in range(3000):
        watch.begin(step, looks=False)
        watch.note("loss", torch.tensor(1.0 if step != 100 else torch.nan))
    assert len(watch._recorded) < 1100
    with pytest.raises(NonFiniteError, match="at training batch 0 the loss of rank 0"):
        watch.check()
    watch.check()
