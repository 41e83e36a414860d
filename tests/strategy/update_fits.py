"""Fits whose updates run in one kernel, eagerly or by a graph, and the results of the updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megatron import CudaGraphs, WeightDecaySchedule, WSDSchedule
from tests.strategy.graph_fits import Fit, fit
from tests.training.fused_fits import FIND, FusedLM, PlainKernel

#: Updates are captured in the third step.
SEGMENTS = CudaGraphs("segments", warmup_steps=2, optimizer=True)
FULL = CudaGraphs("full", warmup_steps=2, optimizer=True)


class UpdatedLM(FusedLM):
    """Train two groups under a schedule, with hooks that only count."""

    reads_gradients = False


class ScheduledLM(UpdatedLM):
    """Train under a schedule of the learning rate and, with ``decays``, one of the weight decay."""

    def __init__(self, decays: bool = True) -> None:
        super().__init__()
        self.decays = decays

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr")
        schedulers: list[Any] = [WSDSchedule(optimizer, 8, 4, warmup_steps=2, min_ratio=0.1)]
        if self.decays:
            schedulers.append(WeightDecaySchedule(optimizer, 0.0, 1.0, 6))
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step"} for scheduler in schedulers
        ]


@dataclass
class Updates:
    """Results of the updates of a fit.

    Args:
        norms: Gradient norm after each batch.
        copies: Copies of the norms, made right after each batch.
        num_calls: Calls of the kernel after each batch.
        states: State of each parameter in the optimizer.
        groups: Groups of the optimizer.
    """

    norms: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)


class Notes(Callback):
    """Record the results of updates, and change the settings of the groups before each step.

    Args:
        updates: Record of the results.
        cycles: Whether settings change.
    """

    def __init__(self, updates: Updates, cycles: bool) -> None:
        self.updates = updates
        self.cycles = cycles

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        for group in trainer.optimizers[0].param_groups if self.cycles else ():
            group["betas"] = (0.9 - 0.05 * step, 0.99 - 0.01 * step)
            group["eps"] = 1e-3 / (1 + step)
            group["weight_decay"] *= 1.5

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        norm = trainer.precision_plugin.last_grad_norm
        if norm is not None:
            # A replay would overwrite a norm of its graph.
            self.updates.norms.append(norm)
            self.updates.copies.append(norm.clone())
        self.updates.num_calls.append(PlainKernel.num_calls)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        saved = trainer.optimizers[0].state_dict()
        self.updates.groups = saved["param_groups"]
        self.updates.states = [
            {name: value.clone() for name, value in state.items()}
            for state in saved["state"].values()
        ]


def run(
    graphs: CudaGraphs | None, devices: int = 1, *, cycles: bool = False, **options: Any
) -> tuple[Fit, Updates]:
    """Train six steps with the update in one kernel; on a CPU this is the plain kernel."""
    updates = Updates()
    with nullcontext() if options.get("accelerator") == "gpu" else fused():
        module = options.pop("module", None) or UpdatedLM()
        callbacks = (Notes(updates, cycles), *options.pop("callbacks", ()))
        arguments = {"precision": "32-true", "max_steps": 6, "gradient_clip_val": 0.1, **options}
        result = fit(graphs, devices, module=module, callbacks=callbacks, **arguments)
    return result, updates


@contextmanager
def fused() -> Iterator[None]:
    """Let the plain kernel update parameters on the CPU inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainKernel, "num_calls", 0)
        patch.setattr(FIND, lambda device: (PlainKernel, ""))
        yield


def differences(actual: tuple[Fit, Updates], expected: tuple[Fit, Updates]) -> list[str]:
    """Return the names of results of two fits that are not the same bit for bit."""
    names = actual[0].differences_from(expected[0])
    actual_updates, expected_updates = actual[1], expected[1]
    names += ["norms"] if not _same(actual_updates.copies, expected_updates.copies) else []
    names += ["kept norms"] if not _same(actual_updates.norms, actual_updates.copies) else []
    names += ["groups"] if actual_updates.groups != expected_updates.groups else []
    if len(actual_updates.states) != len(expected_updates.states):
        return [*names, "number of states"]
    for number, (state, expected_state) in enumerate(
        zip(actual_updates.states, expected_updates.states, strict=True)
    ):
        assert state.keys() == expected_state.keys()
        names += [
            f"{name} {number}" for name in state if not state[name].equal(expected_state[name])
        ]
    return names


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))
