"""Cuts of batches into microbatches, and checks that a schedule and graphs can run them."""

from __future__ import annotations

import hashlib
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import (
    Microbatch,
    count_samples,
    is_cut,
    split_batch,
)
from lightning_megatron.plan.custom_schedule import CustomOrder
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.plan.microbatches import MicrobatchRule

_REMEDY = "The function must return the same rows on every rank."


class BatchCuts:
    """Cuts of the batches of a run into microbatches, by one rule or by the user."""

    def __init__(self, rule: MicrobatchRule, mesh: ParallelMesh, trainer: Trainer) -> None:
        self._rule = rule
        self._axis = mesh.model_cpu
        self._checked_counts: set[int] = set()
        global_batch = getattr(getattr(trainer, "datamodule", None), "global_batch", None)
        self._grows = isinstance(global_batch, GlobalBatch) and global_batch.ramp_up is not None
        self._last_size: int | None = None
        self._has_said_size = False

    def cut(self, batch: Any) -> list[Microbatch]:
        """Return the microbatches of a batch."""
        return split_batch(batch, None if self._rule.is_whole else self._rule.size_for)

    def cut_to_train(self, batch: Any, *, has_backward: bool) -> list[Microbatch]:
        """Return the microbatches of a training batch, and check that the schedule can run them.

        Communication: for a new number of microbatches of a function's schedule, one gather over
            tp x pp on the CPU.
        """
        microbatches = self.cut(batch)
        if has_backward:
            self._check_order(len(microbatches))
        self._log_size(batch, microbatches)
        return microbatches

    def may_cut(self, batch: Any) -> bool:
        """Return whether the user has cut a batch, or the rule cuts batches of enough samples."""
        return is_cut(batch) or not self._rule.is_whole

    def growth_of(self, batch: Any) -> str | None:
        """Return how much a batch has grown since the last one; None if it has not.

        The batches of data modules grow whose global batch ramps up. All ranks find this in the
        same step, because it depends only on the number of consumed samples. A smaller last batch
        of an epoch does not count.
        """
        if not self._grows or is_cut(batch):
            return None
        size = count_samples(batch)
        last = self._last_size
        self._last_size = size
        if last is None or size <= last:
            return None
        return f"the batch of a data-parallel rank has grown from {last} to {size} samples"

    def _log_size(self, batch: Any, microbatches: list[Microbatch]) -> None:
        """Log the number of microbatches once, if the user has not set their size."""
        if self._has_said_size or not self._rule.is_chosen or is_cut(batch):
            return
        self._has_said_size = True
        count = len(microbatches)
        rank_zero_info(
            f"microbatch_size is {microbatches[0].num_samples}: a batch of "
            f"{sum(part.num_samples for part in microbatches)} samples is cut into {count} "
            f"microbatches, so that each of the {self._rule.num_stages} pipeline stages waits for "
            f"{self._rule.idle_share(count):.0%} of a step."
        )

    def _check_order(self, num_microbatches: int) -> None:
        """Check that the ranks of a model replica run the same legal schedule of a function.

        Its rows are compared, because it may depend on what differs between ranks.

        Communication: for a new number of microbatches, one gather over tp x pp on the CPU.
        """
        order = self._rule.schedule
        if not isinstance(order, CustomOrder) or num_microbatches in self._checked_counts:
            return
        failure: ParallelPlanError | None = None
        try:
            built = repr(order.build(num_microbatches).rows)
            rows = hashlib.sha256(built.encode()).hexdigest()[:16]
        except ParallelPlanError as error:
            failure = error
            rows = str(error)
        name = f"rows of {order.name} for {num_microbatches} microbatches"
        check_same_everywhere(self._axis, {name: rows}, _REMEDY)
        if failure is not None:
            raise failure
        self._checked_counts.add(num_microbatches)
