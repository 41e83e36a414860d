"""Which samples one data-parallel rank takes: disjoint over ranks, resumable at any sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError

REQUIRED = ("epoch", "consumed", "num_samples", "global_batch_size")
OPTIONAL = ("batches", "steps")


class TokenBatchSampler:
    """Yield the sample numbers of one data-parallel rank, batch after batch, from `consumed` to the end of an epoch.

    Each global batch holds the next batch_size * dp_size samples of the epoch's order; rank r takes the r-th contiguous
    share. Positions are counted in samples, so another dp_size or batch_size continues where these stopped.

    What the trainer has finished decides the state, not what was handed out: workers fetch batches ahead.

    Args:
        num_samples: Samples of an epoch.
        batch_size: Samples of this rank in one batch.
        dp_rank: Position on the data-parallel axis.
        dp_size: Size of the data-parallel axis.
        drop_last: Leave out a last global batch that is not full. If kept, it is divided evenly and filled up with
            number -1 (a row without labels) where ranks differ by one, so that all ranks have equal shapes.
        seed: Reshuffles each epoch after the first, whose order is that of the samples; None never shuffles.
        stream: The trainer's epochs follow each other through the samples; only when all are used up does an epoch of
            the samples end.
        finished: Counts the batches that the trainer has finished in all epochs.

    Raises:
        ParallelPlanError: Sizes do not fit, or there is no full global batch.
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
    ) -> None:
        if batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ParallelPlanError(
                f"a batch holds at least one sample and dp_rank lies in [0, dp_size): batch_size {batch_size}, dp_rank "
                f"{dp_rank}, dp_size {dp_size}."
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.drop_last = drop_last
        self.seed = seed
        self.stream = stream
        self.epoch = 0
        self.consumed = 0
        self.num_before = 0
        self._finished = finished or (lambda: 0)
        self._finished_before: int | None = None
        if drop_last and num_samples < self.global_batch_size:
            raise ParallelPlanError(
                f"one global batch needs batch_size x dp samples: {batch_size} x {dp_size} = {self.global_batch_size}, "
                f"but there are {num_samples}. Use a smaller batch_size, fewer data-parallel ranks, a shorter "
                f"seq_length or more text."
            )

    @property
    def global_batch_size(self) -> int:
        """Count the samples that all ranks take in one batch."""
        return self.batch_size * self.dp_size

    def __len__(self) -> int:
        """Count the batches of the trainer's epoch: those finished before `consumed` and those that are left."""
        return self.num_before + self.num_left

    @property
    def num_left(self) -> int:
        """Count the batches from `consumed` to the end of the epoch."""
        left = max(self.num_samples - self.consumed, 0)
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # runs when the first batch is asked for: by then a checkpoint has been restored
        self._finished_before = self._finished()
        order = self._order()
        for number in range(self.num_left):
            start = self.consumed + number * self.global_batch_size
            size = min(self.global_batch_size, self.num_samples - start)
            first, stop = (start + size * rank // self.dp_size for rank in (self.dp_rank, self.dp_rank + 1))
            places = range(first, stop)
            batch = list(places) if order is None else order[first:stop].tolist()
            yield batch + [-1] * (-(-size // self.dp_size) - len(batch))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch of the trainer; that which is under way goes on where it is."""
        if self.stream and self.num_finished:
            self.load_state_dict(self.state_dict())
        elif not self.stream and epoch != self.epoch:
            self.load_state_dict({"epoch": epoch, "consumed": 0})

    @property
    def num_finished(self) -> int:
        """Count the batches of this epoch that the trainer has finished since iteration began."""
        return 0 if self._finished_before is None else self._finished() - self._finished_before

    def state_dict(self) -> dict[str, int]:
        """Return epoch and consumed samples, counted over all ranks; an epoch that is over is the next one's start."""
        consumed = min(self.consumed + self.num_finished * self.global_batch_size, self.num_samples)
        return {"epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken, whatever the number of ranks and the batch size were then.

        Args:
            state: `epoch`, `consumed`, and `batches` if the trainer counts some of its epoch as finished.
        """
        self.epoch, self.consumed, self._finished_before = state["epoch"], state["consumed"], None
        self.num_before = state.get("batches", 0)
        if self.num_left == 0:
            self.epoch, self.consumed, self.num_before = self.epoch + 1, 0, 0

    def _order(self) -> np.ndarray | None:
        if self.seed is None or self.epoch == 0:
            return None
        return np.random.RandomState([self.seed, self.epoch, 2]).permutation(self.num_samples)


def check_position(state: Mapping[str, Any]) -> None:
    """Refuse a saved position in the data that none of a `TokenDataModule` can be; an empty one is a beginning.

    Raises:
        CheckpointMismatchError: A field is missing, or is no whole number from 0 on, or fields contradict each other.
    """
    if not state:
        return
    missing = [name for name in (*REQUIRED, "order") if name not in state]
    if missing:
        raise CheckpointMismatchError(
            f"the position in the data of a checkpoint must have {', '.join((*REQUIRED, 'order'))}: {missing} are "
            f"missing. Resume with the data module that the checkpoint was written with."
        )
    for name in (*REQUIRED, *OPTIONAL):
        value = state.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**63:
            raise CheckpointMismatchError(
                f"{name} in the position in the data of a checkpoint must be a whole number from 0 on: it is "
                f"{ascii(value)[:80]}. Use another checkpoint."
            )
    if state["consumed"] > state["num_samples"] or not isinstance(state["order"], str):
        raise CheckpointMismatchError(
            f"the position in the data of a checkpoint contradicts itself: {state['consumed']} of "
            f"{state['num_samples']} samples, in the order {ascii(state['order'])[:80]}. Use another checkpoint."
        )
