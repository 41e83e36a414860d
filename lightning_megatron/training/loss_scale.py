"""The dynamic loss scale of float16 training: gradients neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.plan.settings import Count, Positive, settled_arguments
from lightning_megatron.training.main_parameters import MainParameters


class DynamicLossScale:
    """Multiply the loss by a scale that doubles after clean steps and halves when gradients overflow.

    Equal to Megatron-Core's ``DynamicGradScaler``: an overflow uses up one unit of ``hysteresis``, and once there is
    none left every overflow halves the scale; the hysteresis comes back only when the scale grows, not with each clean
    step. Beyond it, overflows that go on at the lowest scale end the run: nothing is left to lower, so every step
    would be skipped forever.

    Args:
        initial: The first scale.
        growth_interval: Clean steps before the scale doubles (steps).
        hysteresis: Overflows that are forgiven before the scale halves (steps).
        minimum: The lowest scale.
        floor_patience: Overflows in a row at the lowest scale before the run ends (steps).

    Raises:
        ParallelPlanError: If a number is out of range.
    """

    def __init__(
        self,
        initial: Positive = 2.0**16,
        growth_interval: Count = 1000,
        hysteresis: Count = 2,
        minimum: Positive = 1.0,
        floor_patience: Count = 10,
    ) -> None:
        settled_arguments(DynamicLossScale.__init__, locals())
        if minimum > initial:
            raise ParallelPlanError(
                "the initial loss scale must not be below the minimum: initial "
                f"{initial}, minimum {minimum}. Use an initial scale of {max(minimum, 1.0)} or more."
            )
        self.scale = float(initial)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.minimum = float(minimum)
        self.floor_patience = floor_patience
        self._clean_steps = 0
        self._hysteresis_left = hysteresis
        self._overflows_at_floor = 0

    def found_nonfinite(self, main: MainParameters, names: Collection[str] | None = None) -> bool:
        """Tell whether any gradient of any rank is infinite or not a number; all ranks get the same answer.

        Args:
            main: The parameters of this rank.
            names: Look only at these parameters of this rank; None means all.

        Communication: one all-reduce of a scalar over the world, and the host waits for it.
        """
        gradients = main.gradients(names)
        found = torch.zeros((), dtype=torch.float32, device=main.mesh.device)
        if gradients:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, float("inf"))])
            found = (~torch.isfinite(largest)).any().to(torch.float32)
        return bool(all_reduce_(found, main.mesh.world, "max").item())

    def unscale_(self, main: MainParameters, names: Collection[str] | None = None) -> None:
        """Divide the main gradients by the scale, in place: those of the named parameters, or all."""
        gradients = main.gradients(names)
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, found: bool) -> None:
        """Adapt the scale after a step that was skipped because of overflow (``found``) or that was clean.

        Raises:
            RuntimeError: If gradients go on overflowing at the lowest scale. It is not a ValueError: no setting is at
                fault, the numbers of the run are.
        """
        if found:
            self._clean_steps = 0
            self._hysteresis_left -= 1
            self._count_overflow_at_floor()
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self._overflows_at_floor = 0
        self._clean_steps += 1
        if self._clean_steps == self.growth_interval:
            self._clean_steps = 0
            self._hysteresis_left = self.hysteresis
            self.scale *= 2.0

    def _count_overflow_at_floor(self) -> None:
        if self.scale > self.minimum:
            return
        self._overflows_at_floor += 1
        if self._overflows_at_floor >= self.floor_patience:
            raise RuntimeError(
                f"the loss scale must leave gradients finite: {self._overflows_at_floor} steps in a row overflowed "
                f"at the lowest scale, {self.minimum}. Lowering it further cannot help, and every step would be "
                "skipped. The loss or "
                'the weights have diverged: lower the learning rate, clip gradients, or use precision "bf16-mixed".'
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue."""
        return {
            "scale": self.scale,
            "clean_steps": self._clean_steps,
            "hysteresis_left": self._hysteresis_left,
            "overflows_at_floor": self._overflows_at_floor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the intervals stay those given to this object."""
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = int(state["hysteresis_left"])
        self._overflows_at_floor = int(state.get("overflows_at_floor", 0))
