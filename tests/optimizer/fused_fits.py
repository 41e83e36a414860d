"""Fits whose updates run in one kernel, compared with the same fits on torch's own steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import GPTConfig
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.fits import GPT2, Job, Language, Report, Tokens, joined, run_job

FIND = "lightning_megatron.optimizer.fused_update._find_kernel"
SMALL = replace(GPT2, num_layers=2)


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
        lr, _, _, _, _, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, _ = numbers
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


@contextmanager
def fused(kernel: Any = PlainKernel) -> Iterator[None]:
    """Let the plain kernel, or no kernel with None, update parameters inside the block; GPUs have
    one of their own.
    """
    if torch.cuda.is_available() and kernel is not None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainKernel, "num_calls", 0)
        patch.setattr(FIND, lambda device: (kernel, "torch steps by itself"))
        yield


def fused_groups(module: nn.Module, make: Any) -> dict[str, Any]:
    """Return a fused optimizer of two groups of different learning rates, and its schedule."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.005}]
    optimizer = make(groups, lr=0.02, weight_decay=0.1, eps=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FusedLanguage(Language):
    """Train two groups of parameters by torch's fused AdamW, or another optimizer."""

    def __init__(self, config: GPTConfig = SMALL, make: Any = torch.optim.AdamW) -> None:
        super().__init__(config)
        self.make = make

    def configure_optimizers(self) -> Any:
        return fused_groups(self, self.make)


class Clipping(FusedLanguage):
    """Override Lightning's gradient clipping hook."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [p.grad.norm() for p in parameters if p.grad is not None]
        assert torch.stack(norms).norm() <= 0.1 + 1e-5, "a module sees clipped gradients"


class StateChanging(FusedLanguage):
    """Change the optimizer's state, gradients or groups before its later steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        parameters = [*first["params"], *second["params"]]
        if self.global_step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        elif self.global_step == 3:
            state = optimizer.state[parameters[0]]
            state["exp_avg"] = state["exp_avg"] * 0.5
        elif self.global_step == 4:
            parameters[1].grad = parameters[1].grad * 3.0
        elif self.global_step == 5:
            parameters[2].grad = None
        elif self.global_step == 6:
            second["params"] = [*second["params"], first["params"][-1]]
            first["params"] = first["params"][:-1]


class Overflowing(FusedLanguage):
    """Start with a loss scale at which gradients overflow."""

    def on_fit_start(self) -> None:
        plugin: Any = self.trainer.precision_plugin
        plugin.loss_scale, plugin.skipped_steps = DynamicLossScale(2.0**20, hysteresis=1), 0


class Updates(pl.Callback):
    """Record norms, calls of the kernel and states of the optimizer, and change the settings of the
    groups before each step if they cycle.
    """

    def __init__(self, cycles: bool = False) -> None:
        self.cycles = cycles
        self.norms: list[Tensor] = []
        self.outcomes: dict[str, Any] = {"norms": [], "calls": [], "groups": [], "states": []}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        for group in trainer.optimizers[0].param_groups if self.cycles else ():
            group["betas"] = (0.9 - 0.05 * step, 0.99 - 0.01 * step)
            group["eps"] = 1e-3 / (1 + step)
            group["weight_decay"] *= 1.5

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        norm = trainer.precision_plugin.last_grad_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.norms.append(norm)
            self.outcomes["norms"].append(float(norm))
        self.outcomes["calls"].append(PlainKernel.num_calls)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        # A replay must not overwrite a norm that the user keeps.
        kept = torch.tensor([float(norm) for norm in self.norms])
        torch.testing.assert_close(kept.tolist(), self.outcomes["norms"], equal_nan=True)
        saved = trainer.optimizers[0].state_dict()
        self.outcomes["groups"] = saved["param_groups"]
        self.outcomes["states"] = [
            {name: value.tolist() for name, value in state.items()}
            for state in saved["state"].values()
        ]
        plugin: Any = trainer.precision_plugin
        self.outcomes["steps"] = trainer.global_step, plugin.values_to_log()


def fused_job(model: Any = FusedLanguage, precision: Any = "bf16-mixed", **trainer: Any) -> Job:
    """Return a job of eight batches."""
    trainer = {"max_epochs": 1, "gradient_clip_val": None, **trainer}
    job = Job(model, {}, precision, -1, trainer, partial(Tokens, 64), norms=False)
    return replace(job, callbacks=lambda: [Updates()])


FITS = {
    "clipped by value": fused_job(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "clipped by the module": fused_job(Clipping),
    "not clipped": fused_job(),
    "optimizer changed between steps": fused_job(StateChanging, gradient_clip_val=0.1),
    "Adam in float32": fused_job(
        lambda: FusedLanguage(make=torch.optim.Adam), "32-true", gradient_clip_val=0.1
    ),
    "accumulated": fused_job(accumulate_grad_batches=2, gradient_clip_val=0.1),
    "sums in bfloat16": replace(
        fused_job(gradient_clip_val=0.1), strategy={"optimizer.gradient_dtype": "bfloat16"}
    ),
    # By name, Lightning would replace this precision on a CPU.
    "float16 that overflows": fused_job(
        Overflowing, None, gradient_clip_val=0.1, plugins=[MegatronPrecision("16-mixed")]
    ),
}


def check_equal(job: Job, accelerator: str, tolerance: float) -> Report:
    """Check that the kernel gives the losses, weights and optimizer states of torch's own steps."""
    job = replace(job, trainer={**job.trainer, "accelerator": accelerator})
    with fused():
        actual = run_job(job)
    with fused(None):
        expected = run_job(job)
    close = partial(torch.testing.assert_close, atol=tolerance, rtol=0)
    assert len(actual.losses) == 8
    close(actual.losses, expected.losses)
    assert actual.outcomes["steps"] == expected.outcomes["steps"]
    close(joined([actual]), joined([expected]))
    assert actual.outcomes["states"]
    close(actual.outcomes["states"], expected.outcomes["states"])
    return actual
