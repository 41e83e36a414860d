"""Kinds of steps whose graphs are captured apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepKind:
    """Kind of the steps of a run.

    Each kind has eager steps of its own before its capture, and shapes of its own.

    Args:
        name: Name of the step, with the index of the dataloader if there are several.
        has_backward: Whether a backward pass follows.
    """

    name: str
    has_backward: bool = False


#: Kind of the training steps.
TRAINING = StepKind("training_step", has_backward=True)
