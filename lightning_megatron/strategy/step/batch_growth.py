"""Detection of growing batches, after which steps have more microbatches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.pipeline.microbatch import count_samples, is_cut
from lightning_megatron.plan.global_batch import GlobalBatch


class BatchGrowth:
    """Detection of growth for data modules whose global batch ramps up.

    All ranks detect growth in the same step, because it depends only on the number of consumed
    samples. A smaller last batch of an epoch does not count as growth.

    Args:
        trainer: The Trainer, whose data module may have a global batch that ramps up.
    """

    def __init__(self, trainer: Trainer) -> None:
        data = getattr(trainer, "datamodule", None)
        batch = getattr(data, "global_batch", None)
        self._grows = isinstance(batch, GlobalBatch) and batch.ramp_up is not None
        self._last: int | None = None

    def reason(self, batch: Any) -> str | None:
        """Return a description of the growth of a batch since the last one; None without growth.

        Args:
            batch: Batch of this data-parallel rank.
        """
        if not self._grows or is_cut(batch):
            return None
        size = count_samples(batch)
        last = self._last
        self._last = size
        if last is None or size <= last:
            return None
        return f"the batch of a data-parallel rank has grown from {last} to {size} samples"
