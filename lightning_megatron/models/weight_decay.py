"""Scheduler of the weight decay of an optimizer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.models.lr_schedules import StepScheduler, decay_factor
from lightning_megatron.plan.settings import Count, NotNegative, coerced_arguments
from lightning_megatron.shapes import Float


class WeightDecaySchedule(StepScheduler):
    """Change the weight decay from a start to an end value, without changing learning rates.

    After ``t`` optimizer steps, with the end at step ``N``,

    - ``linear``: ``wd(t) = start + (end - start) * t / N``,
    - ``cosine``: ``wd(t) = start + (end - start) * (1 - cos(pi * t / N)) / 2``,
    - ``constant``: ``wd(t) = start``, which must be ``end``,

    and ``wd(t) = end`` for ``t >= N``. Each parameter group gets ``wd(t)`` times the ratio of its
    initial weight decay to the largest one of all groups, so groups without weight decay keep none.
    Megatron-LM's ``--weight-decay-incr-style`` has the same formulas.

    Use it together with a learning rate scheduler of the same optimizer; both must advance after
    each optimizer step (``"interval": "step"``).

    Args:
        optimizer: Optimizer with weight decay in at least one group.
        start: Weight decay of the first step.
        end: Weight decay from step ``num_steps`` on.
        num_steps: Length of the change (optimizer steps).
        shape: Shape of the change: ``constant``, ``linear`` or ``cosine``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range, ``start`` and ``end`` of
            the shape ``constant`` differ, or no parameter group has weight decay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start: NotNegative,
        end: NotNegative,
        num_steps: Count,
        shape: Literal["constant", "linear", "cosine"] = "linear",
    ) -> None:
        arguments = coerced_arguments(WeightDecaySchedule.__init__, locals())
        self.start: float = arguments["start"]
        self.end: float = arguments["end"]
        self.num_steps: int = arguments["num_steps"]
        self.shape: Literal["constant", "linear", "cosine"] = arguments["shape"]
        if self.shape == "constant" and self.start != self.end:
            raise ParallelPlanError(
                f"start ({self.start}) and end ({self.end}) must be equal with shape 'constant', "
                "because the weight decay does not change. Use the same value for both, or shape "
                "'linear' or 'cosine'."
            )
        decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        if max(decays) <= 0.0:
            raise ParallelPlanError(
                "the weight decay of at least one parameter group must be above 0: the groups have "
                f"{decays}. Groups without weight decay keep none, so the schedule would change "
                "nothing. Set weight_decay of the groups that decay in the optimizer."
            )
        # The fraction of the scheduled value that each group gets.
        self._parts = [decay / max(decays) for decay in decays]
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | Float[Tensor, ""]]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        value = self.weight_decay(self.last_epoch)
        for group, part in zip(self.optimizer.param_groups, self._parts, strict=True):
            if part:
                group["weight_decay"] = value * part

    def weight_decay(self, step: int) -> float:
        """Return the weight decay after a number of completed optimizer steps."""
        if step >= self.num_steps:
            return self.end
        if self.shape == "constant":
            return self.start
        done = step / self.num_steps
        return self.start + (self.end - self.start) * (1.0 - decay_factor(self.shape, done))
