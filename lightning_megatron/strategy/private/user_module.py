"""Private names of a LightningModule, and the test for overridden hooks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden

__all__ = [
    "attached_trainer",
    "is_overridden",
    "publish_device_mesh",
]


def publish_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set ``self.device_mesh`` of a LightningModule to ``mesh``."""
    module._device_mesh = mesh


def attached_trainer(module: LightningModule) -> Trainer | None:
    """Return the Trainer of a LightningModule; None outside of a run, where ``trainer`` raises."""
    return module._trainer
