"""Growth of the batches of a run, after which its steps have more microbatches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.pipeline.microbatch import is_cut, samples_in
from lightning_megatron.plan.global_batch import GlobalBatch


class BatchGrowth:
    """Watch over the sizes of batches that a data module lets grow.

    All ranks see a growth in the same step, because the number of samples consumed decides it. The
    smaller last batch of an epoch is none.

    Args:
        trainer: The Trainer, whose data module may have a global batch that grows.
    """

    def __init__(self, trainer: Trainer) -> None:
        data = getattr(trainer, "datamodule", None)
        batch = getattr(data, "global_batch", None)
        self._grows = isinstance(batch, GlobalBatch) and batch.ramp_up is not None
        self._last: int | None = None

    def reason(self, batch: Any) -> str | None:
        """Return how the batch of a step has grown, in words; None if it has not.

        Args:
            batch: Batch of this data-parallel rank.
        """
        if not self._grows or is_cut(batch):
            return None
        size = samples_in(batch)
        last = self._last
        self._last = size
        if last is None or size <= last:
            return None
        return f"the batch of a data-parallel rank has grown from {last} to {size} samples"
