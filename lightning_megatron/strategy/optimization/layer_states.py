"""State that layers accumulate during a step and update at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.strategy.optimization.mixtures import MixtureRuntime


class LayerStates:
    """State that steps accumulate: routers, and delayed scales for products in 8 bits.

    Routers count tokens, and delayed scales record magnitudes for the scales of later steps.

    Args:
        mixtures: Mixture-of-experts layers of this rank.
        models: Models that are trained.
        mesh: The groups of this rank.
    """

    def __init__(
        self, mixtures: MixtureRuntime, models: Sequence[LayeredModule], mesh: ParallelMesh
    ) -> None:
        self._mixtures = mixtures
        self._mesh = mesh
        scales_of_models = [model.delayed_scales for model in models]
        self._scales = [scales for scales in scales_of_models if scales is not None]
        self._was_fresh = self._is_fresh
        self._has_ended = False

    @property
    def is_used(self) -> bool:
        """Return whether any layer of any stage accumulates such state."""
        return self._mixtures.is_used or bool(self._scales)

    @property
    def _is_fresh(self) -> bool:
        return any(scales.is_fresh for scales in self._scales)

    def finish_step(self) -> bool:
        """End the step, unless a graph has already ended it (see :meth:`adopt`).

        Returns:
            Whether graphs captured before the end of this step are stale, because layers now use
            scales of earlier steps; the same on all ranks.

        Communication: that of :meth:`end_step`.
        """
        if self.is_used and not self._has_ended:
            self._mixtures.statistics = self.end_step()
        self._has_ended = False
        was_fresh = self._was_fresh
        self._was_fresh = self._is_fresh
        return was_fresh and not self._was_fresh

    def end_step(self) -> Mapping[int, StepStatistics]:
        """Update routers and scales from this step, and reset the state for the next one.

        A graph may contain this method, because it only writes tensors that keep their addresses.

        Returns:
            The token counts of the routers, by layer index.

        Communication: that of :meth:`MixtureRuntime.end_step` and of
            :meth:`DelayedScales.end_step`.
        """
        for scales in self._scales:
            scales.end_step(self._mesh)
        return self._mixtures.end_step()

    def adopt(self, statistics: Mapping[int, StepStatistics]) -> None:
        """Copy the result of :meth:`end_step` from a graph, whose next replay overwrites it.

        Args:
            statistics: Result of :meth:`end_step` during the capture.
        """
        self._mixtures.adopt(statistics)
        self._has_ended = True

    def resume_step(self) -> None:
        """Reopen a step that a graph has ended (see :meth:`adopt`), because it must run again."""
        self._has_ended = False

    @property
    def step_tensors(self) -> list[Tensor]:
        """Return the tensors of this stage's layers to which steps write."""
        scale_tensors = [tensor for scales in self._scales for tensor in scales.step_tensors]
        return self._mixtures.step_tensors + scale_tensors
