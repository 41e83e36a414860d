"""Periodic comparison of parameters, gradients and loss between replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.partial_gradients import PartialGradientSearch
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.replicas import (
    check_data_replicas,
    check_frozen_copies,
    check_loss_replicas,
    check_tensor_replicas,
    replicated_over_tp,
)

#: Number of steps at the start of a fit that are always compared: the first step shows errors of
#: the forward and backward pass, the second those of the update.
_NUM_FIRST_STEPS = 2
_NUM_SHOWN = 8


class ReplicaCheck:
    """Comparison of replicas at the first steps of a fit and at a fixed interval after them.

    Args:
        module: Module that is trained.
        main: Main parameters of the module.
        reducer: Reducer of the gradients. It is notified of parameters whose gradients are partial
            sums over tp.
        interval: Optimizer steps between two comparisons after the first ones; 0 for none (steps).

    Communication: one gather of names over tp at construction.
    """

    def __init__(
        self, module: nn.Module, main: MainParameters, reducer: GradientReducer, interval: int
    ) -> None:
        self._main = main
        self._reducer = reducer
        self._interval = interval
        self._replicated = replicated_over_tp(main)
        self._search = PartialGradientSearch(module, main.mesh, self._replicated)
        # Number of steps by trained parameters, because optimizers may alternate.
        self._num_steps: Counter[frozenset[str]] = Counter()
        #: Loss of the last backward pass; None if user code runs the backward pass.
        self.loss: Tensor | None = None

    @property
    def inspector(self) -> Callable[[Any, bool], None] | None:
        """Return the inspector of graphs if the next step compares replicas, else None."""
        return (
            self._search.inspect if self._is_due(min(self._num_steps.values(), default=0)) else None
        )

    def before_sums(self, names: frozenset[str]) -> bool:
        """Exchange the findings of this step's graphs; return whether replicas are compared.

        Args:
            names: Names of the parameters that the step trains.

        Communication: one gather of names over tp, if replicas are compared.
        """
        if not self._is_due(self._num_steps[names]):
            self._num_steps[names] += 1
            return False
        names_by_rank = all_gather_objects(sorted(self._search.partial_names), self._main.mesh.tp)
        partial = {
            name for rank_names in names_by_rank for name in rank_names
        } - self._reducer.used_on_parts
        if partial:
            self._reducer.used_on_parts |= partial
            shown = ", ".join(sorted(partial)[:_NUM_SHOWN]) + (
                ", ..." if len(partial) > _NUM_SHOWN else ""
            )
            rank_zero_info(
                f"{len(partial)} parameter(s) are used on a part of the features by each rank of "
                f"tp, so their gradients are summed over tp: {shown}."
            )
        return True

    def after_sums(self, names: frozenset[str], *, are_finite: bool = True) -> None:
        """Compare loss, parameters and finished gradients; defer it to the next step on overflow.

        Args:
            names: Names of the parameters that the step has trained.
            are_finite: Whether all gradients are finite; comparison needs finite gradients.

        Raises:
            ReplicaMismatchError: If parameters, gradients or losses differ between replicas.

        Communication: that of the comparisons.
        """
        if are_finite:
            self._num_steps[names] += 1
            self._main.wait()
            if self.loss is not None and self._main.mesh.tp.size > 1:
                check_loss_replicas(self._main, self.loss)
            check_data_replicas(self._main)
            check_tensor_replicas(self._main, self._replicated, names)
            check_frozen_copies(self._main)

    def _is_due(self, num_steps: int) -> bool:
        mesh = self._main.mesh
        has_copies = mesh.world.size > mesh.pp.size or bool(self._main.on_several_stages)
        return has_copies and (
            num_steps < _NUM_FIRST_STEPS or (self._interval > 0 and num_steps % self._interval == 0)
        )
