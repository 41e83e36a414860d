"""Fits whose updates run in one kernel, eagerly or by a graph, and all that the updates leave."""

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
    """Train under schedules of the learning rate and, if asked, of the weight decay from 0 on."""

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
        return [optimizer], [{"scheduler": one, "interval": "step"} for one in schedulers]


@dataclass
class Updates:
    """Everything that the updates of a fit leave behind.

    Args:
        norms: Gradient norm after each batch.
        copies: Copies of the norms, made at once.
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
    """Note what updates leave behind, and change the settings of the groups before each step.

    Args:
        updates: Where it is noted.
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
    """Train six steps with the update in one kernel, on a CPU the plain one."""
    updates = Updates()
    with nullcontext() if options.get("accelerator") == "gpu" else fused():
        module = options.pop("module", None) or UpdatedLM()
        callbacks = (Notes(updates, cycles), *options.pop("callbacks", ()))
        arguments = {"precision": "32-true", "max_steps": 6, "gradient_clip_val": 0.1, **options}
        found = fit(graphs, devices, module=module, callbacks=callbacks, **arguments)
    return found, updates


@contextmanager
def fused() -> Iterator[None]:
    """Let the plain kernel serve the CPU inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainKernel, "num_calls", 0)
        patch.setattr(FIND, lambda device: (PlainKernel, ""))
        yield


def differences(one: tuple[Fit, Updates], other: tuple[Fit, Updates]) -> list[str]:
    """Return what two fits have not in common bit for bit."""
    found = one[0].differences_from(other[0])
    ours, theirs = one[1], other[1]
    found += ["norms"] if not _same(ours.copies, theirs.copies) else []
    found += ["kept norms"] if not _same(ours.norms, ours.copies) else []
    found += ["groups"] if ours.groups != theirs.groups else []
    if len(ours.states) != len(theirs.states):
        return [*found, "number of states"]
    for number, (state, expected) in enumerate(zip(ours.states, theirs.states, strict=True)):
        assert state.keys() == expected.keys()
        found += [f"{name} {number}" for name in state if not state[name].equal(expected[name])]
    return found


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))
