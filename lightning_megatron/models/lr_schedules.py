"""Learning rate schedulers with a warm-up and a floor, which advance with each optimizer step.

The rate ``lr(t)`` after ``t`` optimizer steps is a closed formula of ``t`` and of the peak, which
is the ``lr`` of the parameter group. All schedulers begin with the same warm-up: ``lr(t) =
initial_lr + (peak - initial_lr) * t / warmup_steps`` for ``t < warmup_steps``. With the default
``initial_lr`` of 0, the first step does not change the weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import Count, Index, NotNegative, Range, coerced_arguments
from lightning_megatron.shapes import Float

#: A straight line, half a cosine wave, or 1 minus a square root, which falls fastest at its start.
DecayShape = Literal["linear", "cosine", "1-sqrt"]


def decay_factor(shape: DecayShape, done: float) -> float:
    """Return the factor of a decay from 1 to 0, of which a fraction from 0 to 1 is done.

    It is ``1 - done`` for ``linear``, ``(1 + cos(pi * done)) / 2`` for ``cosine``, and
    ``1 - sqrt(done)`` for ``1-sqrt``.
    """
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - (done if shape == "linear" else math.sqrt(done))


#: Fraction of the peak.
Ratio = Annotated[float, Range(minimum=0, maximum=1)]

# Attributes that a scheduler saves. They do not include settings: a resumed training uses the
# current ones.
_STATE_NAMES = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


class StepScheduler(LRScheduler):
    """Base class of schedulers that save their position, but not their settings.

    A resumed training continues at the saved step with its current settings, so that a stable phase
    can be resumed with another end.
    """

    @override
    def state_dict(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in _STATE_NAMES}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update({key: state_dict[key] for key in _STATE_NAMES})


class WarmedUpScheduler(StepScheduler):
    """Increase the learning rate to its peak; a subclass computes the rate after the warm-up.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        settings: Checked settings: ``warmup_steps``, ``initial_lr`` and, if the rate has a floor,
            ``min_lr`` and ``min_ratio``, which exclude each other.
    """

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        self.warmup_steps: int = settings["warmup_steps"]
        self.initial_lr: float = settings["initial_lr"]
        self.min_lr: float | None = settings.get("min_lr")
        self.min_ratio: float = settings.get("min_ratio") or 0.0
        if self.min_lr is not None and settings.get("min_ratio") is not None:
            raise ParallelPlanError(
                f"min_lr ({self.min_lr}) and min_ratio ({self.min_ratio}) must not both be given, "
                "because each defines the floor of the learning rate. Give one of them."
            )
        for number, group in enumerate(optimizer.param_groups):
            peak = float(group.get("initial_lr", group["lr"]))
            for name, value in (("initial_lr", self.initial_lr), ("min_lr", self.min_lr or 0.0)):
                if value > peak:
                    raise ParallelPlanError(
                        f"{name} ({value}) must be at most the learning rate of parameter group "
                        f"{number} ({peak}), which is the peak. Use a value from 0 to {peak}."
                    )
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | Float[Tensor, ""]]:
        return [self.rate(self.last_epoch, float(peak)) for peak in self.base_lrs]

    def rate(self, step: int, peak: float) -> float:
        """Return the learning rate after a number of completed optimizer steps, given its peak."""
        if step < self.warmup_steps:
            return self.initial_lr + (peak - self.initial_lr) * step / self.warmup_steps
        floor = self.min_ratio * peak if self.min_lr is None else self.min_lr
        return self.rate_after_warmup(step, peak, floor)

    @abstractmethod
    def rate_after_warmup(self, step: int, peak: float, floor: float) -> float:
        """Return the learning rate after ``warmup_steps`` or more optimizer steps."""


class ConstantSchedule(WarmedUpScheduler):
    """Keep the peak after the warm-up.

    ``lr(t) = initial_lr + (peak - initial_lr) * t / warmup_steps`` for ``t < warmup_steps``, then
    ``peak``.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        warmup_steps: Length of the warm-up (optimizer steps).
        initial_lr: Learning rate of the first step of the warm-up.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: Index = 0, initial_lr: NotNegative = 0.0
    ) -> None:
        arguments = coerced_arguments(ConstantSchedule.__init__, locals())
        super().__init__(optimizer, arguments)

    @override
    def rate_after_warmup(self, step: int, peak: float, floor: float) -> float:
        return peak


