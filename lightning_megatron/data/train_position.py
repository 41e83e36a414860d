"""Position in the training data, which a checkpoint stores to resume a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.data.loader import TokenLoader
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.plan.global_batch import GlobalBatch


def position_after(loader: TokenLoader, progress: Any, num_steps: int) -> dict[str, Any]:
    """Return the position in the training data after the Trainer's last finished batch.

    Args:
        num_steps: Number of optimizer steps so far (steps).
    """
    sampler = loader.sampler
    state: dict[str, Any] = sampler.state_dict()
    batches = sampler.num_before
    if sampler.num_finished:
        batches = progress.current.processed
        if progress.is_last_batch and batches == progress.current.ready:
            # `limit_train_batches` may end an epoch before all of its samples are used.
            batches = 0
            if not sampler.stream:
                state = {"epoch": state["epoch"] + 1, "consumed": 0}
    samples = loader.batches.samples
    if isinstance(samples, StreamedSamples):
        state = {**state, "stream": samples.state_at(state["consumed"])}
    return {
        **state,
        "batches": batches,
        "num_samples": sampler.num_samples,
        "global_batch_size": sampler.global_batch_size,
        "steps": num_steps,
        "order": samples.order_key,
    }


def samples_of_steps(state: Mapping[str, Any], max_steps: int, batch: GlobalBatch) -> int:
    """Return the number of training samples of a run that ends after a number of steps (samples).

    Args:
        state: Restored position; empty for a run from the start.
        max_steps: Number of optimizer steps of the whole training (steps).
    """
    if state.get("epoch", 0):
        # The first epoch is over. The order of later epochs depends on the same number of samples.
        return state["num_samples"]
    steps = max(max_steps - state.get("steps", 0), 1)
    return batch.after(state.get("consumed", 0), steps)


def steps_of_epochs(trainer: Any, sampler: TokenBatchSampler) -> int | None:
    """Return the number of optimizer steps of a Trainer with a limit of epochs (steps).

    Epochs with growing batches have different numbers of them.

    Returns:
        Number of steps; None if the Trainer has no limit of epochs.
    """
    if trainer.max_epochs in (None, -1):
        return None
    limit = trainer.limit_train_batches
    batches = map(sampler.batches_of_epoch, range(trainer.max_epochs))
    steps = sum(
        min(limit, count) if isinstance(limit, int) else int(limit * count) for count in batches
    )
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def stops_by_steps(trainer: Any) -> bool:
    """Return whether only ``max_steps`` limits a Trainer.

    Args:
        trainer: The Trainer; None without a Trainer.
    """
    return trainer is not None and trainer.max_steps != -1 and trainer.max_epochs == -1
