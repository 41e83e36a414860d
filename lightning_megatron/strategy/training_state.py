"""What a fit keeps between its steps: main parameters, the sums of their gradients, how far these have come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.training.gradients import GradientSync
from lightning_megatron.training.loss_scale import DynamicLossScale
from lightning_megatron.training.main_parameters import MainParameters


class TrainingState:
    """Own the parameters that the optimizers of one fit train.

    Args:
        module: The module whose parameters are trained.
        optimizers: The user's optimizers; they train the mains from now on. None when nothing is trained.
        mesh: The groups of this rank.
        main_dtype: Type of the mains; None means that parameters are their own mains.
        previous: The state of an earlier fit, whose mains go on where the module still has their values.

    Communication: constructs a :class:`GradientSync`, a collective over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] | None,
        mesh: ParallelMesh,
        main_dtype: torch.dtype | None,
        previous: MainParameters | None = None,
    ) -> None:
        self.mesh = mesh
        self.main = MainParameters(dict(module.named_parameters()), main_dtype)
        if previous is not None:
            _continue_mains(self.main, previous)
        self._sync = None if optimizers is None else GradientSync(self.main, mesh)
        for optimizer in optimizers or ():
            self.main.attach(optimizer)
        self.overflowed = False
        self._is_finished = True

    def gradients_changed(self) -> None:
        """Note that a backward pass has added to the gradients of this rank."""
        self._is_finished = False

    def finish(self, loss_scale: DynamicLossScale | None) -> None:
        """Sum the gradients over the ranks, look for overflow and take the loss scale out; once after a backward pass.

        Communication: that of :meth:`GradientSync.finish`, and with a loss scale one all-reduce over the world.
        """
        if self._is_finished or self._sync is None:
            return
        self._sync.finish()
        if loss_scale is not None:
            self.overflowed = loss_scale.found_nonfinite(self.main, self.mesh)
            loss_scale.unscale_(self.main)
        self._is_finished = True

    def names_of(self, optimizer: Optimizer) -> set[str]:
        """Name the parameters that an optimizer trains."""
        return {name for group in self.main.names_of(optimizer) for name in group}

    def release(self) -> None:
        """Leave gradients with the module's own parameters again."""
        self.main.detach_hooks()


@torch.no_grad()
def _continue_mains(main: MainParameters, previous: MainParameters) -> None:
    """Copy mains over whose rounded values the module still has: half precision alone would forget their last bits."""
    for name in main.names:
        parameter, twin = main.parameter(name), main.main(name)
        if twin is parameter or name not in previous.names:
            continue
        before = previous.main(name)
        if before.shape == twin.shape and torch.equal(before.to(parameter.device, parameter.dtype), parameter):
            twin.copy_(before)
