"""Default learning rate schedule of token modules, with a linear warm-up and a decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.decay_shapes import decay_factor


@dataclass(frozen=True)
class WarmupSchedule:
    """Learning rate with a linear warm-up and a decay to a minimum, at which it stays.

    Args:
        shape: Shape of the decay: ``cosine``, ``linear``, or ``constant`` for no decay.
        warmup_steps: Length of the warm-up (steps).
        num_steps: Step at which the decay ends; not needed for ``constant`` (steps).
        min_ratio: Minimum of the learning rate as a fraction of its peak.

    Raises:
        UnsupportedError: If the shape is unknown, or the end of the decay is not known.
    """

    shape: Literal["cosine", "linear", "constant"]
    warmup_steps: int
    num_steps: int | None
    min_ratio: float

    def __post_init__(self) -> None:
        if self.shape not in ("cosine", "linear", "constant"):
            raise UnsupportedError(
                f"schedule must be one of cosine, linear, constant: it is {self.shape!r}."
            )
        if self.shape != "constant" and self.num_steps is None:
            raise UnsupportedError(
                f"the {self.shape} schedule needs a last step, at which the decay ends: max_steps "
                "is None and the Trainer has no limit. Set max_steps of the model or the Trainer, "
                "or use schedule 'constant'."
            )

    def factor(self, step: int) -> float:
        """Return the learning rate as a fraction of its peak; it is positive at every step.

        Args:
            step: Number of completed optimizer steps (steps).
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.num_steps is None or self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return self.min_ratio + (1.0 - self.min_ratio) * decay_factor(self.shape, done)
