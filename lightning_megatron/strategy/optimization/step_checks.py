"""Checks of the values of training steps: finite numbers, and equal values on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.strategy.optimization.finite_watch import FiniteWatch
from lightning_megatron.strategy.optimization.gradient_check import check_finite
from lightning_megatron.strategy.optimization.replica_check import ReplicaCheck


class StepChecks:
    """Checks of losses, gradients and weights in the training steps of one fit.

    Args:
        module: Module that is trained.
        main: Its main parameters.
        reducer: Reducer of the gradients.
        checks_gradients: Whether every step checks gradients for values that are not finite; None
            checks gradients, weights and losses at logging steps.
        replica_check_interval: Optimizer steps between later comparisons of replicas; 0 means none.

    Communication: one gather of names over tp at construction.
    """

    def __init__(
        self,
        module: nn.Module,
        main: MainParameters,
        reducer: GradientReducer,
        checks_gradients: bool | None,
        replica_check_interval: int,
    ) -> None:
        self._module = module
        self._main = main
        self._reducer = reducer
        #: Whether gradients are checked at every step, before their sum over the ranks.
        self.checks_gradients = bool(checks_gradients)
        self._finite = FiniteWatch(main.mesh) if checks_gradients is None else None
        self._replicas = ReplicaCheck(module, main, reducer, replica_check_interval)
        self._step = 0

    @property
    def inspector(self) -> Callable[[Any, bool], None] | None:
        """Return the inspector of graphs if the next step compares replicas, else None."""
        return self._replicas.inspector

    def begin_step(self, step: int, is_logged: bool) -> None:
        """Start a training step.

        Args:
            step: Index of the training batch (batches).
            is_logged: Whether loggers receive the values of this step.
        """
        self._step = step
        finite = self._finite
        if finite is not None:
            looks = is_logged or self._replicas.inspector is not None
            finite.begin(step, looks)
            self._reducer.before_reduction = partial(finite.look, "gradient") if looks else None

    def note(self, kind: str, value: Tensor | None) -> None:
        """Record a loss or a gradient norm for a later check."""
        if kind == "loss":
            self._replicas.loss = value
        if self._finite is not None and value is not None:
            self._finite.note(kind, value)

    def check_values(self, *, at_end: bool = False) -> None:
        """Refuse values that are not finite, at checked steps and at the end of the fit.

        Raises:
            NonFiniteError: If a value is not finite.

        Communication: that of :meth:`FiniteWatch.check`.
        """
        if self._finite is not None and (at_end or self._finite.looks):
            self._finite.check()

    def before_sums(self, names: frozenset[str]) -> bool:
        """Check gradients before their sum over the ranks; return whether replicas are compared.

        Args:
            names: Names of the parameters whose gradients are summed.

        Raises:
            NonFiniteGradientError: If gradients are checked and one is infinite or not a number.

        Communication: that of :func:`check_finite` and of :meth:`ReplicaCheck.before_sums`.
        """
        if self.checks_gradients:
            check_finite(self._reducer.unreduced_gradients(names), self._main.mesh, self._step)
        if self._finite is not None and self._finite.looks:
            self._main.wait()
            # Weights in 8 bits have recorded their largest magnitudes, which are checked instead.
            noted = self._main.eight_bits.magnitudes()
            self._finite.look("weight", {**dict(self._module.named_parameters()), **noted})
        return self._replicas.before_sums(names)

    def after_sums(self, names: frozenset[str], are_finite: bool) -> None:
        """Compare replicas, in a step for which :meth:`before_sums` has returned True.

        Args:
            names: Names of the parameters whose gradients are summed.
            are_finite: Whether these gradients are finite.

        Raises:
            NonFiniteError: If a value is not finite.
            ReplicaMismatchError: If replicas differ.

        Communication: that of :meth:`check_values` and of :meth:`ReplicaCheck.after_sums`.
        """
        self.check_values()
        self._replicas.after_sums(names, are_finite=are_finite)
