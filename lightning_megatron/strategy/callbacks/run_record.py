"""What a recipe's run leaves besides its plots: metrics and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.strategy.private.callback_patches import NewestCheckpoint


class RunLogger(CSVLogger):
    """Logger of ``metrics.csv``, and of TensorBoard's events beside it if tensorboard is installed.

    ``tensorboard --logdir runs`` then shows all runs below the folder ``runs``.

    Args:
        save_dir: Folder of all runs.
        name: Name of the runs, which is a folder in ``save_dir``.
        version: Number or name of the run; None takes the next free number.
        options: Further arguments of ``CSVLogger``.
    """

    def __init__(
        self,
        save_dir: str,
        name: str = "lightning_logs",
        version: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, name=name, version=version, **options)

    @cached_property
    def tensorboard(self) -> TensorBoardLogger | None:
        """Logger of the events; None without tensorboard."""
        if not (find_spec("tensorboard") or find_spec("tensorboardX")):
            return None
        return TensorBoardLogger(self.save_dir, name=self.name, version=self.version)

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # type: ignore[override]
        super().log_metrics(dict(metrics), step)
        self._also(lambda events: events.log_metrics(metrics, step))

    @override
    def save(self) -> None:
        super().save()
        self._also(lambda events: events.save())

    @override
    def finalize(self, status: str) -> None:
        super().finalize(status)
        self._also(lambda events: events.finalize(status))

    def _also(self, call: Callable[[TensorBoardLogger], Any]) -> None:
        if self.tensorboard is not None:
            call(self.tensorboard)


class RunCheckpoint(NewestCheckpoint):
    """Save the best checkpoint, and the newest one as ``last.ckpt``.

    The newest one is that of the last validation, and at the end of ``fit`` that of the last step,
    even if the run was too short for a validation. ``last.ckpt`` is a link if the best one is the
    newest. The end of ``fit`` prints its path, and the command that tries it.

    Args:
        monitor: Name of the value that decides which checkpoint is the best; None keeps the newest.
        save_last: Whether to save ``last.ckpt``; ``link`` makes it a link where it can, which
            remote storage has not.
        options: Further arguments of Lightning's ``ModelCheckpoint``.
    """

    def __init__(
        self,
        monitor: str | None = None,
        save_last: bool | Literal["link"] = "link",
        **options: Any,
    ) -> None:
        super().__init__(monitor=monitor, save_last=save_last, **options)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folders = [self.dirpath, trainer.default_root_dir]
        folders += [logger.save_dir for logger in trainer.loggers]
        if self.save_last == "link" and any("://" in os.fspath(one or "") for one in folders):
            self.save_last = True
        super().setup(trainer, pl_module, stage)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        path = self.last_model_path
        if path:
            use = "; --ckpt_path last continues the run"
            if isinstance(pl_module, (CausalLM, HuggingFaceCausalLM)):
                data: Any = trainer.datamodule  # type: ignore[attr-defined]
                chat = "--chat " if hasattr(data, "chat_template") else ""
                use = f'. Try it: lightning-megatron generate {path} {chat}--prompt "..."'
            rank_zero_info(f"Checkpoint: {path}{use}")
