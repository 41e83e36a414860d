"""Fits of a small GPT, eager or with graphs of full steps, and all that they show to the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTConfig, MegatronStrategy
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.step_graph import StepAgreement, StepGraph, StepGraphs
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.training.gradient_bucket import GradientBucket
from tests.strategy.graph_fits import strategy_of
from tests.strategy.tiny import VOCABULARY, TinyLM, Words

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_seq_length": 16,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_multiple": 16,
}
EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss=0.01, expert_bias=True, scoring="sigmoid"
)
CONFIGS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig.gpt2(**SIZES, hidden_dropout=0.2, attention_dropout=0.3),
    "llama": GPTConfig.llama(**SIZES, ffn_hidden_size=24),
    "experts": GPTConfig.llama(**SIZES, ffn_hidden_size=24, experts=EXPERTS),
}


class LM(TinyLM):
    """The small GPT of the strategy's tests, with any configuration."""

    def __init__(self, kind: str, num_layers: int = 2) -> None:
        super().__init__()
        self.config = replace(CONFIGS[kind], num_layers=num_layers)


@dataclass
class Shown(Callback):
    """All that a fit shows to the user, step by step."""

    backend: Callable[[ParallelMesh], CaptureBackend]
    settings: CudaGraphs | None = None
    agreement: StepAgreement | None = None
    graphs: StepGraphs | None = None
    said: list[str] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    logged: list[dict[str, Tensor]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)
    num_replays: int = 0
    num_graphs: int = 0
    num_sums: int = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.settings is None:
            return
        strategy: Any = trainer.strategy
        self.graphs = strategy.run.steps.capture_whole(
            self.backend(strategy.run.mesh), self.settings, self.agreement, self.said.append
        )

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        # At the next replay, a graph overwrites the outputs that live in its memory.
        self.outputs += [outputs["loss"], outputs["batch_loss"]]
        self.copies += [outputs["loss"].clone(), outputs["batch_loss"].clone()]
        self.logged.append(dict(trainer.callback_metrics))
        statistics = strategy_of(trainer).expert_statistics or {}
        self.routed += [statistic.sums for statistic in statistics.values()]

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        # Stages compare their log calls in eager steps only.
        counts = strategy.run.mesh.journal.counts
        self.counts = {axis: number for axis, number in counts.items() if axis != "pp_cpu"}
        self.num_graphs = 0 if self.graphs is None else self.graphs.num_graphs
        tensors = (*module.parameters(), *module.buffers())
        self.weights = [tensor.detach().clone() for tensor in tensors]
        self.logged.append(dict(trainer.callback_metrics))
        if self.graphs is not None:
            self.graphs.release()


def fit(
    module: LightningModule,
    settings: CudaGraphs | None,
    *,
    num_samples: int = 28,
    data: tuple[int, int] = (0, 1),
    agreement: StepAgreement | None = None,
    devices: int = 1,
    strategy: MegatronStrategy | None = None,
    batch_size: int = 4,
    backend: Callable[[ParallelMesh], CaptureBackend] = lambda mesh: TapeBackend(mesh.launcher),
    **options: Any,
) -> Shown:
    """Fit for one epoch, with graphs of full steps if there are settings.

    Args:
        module: Module.
        settings: Settings of the graphs; None runs all steps eagerly.
        num_samples: Samples of all data-parallel ranks.
        data: Data-parallel rank and number of data-parallel ranks.
        agreement: Agreement of the ranks.
        devices: Number of processes.
        strategy: Strategy.
        batch_size: Samples in a batch of one rank.
        backend: Maker of the backend that captures.
        options: Further options of the Trainer.
    """
    seed_everything(3, verbose=False)
    words = Words(num_samples)
    words.tokens = words.tokens[data[0] :: data[1]]
    shown = Shown(backend, settings, agreement)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "accelerator": "cpu",
        "precision": "64-true",
    }
    trainer = Trainer(
        devices=devices,
        strategy=strategy or MegatronStrategy(microbatch_size=2),
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[shown],
        **{**quiet, **options},
    )
    with pytest.MonkeyPatch.context() as patch:
        replay = StepGraph.replay

        def count_replay(*args: Any) -> Any:
            shown.num_replays += 1
            return replay(*args)

        patch.setattr(StepGraph, "replay", count_replay)
        start = GradientBucket.start

        def count_sum(*args: Any) -> None:
            shown.num_sums += 1
            start(*args)

        patch.setattr(GradientBucket, "start", count_sum)
        trainer.fit(module, DataLoader(words, batch_size=batch_size), validation_data(data))
    return shown


def validation_data(data: tuple[int, int]) -> DataLoader:
    """Return samples for validation."""
    words = Words(12, seed=5)
    words.tokens = words.tokens[data[0] :: data[1]]
    return DataLoader(words, batch_size=4 if data[1] == 1 else 2)


def assert_equal(graphs: Shown, eager: Shown, label: str = "") -> None:
    """Assert that a fit with graphs equals an eager fit bit by bit, and overwrites no output."""
    for name in ("copies", "weights", "routed"):
        pairs = zip(getattr(graphs, name), getattr(eager, name), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), f"{label}: {name}"
    outputs = zip(graphs.outputs, graphs.copies, strict=True)
    assert all(torch.equal(*pair) for pair in outputs), f"{label}: an output was overwritten"
    for step, (actual, expected) in enumerate(zip(graphs.logged, eager.logged, strict=True)):
        assert actual.keys() == expected.keys(), f"{label}: step {step}"
        wrong = [name for name in actual if not torch.equal(actual[name], expected[name])]
        assert not wrong, f"{label}: step {step} logged other values of {wrong}"
    assert graphs.counts == eager.counts, f"{label}: collectives are counted"
