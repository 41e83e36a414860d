"""Gradients of a fit, from the backward passes to the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.optimizer.main_parameters import MainParameters, names_in
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.step_checks import StepChecks
from lightning_megatron.shapes import Float


class StepGradients:
    """Gradients of the trained parameters: the only code that sums and scales them.

    Backward passes add to the gradients of this rank. Gradients that a backward pass has changed
    are *unfinished*. To finish them means to sum them over the ranks, divide them by the number of
    tokens, detect overflow and undo the loss scale. In automatic optimization, :meth:`end_batch`
    finishes them. In manual optimization, user code decides when gradients are used, so
    :meth:`finish_for` finishes what its backward passes have changed by then.
    """

    def __init__(
        self,
        module: nn.Module,
        main: MainParameters,
        reducer: GradientReducer,
        checks: StepChecks,
        loss_scale: DynamicLossScale | None,
    ) -> None:
        self._module = module
        self._main = main
        self._reducer = reducer
        self._checks = checks
        self._loss_scale = loss_scale
        self._overflowed: frozenset[str] = frozenset()
        self._unfinished: frozenset[str] = frozenset()
        #: Whether this stage trains nothing but must join the collectives after a backward pass.
        self._only_takes_part = False
        self._num_tokens: Tensor | None = None
        self._is_in_backward = False
        self._zero_grads: list[tuple[Optimizer | nn.Module, Any]] = []

    @property
    def may_sum_in_graphs(self) -> bool:
        """Return whether graphs may sum gradients over the ranks.

        The step must need such sums, and no code may read the gradients of this rank before them.
        """
        return self._reducer.before_reduction is None and self._reducer.sums_over_ranks

    # ---- sums

    def end_batch(self, num_tokens: Float[Tensor, ""] | None, will_step: bool) -> None:
        """End the backward passes of a batch in automatic optimization.

        Args:
            num_tokens: Tokens of this rank's batch. Gradient sums are divided by the total over
                ranks and batches. None means that gradients are averaged over the ranks.

        Communication: that of :meth:`finish_for`, if the optimizer steps.
        """
        self._add(num_tokens)
        if will_step:
            self._finish()
        else:
            self._expose()

    def discard(self) -> None:
        """Discard the gradients of backward passes that must not count, and wait for their sums."""
        names = set(self._main.trained)
        self._reducer.clear(names)
        self._main.exposed_gradients.withdraw(names)

    def finish_for(self, optimizer: Optimizer) -> None:
        """Finish the gradients of an optimizer that user code has left unfinished, if any.

        Other optimizers may accumulate further. In automatic optimization there are none, unless a
        hook runs a backward pass itself.

        Communication: that of :meth:`GradientReducer.finish` and of :class:`StepChecks`; one
        all-reduce over the world with a loss scale, and one over the data axis with token counts.
        """
        self._finish(optimizer)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's gradients have overflowed; the same on all ranks."""
        return not self._overflowed.isdisjoint(self._names_of(optimizer))

    def rescale(self, factor: float) -> None:
        """Rescale unfinished gradients after the loss scale has changed by ``factor``."""
        gradients = list(self._reducer.unreduced_gradients(self._unfinished).values())
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _add(self, num_tokens: Tensor | None = None) -> None:
        """Record that a backward pass has added to the gradients of this rank."""
        self._unfinished = frozenset(self._main.trained)
        self._only_takes_part = not self._unfinished
        if num_tokens is not None:
            self._num_tokens = (
                num_tokens if self._num_tokens is None else self._num_tokens + num_tokens
            )

    def _finish(self, optimizer: Optimizer | None = None) -> None:
        self._detect_raw_backward()
        names = self._unfinished
        if optimizer is not None:
            names = names & self._names_of(optimizer)
        if not names and not self._only_takes_part:
            return
        self._only_takes_part = False
        compares = self._checks.before_sums(names)
        total = self._sum_of_tokens()
        self._reducer.finish(names, lambda: _is_known_zero(total))
        if total is not None:
            self._divide_by_tokens(names, total)
        self._overflowed -= names
        if self._loss_scale is not None:
            if self._loss_scale.found_nonfinite(self._main, names):
                self._overflowed |= names
            self._main.scale_gradients_(1.0 / self._loss_scale.scale, names)
        are_finite = self._overflowed.isdisjoint(names)
        self._checks.after_sums(names, compares=compares, are_finite=are_finite)
        self._unfinished -= names

    def _detect_raw_backward(self) -> None:
        if self._unfinished or not self._reducer.has_unreduced:
            return
        if self._loss_scale is not None:
            raise _needs_manual_backward(self._loss_scale)
        self._add()

    def _sum_of_tokens(self) -> Tensor | None:
        """Return the number of tokens of all data-parallel ranks; None if they are not counted."""
        if self._num_tokens is None:
            return None
        return all_reduce_(self._num_tokens.clone(), self._main.mesh.data)

    def _divide_by_tokens(self, names: frozenset[str], total: Tensor) -> None:
        # The gradients are means over the ranks; without any token they are zero, and stay so.
        size = self._main.mesh.data.size
        factor = torch.where(total > 0, size / total, torch.zeros_like(total))
        gradients = self._main.gradients(names)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self._num_tokens = None

    def _names_of(self, optimizer: Optimizer) -> set[str]:
        return names_in(self._main.names_of(optimizer))

    # ---- exposure as ``parameter.grad``

    def adopt_user_changes(self) -> None:
        """Adopt the changes of user code to exposed gradients."""
        if self._main.exposed_gradients.is_on:
            self._reducer.adopt_user_changes()

    def hide(self) -> None:
        """Hide exposed gradients before new ones are computed."""
        if self._main.exposed_gradients.is_on:
            self._reducer.adopt_user_changes()
            self._main.exposed_gradients.withdraw()

    def _expose(self) -> None:
        """Expose the gradient sums so far; finished gradients are exposed automatically."""
        if self._main.exposed_gradients.is_on:
            self._reducer.expose_unreduced()

    # ---- manual optimization

    @contextmanager
    def backward_by_hand(self) -> Iterator[None]:
        """Run a backward pass of manual optimization in the block, and expose full gradients.

        Gradients are finished immediately, as under ``ddp``, because user code may read or clip
        them. Sums of earlier passes are set aside and added afterwards. A nested pass is part of
        the outer one.

        Communication: that of :meth:`finish_for`, if there are several ranks.
        """
        if self._is_in_backward:
            yield
            return
        self._is_in_backward = True
        try:
            self.hide()
            names = frozenset(filter(self._main.is_trainable, self._main.trained))
            if self._main.mesh.world.size == 1:
                self._reducer.resume(names)
                self._add()
                yield
                self._expose()
            else:
                before = self._reducer.take_finished(names)
                yield
                self._unfinished = names
                self._finish()
                self._reducer.add_finished(before)
        finally:
            self._is_in_backward = False

    @contextmanager
    def raw_backward(self) -> Iterator[None]:
        """Run a backward pass that user code has started, as in :meth:`backward_by_hand`.

        With a loss scale, it is refused.
        """
        if self._loss_scale is not None and not self._is_in_backward:
            raise _needs_manual_backward(self._loss_scale)
        with self.backward_by_hand():
            yield

    # ---- clearing

    def watch_zero_grad(self, optimizer: Optimizer) -> None:
        """Clear an optimizer's gradient sums when its ``zero_grad`` is called."""
        self._replace_zero_grad(optimizer, lambda: self._names_of(optimizer))

    def watch_zero_grad_of_module(self) -> None:
        """Clear all gradient sums when ``zero_grad`` of the module is called."""
        self._replace_zero_grad(self._module, lambda: set(self._main.trained))

    def _replace_zero_grad(
        self, owner: Optimizer | nn.Module, names_of: Callable[[], set[str]]
    ) -> None:
        original: Callable[..., None] = owner.zero_grad
        self._zero_grads.append((owner, vars(owner).get("zero_grad")))

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none)
            names = names_of()
            self._reducer.zero_grad(names, set_to_none)
            if owner is self._module:
                # The module's own method does not clear gradients of main parameters.
                for name in names:
                    self._main.main_parameters[name].grad = None
            self._main.exposed_gradients.withdraw(names)
            self._unfinished -= names
            self._num_tokens = None

        owner.zero_grad = zero_grad  # type: ignore[method-assign]

    def release(self) -> None:
        """Return gradients to the module's own parameters."""
        self._reducer.release()
        for owner, original in self._zero_grads:
            if original is None:
                vars(owner).pop("zero_grad", None)
            else:
                owner.zero_grad = original  # type: ignore[method-assign]
        self._zero_grads.clear()


def _is_known_zero(total: Tensor | None) -> bool:
    """Return whether the number of tokens is 0; False in a capture, which leaves nothing out."""
    if total is None or (total.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not bool(total)


def _needs_manual_backward(loss_scale: DynamicLossScale) -> UnsupportedError:
    return UnsupportedError(
        "precision 16-mixed needs self.manual_backward(loss): the step called loss.backward(), "
        f"which does not multiply the loss by its scale ({loss_scale.scale:g}), so that small "
        "gradients would become 0. Call self.manual_backward(loss), or use precision bf16-mixed or "
        "32-true."
    )
