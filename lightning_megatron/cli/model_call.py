"""Calls of functions with a language model that a Trainer has placed under a layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.models.token_module import TokenModule
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy

PRECISIONS = ("32-true", "bf16-true", "16-true", "64-true", "bf16-mixed", "16-mixed")
_DTYPES = {"bf16-true": "bfloat16", "16-true": "float16"}
_AXES = {
    "tp": "tensor parallel size",
    "pp": "pipeline stages",
    "cp": "context parallel size",
    "ep": "expert parallel size",
}


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of the layout, the devices and the precision."""
    add = parser.add_argument
    for name, what in _AXES.items():
        add(f"--{name}", type=at_least_one, default=1, metavar="N", help=what)
    add(
        "--devices",
        type=at_least_one,
        default=1,
        metavar="N",
        help="devices of each node (default: 1)",
    )
    add("--nodes", type=at_least_one, default=1, metavar="N", help="nodes (default: 1)")
    add("--accelerator", default="auto", help="accelerator of the Trainer (default: %(default)s)")
    add(
        "--precision",
        choices=PRECISIONS,
        default="32-true",
        help="precision (default: %(default)s)",
    )


def axis_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the layout's axes by their names."""
    return {name: getattr(options, name) for name in _AXES}


def dtype_of(options: argparse.Namespace) -> str:
    """Return the dtype in which a Hugging Face folder is read."""
    return _DTYPES.get(options.precision, "float32")


def trainer_for(options: argparse.Namespace, *, has_progress: bool = False) -> Trainer:
    """Return a Trainer of the given layout that writes no file.

    Args:
        has_progress: Whether the Trainer shows a progress bar.
    """
    sizes: Any = axis_sizes(options)
    return Trainer(
        strategy=MegatronStrategy(**sizes),
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        precision=options.precision,
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
        # The Trainer calls no hook for a dataset of length 0, so the dataset has no length.
        trainer.test(self, DataLoader(_NoRows()), ckpt_path=checkpoint, verbose=False)
        return self.result
