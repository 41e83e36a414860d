"""Number of optimizer steps of a training, which schedules and progress bars need."""

from __future__ import annotations

from typing import Any


def total_steps(trainer: Any) -> float:
    """Return the number of optimizer steps of a whole training; infinite if it has no end (steps).

    A data module whose epochs differ in their number of batches counts them. Otherwise it is the
    estimate of the Trainer, which multiplies the batches of one epoch.

    Args:
        trainer: Trainer of the training.
    """
    # Look the method up by name, because models do not import data modules.
    count = getattr(getattr(trainer, "datamodule", None), "steps_of_epochs", None)
    # The Trainer's estimate builds the training loader, which the data module counts.
    known = trainer.estimated_stepping_batches
    counted = None if count is None else count()
    return known if counted is None else counted
