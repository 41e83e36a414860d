"""Dynamic loss scale for float16 training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.plan.settings import Count, Positive, coerced_arguments


class DynamicLossScale:
    """Loss scale that doubles after clean steps and halves when gradients overflow.

    Equal to Megatron-Core's ``DynamicGradScaler``: every overflow decrements the hysteresis
    counter, and at zero every overflow halves the scale. The counter is reset only when the scale
    grows, not by each clean step. In addition, repeated overflows at the lowest scale end the run:
    the scale cannot be lowered further, so every step would be skipped.

    Args:
        growth_interval: Number of clean steps before the scale doubles (steps).
        hysteresis: Number of overflows before the scale halves (steps).
        floor_patience: Number of consecutive overflows at the lowest scale before the run ends
            (steps).
    """

    def __init__(
        self,
        initial: Positive = 2.0**16,
        growth_interval: Count = 1000,
        hysteresis: Count = 2,
        minimum: Positive = 1.0,
        floor_patience: Count = 10,
    ) -> None:
        coerced_arguments(DynamicLossScale.__init__, locals())
        if minimum > initial:
            raise ParallelPlanError(
                "the initial loss scale must not be below the minimum: the initial scale is "
                f"{initial}, the minimum is {minimum}. Use an initial scale of {max(minimum, 1.0)} "
                "or more."
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
        """Return whether any gradient on any rank is infinite or NaN; all ranks agree.

        Communication: one all-reduce of a scalar over the world, and the host waits for it.
        """
        gradients = main.gradients(names)
        nonfinite = torch.zeros((), dtype=torch.float32, device=main.mesh.device)
        if gradients:
            largest = torch.stack(
                [norm.float() for norm in torch._foreach_norm(gradients, float("inf"))]
            )
            nonfinite = (~torch.isfinite(largest)).any().to(torch.float32)
        return bool(all_reduce_(nonfinite, main.mesh.world, "max").item())

    def update(self, overflow: bool) -> None:
        """Update the scale after a clean step, or after one skipped by overflow.

        Overflows in a row at the lowest scale raise a RuntimeError. It is not a ValueError, because
        the run has diverged and no setting is invalid.
        """
        if overflow:
            self._clean_steps = 0
            self._hysteresis_left -= 1
            self._overflows_at_floor += self.scale <= self.minimum
            if self._overflows_at_floor >= self.floor_patience:
                raise RuntimeError(
                    f"the loss scale must leave gradients finite: {self._overflows_at_floor} steps "
                    f"in a row overflowed at the lowest scale, {self.minimum}. All further steps "
                    "would be skipped. The loss or the weights have diverged: lower the learning "
                    'rate, clip gradients, or use precision "bf16-mixed".'
                )
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self._overflows_at_floor = 0
        self._clean_steps += 1
        if self._clean_steps == self.growth_interval:
            self._clean_steps = 0
            self._hysteresis_left = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters for a checkpoint."""
        return {
            "scale": self.scale,
            "clean_steps": self._clean_steps,
            "hysteresis_left": self._hysteresis_left,
            "overflows_at_floor": self._overflows_at_floor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale and its counters; the settings of this object do not change."""
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = int(state["hysteresis_left"])
        self._overflows_at_floor = int(state.get("overflows_at_floor", 0))
