"""Calls of functions with a language model that a Trainer has placed under a layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.models.token_module import TokenModule
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.processes import without_noise

_DTYPES = {"bf16-true": "bfloat16", "16-true": "float16"}


@dataclass(frozen=True)
class LayoutOptions:
    """Layout, devices and precision of a command that computes with a model.

    Args:
        tp: Tensor parallel size.
        pp: Pipeline stages.
        cp: Context parallel size.
        ep: Expert parallel size.
        devices: Devices of each node.
        num_nodes: Nodes.
        accelerator: Accelerator of the Trainer.
        precision: Precision of the Trainer.
    """

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    devices: PositiveInt = 1
    num_nodes: PositiveInt = 1
    accelerator: str = "auto"
    precision: Literal["32-true", "bf16-true", "16-true", "64-true", "bf16-mixed", "16-mixed"] = (
        "32-true"
    )

    @property
    def dtype(self) -> str:
        """Dtype in which a Hugging Face folder is read."""
        return _DTYPES.get(self.precision, "float32")

    def trainer(self, *, has_progress: bool = False) -> Trainer:
        """Return a Trainer of this layout that writes no file."""
        with without_noise():
            return Trainer(
                strategy=MegatronStrategy(tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep),
                accelerator=self.accelerator,
                devices=self.devices,
                num_nodes=self.num_nodes,
                precision=self.precision,
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=has_progress,
            )


class _NoRows(IterableDataset):
    """Dataset of unknown length that yields no row."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ModelCall(LightningModule):
    """Call a function once with the model of another module, under ``Trainer.test``.

    All ranks call the function. It receives the model as a hook of the module would see it:
    replaced, sharded, with the weights of the checkpoint and in the Trainer's precision.

    Args:
        call: Function that receives the model. The attribute ``result`` holds its
            return value on this rank.
    """

    def __init__(self, source: TokenModule, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        # The tuple keeps torch from registering the source as a submodule. Its model becomes a
        # submodule of this module, under the same name.
        self._source = (source,)
        self._call = call
        self.model: nn.Module | None = None
        self.result: Any = None

    def configure_model(self) -> None:
        """Build the model."""
        if self.model is None:
            self.model = self._source[0].provide_model(self.device_mesh)

    def on_test_epoch_start(self) -> None:
        """Call the function."""
        assert self.model is not None, "configure_model builds the model before its first use"
        with self.trainer.precision_plugin.test_step_context():
            self.result = self._call(self.model)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: Lightning requires this method, but the dataset yields no batch."""

    def run(self, trainer: Trainer, checkpoint: str | None) -> Any:
        """Run the function under a Trainer, and return its return value on this rank.

        Args:
            checkpoint: Checkpoint with the weights; None if the source reads them itself.
        """
        with warnings.catch_warnings():
            # Callbacks of the training, and workers that load rows, have nothing to do here.
            for noise in ("Be aware that when using `ckpt_path`", ".*does not have many workers"):
                warnings.filterwarnings("ignore", noise, UserWarning)
            # The Trainer calls no hook for a dataset of length 0, so the dataset has no length.
            trainer.test(self, DataLoader(_NoRows()), ckpt_path=checkpoint, verbose=False)
        return self.result
