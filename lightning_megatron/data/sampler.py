"""Batch sampler for one data-parallel rank, which resumes at any sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lightning_megatron.data.balance import RowBalance
from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp

REQUIRED = ("epoch", "consumed", "num_samples", "global_batch_size")
OPTIONAL = ("batches", "steps")
#: Number of global batches whose work is reported (batches).
_NUM_REPORTED = 32


class TokenBatchSampler:
    """Batches of sample numbers for one data-parallel rank, up to the end of an epoch.

    A global batch consists of the next batch_size * dp_size samples in the order of the epoch. Rank
    r takes the r-th contiguous share of them, or its share by ``balance``. Positions are counted in
    samples, so that training can resume with another dp_size or batch_size.

    The state counts the batches that the Trainer has finished, and not the batches that were
    yielded, because workers prefetch batches.

    Args:
        num_samples: Number of samples in an epoch.
        drop_last: Whether to skip a last global batch that is not full. Otherwise its samples are
            divided evenly, and ranks with one sample less get the number -1 (a row without labels),
            so that all ranks have the same shapes.
        seed: Seed that shuffles each epoch after the first, which keeps the order of the samples;
            None never shuffles.
        stream: Whether one epoch of the samples spans several epochs of the Trainer. Each epoch of
            the Trainer then continues where the previous one stopped.
        finished: Function that returns the number of batches that the Trainer has finished in all
            epochs.
        balance: Assignment of the samples of each global batch to ranks by their work; needs
            ``drop_last``. None gives rank r the r-th contiguous share.
        ramp_up: Growth of the first global batches to batch_size * dp_size samples; needs
            ``drop_last``. It counts the samples of all epochs.

    Raises:
        ParallelPlanError: If a size or rank is out of range, or an epoch has no full global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        drop_last: bool = True,
        seed: int | None = None,
        stream: bool = False,
        finished: Callable[[], int] | None = None,
        balance: RowBalance | None = None,
        ramp_up: RampUp | None = None,
    ) -> None:
        if batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ParallelPlanError(
                "batch_size must be at least 1 and dp_rank must be in [0, dp_size): batch_size is "
                f"{batch_size}, dp_rank {dp_rank}, dp_size {dp_size}."
            )
        self.global_batch = GlobalBatch(batch_size * dp_size, ramp_up)
        self.global_batch.check(dp_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.drop_last = drop_last
        self.seed = seed
        self.stream = stream
        self.balance = balance
        self.epoch = 0
        self.consumed = 0
        self.num_before = 0
        self._finished = finished or (lambda: 0)
        self._finished_before: int | None = None
        if drop_last and not self.num_left:
            raise ParallelPlanError(
                f"an epoch must have at least one global batch: it has {num_samples} samples, and "
                f"the first batch {self.global_batch.at(0)} over {dp_size} data-parallel ranks. "
                "Use a smaller batch, a shorter seq_length or more text."
            )

    @property
    def global_batch_size(self) -> int:
        """Number of samples of all ranks in a full batch."""
        return self.global_batch.size

    def __len__(self) -> int:
        """Return the batches of the Trainer's epoch: those before ``consumed``, and those left."""
        return self.num_before + self.num_left

    @property
    def num_left(self) -> int:
        """Number of batches from ``consumed`` to the end of the epoch."""
        if self.drop_last:
            return self.batches_of_epoch(self.epoch, self.consumed)
        return -(-max(self.num_samples - self.consumed, 0) // self.global_batch_size)

    def batches_of_epoch(self, epoch: int, consumed: int = 0) -> int:
        """Return the number of full global batches of an epoch (batches).

        Args:
            consumed: Samples of the epoch before the first batch (samples).
        """
        start = epoch * self.num_samples
        return self.global_batch.count(start + consumed, start + self.num_samples)

    @property
    def _num_in_earlier_epochs(self) -> int:
        """Number of samples in all earlier epochs."""
        return self.epoch * self.num_samples

    @property
    def _num_before(self) -> int:
        """Number of samples before the next one, over all epochs."""
        return self._num_in_earlier_epochs + self.consumed

    def __iter__(self) -> Iterator[list[int]]:
        # A generator runs this line when the first batch is requested, after a checkpoint has been
        # restored.
        self._finished_before = self._finished()
        order = self._order()
        for start, size in self._batch_ranges(self.num_left):
            if self.balance is not None:
                yield self.balance.shares(_selected(order, start, start + size))[self.dp_rank]
                continue
            first, stop = (
                start + size * rank // self.dp_size for rank in (self.dp_rank, self.dp_rank + 1)
            )
            batch = _selected(order, first, stop)
            yield batch + [-1] * (-(-size // self.dp_size) - len(batch))

    def global_batches(self, count: int) -> Iterator[list[int]]:
        """Yield the samples of all ranks in the next global batches, without advancing.

        Args:
            count: Maximum number of batches (batches).
        """
        order = self._order()
        for start, size in self._batch_ranges(min(count, self.num_left)):
            yield _selected(order, start, start + size)

    def _batch_ranges(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the start in the epoch's order, and the size, of each of the next batches."""
        start = self.consumed
        before = self._num_in_earlier_epochs
        for _ in range(count):
            size = min(self.global_batch.at(before + start), self.num_samples - start)
            yield start, size
            start += size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch of the Trainer, or continue the current one if its number is the same."""
        if self.stream and self.num_finished:
            self.load_state_dict(self.state_dict())
        elif not self.stream and epoch != self.epoch:
            self.load_state_dict({"epoch": epoch, "consumed": 0})

    @property
    def has_started(self) -> bool:
        """Whether iteration from the current position has begun."""
        return self._finished_before is not None

    @property
    def num_finished(self) -> int:
        """Number of batches that the Trainer has finished since iteration began."""
        return 0 if self._finished_before is None else self._finished() - self._finished_before

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its samples that all ranks have consumed."""
        passed = self.global_batch.after(self._num_before, self.num_finished)
        consumed = min(passed - self._num_in_earlier_epochs, self.num_samples)
        return {"epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position that was saved with any number of ranks and any batch size.

        Args:
            state: Fields ``epoch`` and ``consumed``, and ``batches`` if the Trainer counts some
                batches of its epoch as finished.
        """
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
        self.num_before = state.get("batches", 0)
        self._finished_before = None
        # The end of an epoch is the start of the next one.
        if self.num_left == 0:
            self.epoch += 1
            self.consumed = 0
            self.num_before = 0

    def _order(self) -> np.ndarray | None:
        if self.seed is None or self.epoch == 0:
            return None
        return np.random.RandomState([self.seed, self.epoch, 2]).permutation(self.num_samples)


def imbalance_line(sampler: TokenBatchSampler) -> str:
    """Return a line about the work of the busiest rank in the next global batches."""
    assert sampler.balance is not None, "only a balance knows the work of samples"
    batches = list(sampler.global_batches(_NUM_REPORTED))
    before, after = sampler.balance.imbalance(batches)
    return (
        f"Attention work of the busiest of {sampler.dp_size} data ranks: {after:.3f} times the "
        f"mean, {before:.3f} times without balancing (next {len(batches)} global batches)."
    )


def _selected(order: np.ndarray | None, first: int, stop: int) -> list[int]:
    return list(range(first, stop)) if order is None else order[first:stop].tolist()


def check_position(state: Mapping[str, Any]) -> None:
    """Validate a position in the training data that a ``RowDataModule`` saved.

    Args:
        state: Saved fields; an empty state means the start of training.
    """
    if not state:
        return
    missing = [name for name in (*REQUIRED, "order") if name not in state]
    if missing:
        raise CheckpointMismatchError(
            f"the data position of a checkpoint must have {', '.join((*REQUIRED, 'order'))}: "
            f"{missing} are missing. Resume with the data module with which the checkpoint was "
            "written."
        )
    for name in (*REQUIRED, *OPTIONAL):
        value = state.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**63:
            raise CheckpointMismatchError(
                f"{name} in the data position of a checkpoint must be a whole number of at least "
                f"0: it is {ascii(value)[:80]}. Use another checkpoint."
            )
    if state["consumed"] > state["num_samples"] or not isinstance(state["order"], str):
        raise CheckpointMismatchError(
            "the data position of a checkpoint must have at most num_samples consumed samples, and "
            f"a text as order: it has {state['consumed']} of {state['num_samples']} samples, in "
            f"the order {ascii(state['order'])[:80]}. Use another checkpoint."
        )
