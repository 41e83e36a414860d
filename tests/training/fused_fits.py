"""Training runs with the fused Adam kernel, compared with the same runs on torch's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.training.loss_scale import DynamicLossScale
from tests.strategy.tiny import TinyLM, loader

FIND = "lightning_megatron.training.fused_update._find_kernel"


class PlainKernel:
    """Compute the update of the fused kernel on any device, with separate torch operators."""

    num_calls = 0

    def __call__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        halves: Sequence[Tensor | None],
        coefficient: Tensor | None,
        numbers: Tensor,
        *,
        has_decay: bool,
        is_decoupled: bool,
    ) -> None:
        type(self).num_calls += 1
        lr, _, _, _, _, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, _ = (
            numbers.unbind()
        )
        log1, log2 = numbers[1].double() + numbers[2], numbers[3].double() + numbers[4]
        rows = zip(parameters, gradients, averages, squares, steps, halves, strict=True)
        for parameter, gradient, average, square, step, half in rows:
            step += 1
            scaled = gradient.float() * (1.0 if coefficient is None else coefficient)
            if has_decay and is_decoupled:
                parameter.sub_(decay * parameter)
            elif has_decay:
                scaled = scaled + decay * parameter
            average.copy_(beta1 * average.float() + one_minus_beta1 * scaled)
            square.copy_(beta2 * square.float() + one_minus_beta2 * scaled.square())
            root = (square.float() / -torch.expm1(step * log2)).sqrt() + eps
            parameter.sub_(lr / -torch.expm1(step * log1) * average.float() / root)
            if half is not None:
                half.copy_(parameter)


def fused_groups(module: nn.Module, make: Any) -> dict[str, Any]:
    """Return a fused optimizer of two groups of different learning rates, and its schedule."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.005}]
    optimizer = make(groups, lr=0.02, weight_decay=0.1, eps=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FusedLM(TinyLM):
    """Train two parameter groups of different learning rates with torch's fused Adam or AdamW."""

    def __init__(self, make: Any = torch.optim.AdamW, scale: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        # Checkpoints store only plain hyperparameters, and a class is not plain.
        self.hparams.pop("make", None)
        self.make, self.scale, self.losses = make, scale, []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) * self.scale

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return fused_groups(self, self.make)


class ClippingModule(FusedLM):
    """Override Lightning's gradient clipping hook."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")
        norms = [
            p.grad.norm()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        assert float(torch.stack(norms).norm()) <= 0.1 + 1e-5, (
            "the gradients that a module sees are clipped"
        )


class StateChangingModule(FusedLM):
    """Change the optimizer's state, gradients or groups before its later steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.global_step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        elif self.global_step == 3:
            optimizer.state[parameters[0]]["exp_avg"] = (
                optimizer.state[parameters[0]]["exp_avg"] * 0.5
            )
        elif self.global_step == 4:
            parameters[1].grad = parameters[1].grad * 3.0
        elif self.global_step == 5:
            parameters[2].grad = None
        elif self.global_step == 6:
            optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = (
                optimizer.param_groups[0]["params"][:-1],
                [*optimizer.param_groups[1]["params"], optimizer.param_groups[0]["params"][-1]],
            )


@dataclass(frozen=True)
class Fit:
    """Describe a training run.

    Args:
        precision: Precision of the Trainer.
        module: Class of the module.
        make: Class or factory of the optimizer.
        scale: Factor of the losses.
        first_scale: First loss scale of ``16-mixed``.
        trainer: Further arguments of the Trainer.
    """

    precision: str = "bf16-mixed"
    module: type[FusedLM] = FusedLM
    make: Any = torch.optim.AdamW
    scale: float = 1.0
    first_scale: float | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


FITS = {
    "clipped by norm": Fit(trainer={"gradient_clip_val": 0.1}),
    "clipped by value": Fit(
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "clipped by the module": Fit(module=ClippingModule),
    "not clipped": Fit(),
    "optimizer changed between steps": Fit(
        module=StateChangingModule, trainer={"gradient_clip_val": 0.1}
    ),
    "Adam in float32": Fit("32-true", make=torch.optim.Adam, trainer={"gradient_clip_val": 0.1}),
    "accumulated": Fit(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "float16 that overflows": Fit(
        "16-mixed", first_scale=2.0**24, trainer={"gradient_clip_val": 0.1}
    ),
}


def run(fit: Fit, accelerator: str = "cpu") -> tuple[FusedLM, Trainer]:
    """Train 8 batches."""
    seed_everything(3, verbose=False)
    arguments: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if fit.first_scale is not None:
        arguments["plugins"] = [MegatronPrecision(fit.precision, DynamicLossScale(fit.first_scale))]
    else:
        arguments["precision"] = fit.precision
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=MegatronStrategy(),
        max_epochs=1,
        enable_checkpointing=False,
        **arguments,
        **fit.trainer,
    )
    module = fit.module(make=fit.make, scale=fit.scale)
    trainer.fit(module, loader())
    return module, trainer


def check_equal(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, accelerator: str, tolerance: float
) -> None:
    """Check that the kernel gives the losses, weights and optimizer states of torch's own steps."""
    fused, trainer = run(fit, accelerator)
    with monkeypatch.context() as patch:
        patch.setattr(FIND, lambda device: (None, "torch steps by itself"))
        plain, plain_trainer = run(fit, accelerator)
    assert len(fused.losses) == 8
    assert fused.losses == pytest.approx(plain.losses, abs=tolerance)
    assert trainer.global_step == plain_trainer.global_step
    assert (
        trainer.precision_plugin.values_to_log() == plain_trainer.precision_plugin.values_to_log()
    )
    weights = plain.state_dict()
    for name, weight in fused.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=tolerance, rtol=0, msg=name)
    states, plain_states = (t.optimizers[0].state_dict()["state"] for t in (trainer, plain_trainer))
    assert states.keys() == plain_states.keys() != set()
    for index, state in states.items():
        for name, value in state.items():
            torch.testing.assert_close(
                value, plain_states[index][name], atol=tolerance, rtol=0, msg=name
            )
