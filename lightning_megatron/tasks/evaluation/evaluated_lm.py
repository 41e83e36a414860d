"""LightningModule that evaluates the model of another LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.building_blocks import TokenModule, token_losses, token_scores
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.shapes import Int
from lightning_megatron.tasks.evaluation.datamodules import EvaluationData
from lightning_megatron.tasks.evaluation.metrics import ClozeAccuracy


class EvaluatedLM(LightningModule):
    """Evaluate a language model on an :class:`EvaluationData` with ``Trainer.test``.

    The module runs under MegatronStrategy in any layout, under ``ddp`` and on one device. It loads
    checkpoints of ``source``. The results equal the results of a single process.

    Args:
        source: ``CausalLM`` or ``HuggingFaceCausalLM`` whose model is evaluated.
    """

    def __init__(self, source: TokenModule) -> None:
        super().__init__()
        # The tuple keeps torch from registering the source as a submodule. Its model becomes a
        # submodule of this module, under the same name.
        self._source = (source,)
        self.model: nn.Module | None = None
        self._metrics_of_task = nn.ModuleDict()

    def configure_model(self) -> None:
        """Build the model. Lightning calls this for each test."""
        if self.model is None:
            self.model = self._source[0].provide_model(self.device_mesh)

    @override
    def setup(self, stage: str) -> None:
        """Create the metrics of the task from the data module, whose ``setup`` must have run."""
        data = self._data
        model_size = self._source[0].vocab_size
        if data.vocab_size > model_size:
            raise ParallelPlanError(
                f"the tokenizer must have at most as many tokens as the model ({model_size}): it "
                f"has {data.vocab_size}, and the model has no embedding for the others. Use the "
                "tokenizer of the model."
            )
        self._metrics_of_task = nn.ModuleDict(data.metrics())

    def test_step(self, batch: Mapping[str, Int[Tensor, "batch seq"]], batch_idx: int) -> None:
        """Update and log the metrics of the task."""
        assert self.model is not None, "configure_model builds the model before its first use"
        labels = batch["labels"]
        if self._data.needs_hits:
            losses, hits = token_scores(self.model, batch["tokens"], labels)
        else:
            losses = token_losses(self.model, batch["tokens"], labels)
            hits = torch.empty(0)
        for name, metric in self._metrics_of_task.items():
            assert isinstance(metric, Metric), "the data module returns metrics"
            metric.update(hits if isinstance(metric, ClozeAccuracy) else losses, labels)
            self.log(name, metric, on_step=False, on_epoch=True)

    @property
    def _data(self) -> EvaluationData:
        data: Any = getattr(self.trainer, "datamodule", None)
        assert isinstance(data, EvaluationData), "Trainer.test gets a data module of this package"
        return data
