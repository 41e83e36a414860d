"""Jobs whose updates run in one kernel, eagerly or by a graph, and the results of the updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs, GPTConfig
from tests.fits import Job, Language, Report
from tests.graphs.jobs import SMALL, run_graphs
from tests.graphs.jobs import differences as differences_of_reports
from tests.training.fused_fits import FIND, PlainKernel, fused_groups


class FusedLanguage(Language):
    """Train two groups of parameters by torch's fused AdamW, or another optimizer."""

    def __init__(self, config: GPTConfig = SMALL, make: Any = torch.optim.AdamW) -> None:
        super().__init__(config)
        self.make = make

    def configure_optimizers(self) -> Any:
        return fused_groups(self, self.make)


class Notes(pl.Callback):
    """Record norms, calls of the kernel and states of the optimizer, and change the settings of the
    groups before each step.

    Args:
        cycles: Whether settings change.
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
        assert [float(norm) for norm in self.norms] == self.outcomes["norms"]
        saved = trainer.optimizers[0].state_dict()
        self.outcomes["groups"] = saved["param_groups"]
        self.outcomes["states"] = [
            {name: value.tolist() for name, value in state.items()}
            for state in saved["state"].values()
        ]


def run_updates(
    graphs: CudaGraphs | None,
    size: int = 1,
    *,
    cycles: bool = False,
    callbacks: tuple[pl.Callback, ...] = (),
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Train six steps with the update in one kernel; on a CPU this is the plain kernel."""
    options = {"model": FusedLanguage, "precision": "32-true", "steps": 6, **options}
    job = Job(
        **options,
        trainer={"gradient_clip_val": 0.1, **(trainer or {})},
        callbacks=lambda: [Notes(cycles), *callbacks],
        norms=False,
    )
    with fused():
        return run_graphs(job, graphs, size)


@contextmanager
def fused() -> Iterator[None]:
    """Let the plain kernel update parameters on the CPU inside the block."""
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainKernel, "num_calls", 0)
        patch.setattr(FIND, lambda device: (PlainKernel, ""))
        yield


def differences(actual: Report, expected: Report) -> list[str]:
    """Return the names of results of two jobs that are not the same bit for bit."""
    return differences_of_reports(actual, expected) + [
        name
        for name in ("norms", "groups", "states")
        if actual.outcomes[name] != expected.outcomes[name]
    ]