class WSDSchedule(WarmedUpScheduler):
    """Warm up, keep the peak (stable), and decay to the floor in the last steps (WSD).

    With the warm-up of ``W`` steps, the end ``N`` and the decay of ``D`` steps,

    - ``lr(t) = initial_lr + (peak - initial_lr) * t / W`` for ``t < W``,
    - ``lr(t) = peak`` for ``W <= t <= N - D``,
    - ``lr(t) = floor + (peak - floor) * f((t - (N - D)) / D)`` for ``N - D < t < N``,
    - ``lr(t) = floor`` for ``t >= N``,

    where ``f(u)`` is ``1 - u`` (``linear``), ``(1 + cos(pi * u)) / 2`` (``cosine``) or ``1 -
    sqrt(u)`` (``1-sqrt``). The floor is ``min_lr`` or ``min_ratio * peak``. Megatron-LM's ``WSD``
    is the same, with ``minus_sqrt`` for ``1-sqrt``.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        num_steps: Step at which the decay ends (optimizer steps).
        decay_steps: Length of the decay (optimizer steps).
        decay: Shape of the decay: ``linear``, ``cosine`` or ``1-sqrt``.
        warmup_steps: Length of the warm-up (optimizer steps).
        initial_lr: Learning rate of the first step of the warm-up.
        min_lr: Lowest learning rate of all groups; None means ``min_ratio``.
        min_ratio: Lowest learning rate as a fraction of the peak; None means 0.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or if warm-up and decay
            are longer than ``num_steps``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_steps: Count,
        decay_steps: Count,
        decay: DecayShape = "1-sqrt",
        warmup_steps: Index = 0,
        initial_lr: NotNegative = 0.0,
        min_lr: NotNegative | None = None,
        min_ratio: Ratio | None = None,
    ) -> None:
        arguments = coerced_arguments(WSDSchedule.__init__, locals())
        self.num_steps: int = arguments["num_steps"]
        self.decay_steps: int = arguments["decay_steps"]
        self.decay: DecayShape = arguments["decay"]
        warmup: int = arguments["warmup_steps"]
        if warmup + self.decay_steps > self.num_steps:
            raise ParallelPlanError(
                f"warmup_steps ({warmup}) and decay_steps ({self.decay_steps}) must together be at "
                f"most num_steps ({self.num_steps}), because the decay follows the warm-up. Use "
                f"num_steps of at least {warmup + self.decay_steps}, or fewer steps of either."
            )
        super().__init__(optimizer, arguments)

    @override
    def rate_after_warmup(self, step: int, peak: float, floor: float) -> float:
        past = step - (self.num_steps - self.decay_steps)
        if past <= 0:
            return peak
        if past >= self.decay_steps:
            return floor
        return floor + (peak - floor) * decay_factor(self.decay, past / self.decay_steps)


class DecaySchedule(WSDSchedule):
    """Warm up, and decay to the floor from the end of the warm-up on."""

    #: Shape of the decay, which a subclass sets.
    shape: ClassVar[DecayShape]

    def __init__(
        self,
        optimizer: Optimizer,
        num_steps: Count,
        warmup_steps: Index = 0,
        initial_lr: NotNegative = 0.0,
        min_lr: NotNegative | None = None,
        min_ratio: Ratio | None = None,
    ) -> None:
        arguments = coerced_arguments(DecaySchedule.__init__, locals())
        steps = int(arguments["num_steps"] - arguments["warmup_steps"])
        if steps < 1:
            raise ParallelPlanError(
                f"warmup_steps ({warmup_steps}) must be below num_steps ({num_steps}), because the "
                f"decay follows the warm-up. Use warmup_steps from 0 to {num_steps - 1}, or a "
                "larger num_steps."
            )
        super().__init__(**arguments, decay_steps=steps, decay=self.shape)


class CosineSchedule(DecaySchedule):
    """Warm up, and decay to the floor along half a cosine wave.

    With the warm-up of ``W`` steps and the end ``N``,

    - ``lr(t) = initial_lr + (peak - initial_lr) * t / W`` for ``t < W``,
    - ``lr(t) = floor + (peak - floor) * (1 + cos(pi * (t - W) / (N - W))) / 2`` for ``W <= t < N``,
    - ``lr(t) = floor`` for ``t >= N``.

    The floor is ``min_lr`` or ``min_ratio * peak``.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        num_steps: Step at which the decay ends (optimizer steps).
        warmup_steps: Length of the warm-up (optimizer steps).
        initial_lr: Learning rate of the first step of the warm-up.
        min_lr: Lowest learning rate of all groups; None means ``min_ratio``.
        min_ratio: Lowest learning rate as a fraction of the peak; None means 0.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or if the warm-up is not
            shorter than ``num_steps``.
    """

    shape = "cosine"


class LinearSchedule(DecaySchedule):
    """Warm up, and decay to the floor along a straight line.

    With the warm-up of ``W`` steps and the end ``N``,

    - ``lr(t) = initial_lr + (peak - initial_lr) * t / W`` for ``t < W``,
    - ``lr(t) = floor + (peak - floor) * (1 - (t - W) / (N - W))`` for ``W <= t < N``,
    - ``lr(t) = floor`` for ``t >= N``.

    The floor is ``min_lr`` or ``min_ratio * peak``.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        num_steps: Step at which the decay ends (optimizer steps).
        warmup_steps: Length of the warm-up (optimizer steps).
        initial_lr: Learning rate of the first step of the warm-up.
        min_lr: Lowest learning rate of all groups; None means ``min_ratio``.
        min_ratio: Lowest learning rate as a fraction of the peak; None means 0.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or if the warm-up is not
            shorter than ``num_steps``.
    """

    shape = "linear"


class InverseSqrtSchedule(WarmedUpScheduler):
    """Warm up, and decay endlessly with the inverse square root of the step.

    With the warm-up of ``W`` steps and the time scale ``T``,

    - ``lr(t) = initial_lr + (peak - initial_lr) * t / W`` for ``t < W``,
    - ``lr(t) = max(floor, peak * sqrt(T / (t - W + T)))`` for ``t >= W``.

    With the default ``T = W`` the second line is ``peak * sqrt(W / t)``. The floor is ``min_lr`` or
    ``min_ratio * peak``.

    Args:
        optimizer: Optimizer whose groups have the peak as ``lr``.
        warmup_steps: Length of the warm-up (optimizer steps).
        timescale: Number of steps after the warm-up at which the rate is the peak divided by the
            square root of 2; None means ``warmup_steps`` (optimizer steps).
        initial_lr: Learning rate of the first step of the warm-up.
        min_lr: Lowest learning rate of all groups; None means ``min_ratio``.
        min_ratio: Lowest learning rate as a fraction of the peak; None means 0.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, or if neither a warm-up
            nor a time scale is given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: Index = 0,
        timescale: Count | None = None,
        initial_lr: NotNegative = 0.0,
        min_lr: NotNegative | None = None,
        min_ratio: Ratio | None = None,
    ) -> None:
        arguments = coerced_arguments(InverseSqrtSchedule.__init__, locals())
        self.timescale: int = arguments["timescale"] or arguments["warmup_steps"]
        if not self.timescale:
            raise ParallelPlanError(
                "timescale must be given if warmup_steps is 0, because its default is the length "
                "of the warm-up. Use a timescale of at least 1, such as 10000."
            )
        super().__init__(optimizer, arguments)

    @override
    def rate_after_warmup(self, step: int, peak: float, floor: float) -> float:
        past = step - self.warmup_steps + self.timescale
        return max(floor, peak * math.sqrt(self.timescale / past))


@dataclass(frozen=True)
class WarmupSchedule:
    """Learning rate with a linear warm-up and a decay to a minimum, at which it stays.

    Unlike :class:`WarmedUpScheduler`, its first step already changes the weights.

    Args:
        num_steps: Step at which the decay ends; not needed for ``constant``, which has no decay.
        min_ratio: Minimum of the learning rate as a fraction of its peak.
    """

    shape: Literal["cosine", "linear", "constant"]
    warmup_steps: int
    num_steps: int | None
    min_ratio: float

    def __post_init__(self) -> None:
        if self.shape != "constant" and self.num_steps is None:
            raise UnsupportedError(
                f"the {self.shape} schedule needs a last step, at which the decay ends: max_steps "
                "is None and the Trainer has no limit. Set max_steps of the model or the Trainer, "
                "or use schedule 'constant'."
            )

    def factor(self, step: int) -> float:
        """Return the learning rate as a fraction of its peak; it is positive at every step."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.num_steps is None or self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return self.min_ratio + (1.0 - self.min_ratio) * decay_factor(self.shape, done)
