"""Jobs by CUDA graphs: what they show beyond a report, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_megatron import CudaGraphs, GPTConfig, MegatronStrategy
from tests import fits
from tests.fits import LLAMA, SIZES, Job, Report, Tokens
from tests.graphs.trained import counted_replays
from tests.optimizer.fused_fits import FusedLanguage, Updates, fused

#: Graphs are captured in the second step.
SEGMENTS = CudaGraphs("segments", warmup_steps=1, on_failure="error")
FULL = CudaGraphs("full", warmup_steps=1, on_failure="error")
MODES = (SEGMENTS, FULL)

DROPOUT = GPTConfig.gpt2(**{**SIZES, "num_layers": 2}, hidden_dropout=0.1, attention_dropout=0.2)
#: A mixture whose routers change between steps.
_EXPERTS: Any = {
    "num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.01, "expert_bias": True, "scoring": "sigmoid",
}  # fmt: skip
ROUTED = replace(LLAMA, num_layers=2, experts=_EXPERTS)
#: Every step has another batch.
VARIED = partial(Tokens, 96, 96)
VALIDATED: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1}


class Watch(pl.Callback):
    """Record validation losses, rows of experts, and numbers of collectives."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"validated": [], "routed": [], "counts": {}}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        strategy_of(trainer).run.layers.count_rows()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        statistics = strategy_of(trainer).expert_statistics or {}
        self.outcomes["routed"].append(
            {
                layer: [x.tolist() for x in (figures.load, figures.rows) if x is not None]
                for layer, figures in statistics.items()
            }
        )

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            loss = trainer.callback_metrics["val_loss"]
            self.outcomes["validated"].append(float(loss))

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        # Ranks compare log calls on the host in eager steps only.
        counts = strategy_of(trainer).mesh.journal.counts
        self.outcomes["counts"] = {
            axis: number for axis, number in counts.items() if not axis.endswith("_cpu")
        }


def strategy_of(trainer: pl.Trainer) -> MegatronStrategy:
    """Return the trainer's strategy."""
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def run_graphs(job: Job, graphs: CudaGraphs | None = None, size: int = 1) -> Report:
    """Train a job by graphs, or eagerly; ``outcomes`` have what :class:`Watch` records, numbers of
    graphs, and the replays of forward graphs of segments.
    """
    assert not isinstance(job.strategy, str)
    captured = replace(
        job,
        strategy={**(job.strategy or {}), "cuda_graphs": graphs},
        callbacks=lambda: [Watch(), *job.callbacks()],
        norms=job.norms and not (graphs and graphs.optimizer),
    )
    with counted_replays() as replays:
        report = fits.run_job(captured, size)
    report.outcomes |= {"graphs": report.graphs, "replays": dict(replays)}
    return report


def run_updates(
    graphs: CudaGraphs | None,
    size: int = 1,
    *,
    cycles: bool = False,
    callbacks: Sequence[pl.Callback] = (),
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Train six steps with the update in one kernel; on a CPU this is the plain kernel."""
    job = Job(
        **{"model": FusedLanguage, "precision": "32-true", "steps": 6, **options},
        trainer={"gradient_clip_val": 0.1, **(trainer or {})},
        callbacks=lambda: [Updates(cycles), *callbacks],
        norms=False,
    )
    with fused():
        return run_graphs(job, graphs, size)


#: Outcomes that tell how a job was run, and not its results.
MEANS = {
    "addresses",
    "graphs",
    "replays",
    "calls",
    "exchanges",
    "failures",
    "factor",
    "warnings",
    "kinds",
}


def differences(actual: Report, expected: Report) -> list[str]:
    """Return the names of results of two jobs on this rank that are not the same bit for bit."""
    outcomes = expected.outcomes.keys() - MEANS
    return fits.differences(actual, expected) + [
        name for name in sorted(outcomes) if actual.outcomes[name] != expected.outcomes[name]
    ]


def check_same(actual: Report, expected: Report, case: str = "") -> None:
    """Assert that a job by graphs captured something and has the bits of an eager job."""
    assert differences(actual, expected) == [], case
    assert not any(expected.outcomes["graphs"]), case
    assert actual.outcomes["graphs"][0] == 0, case
    assert actual.outcomes["graphs"][-1] > 0, (case, actual.outcomes["graphs"])
    assert len(set(expected.losses)) == len(expected.losses) > 2, case
