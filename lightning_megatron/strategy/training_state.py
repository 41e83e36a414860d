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

    Raises:
        UnsupportedError: If an optimizer trains the two copies of a tied embedding differently.

    Communication: constructs a :class:`GradientSync`, a collective over all ranks; one gather over pp for each
    optimizer where there are ties.
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
            if self._sync is not None:
                self._sync.check_ties(optimizer)
        self._overflowed: frozenset[str] = frozenset()
        self._unfinished: frozenset[str] = frozenset()

    def gradients_changed(self) -> None:
        """Note that a backward pass has added to the gradients of this rank."""
        self._unfinished = frozenset(self.main.names)

    def finish(self, loss_scale: DynamicLossScale | None, optimizer: Optimizer | None = None) -> None:
        """Sum the gradients over the ranks, look for overflow and take the loss scale out; once after a backward pass.

        Args:
            loss_scale: What the loss was multiplied by.
            optimizer: Only the gradients of this one; others may go on adding to theirs. None means all.

        Communication: that of :meth:`GradientSync.finish`, and with a loss scale one all-reduce over the world.
        """
        names = self._unfinished if optimizer is None else self._unfinished & self.names_of(optimizer)
        if not names or self._sync is None:
            return
        self._sync.finish(names)
        self._overflowed -= names
        if loss_scale is not None:
            if loss_scale.found_nonfinite(self.main, self.mesh, names):
                self._overflowed |= names
            loss_scale.unscale_(self.main, names)
        self._unfinished -= names

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Tell whether the finished gradients of an optimizer are not all finite; all ranks get the same answer."""
        return not self._overflowed.isdisjoint(self.names_of(optimizer))

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that are not finished yet, after the loss scale has changed by ``factor``."""
        gradients = self.main.gradients(self._unfinished)
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

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
