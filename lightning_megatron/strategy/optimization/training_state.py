"""State of a fit between steps: main parameters, gradient sums and their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameter_stack import ParameterStack
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.strategy.optimization.finite_watch import FiniteWatch
from lightning_megatron.strategy.optimization.gradient_check import check_finite
from lightning_megatron.strategy.optimization.replica_check import ReplicaCheck
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.training.fused_update import FusedUpdate
from lightning_megatron.training.gradients import GradientReducer
from lightning_megatron.training.loss_scale import DynamicLossScale
from lightning_megatron.training.main_parameters import Division, MainParameters, names_in
from lightning_megatron.training.ties import TiedCopies, check_ties


def division_of(options: StrategyOptions, main_dtype: torch.dtype | None) -> Division:
    """Return the division of main parameters and gradients from the strategy's options.

    Args:
        options: Options of the strategy.
        main_dtype: Dtype of main parameters; None means the model's.
    """
    return Division(
        main_dtype=main_dtype,
        gradient_dtype=torch.bfloat16 if options.gradient_dtype == "bfloat16" else None,
        zero=options.zero,
        slices=options.optimizer_slices,
        bucket_size=options.bucket_size,
        moments_dtype=getattr(torch, options.moments_dtype),
    )


class TrainingState:
    """Main parameters that the optimizers of one fit train, with their gradients.

    Args:
        module: The module whose parameters are trained.
        optimizers: The user's optimizers, which train slices of main parameters from now on; empty
            for an evaluation.
        mesh: The groups of this rank.
        division: Division of main parameters and gradients over ranks, and their dtypes.
        checks_gradients: Whether every step checks gradients for values that are not finite; None
            checks gradients, weights and losses at logging steps.
        previous: Main parameters of an earlier fit, reused if the module still has their values.
        replica_check_interval: Optimizer steps between later comparisons of replicas; 0 means none.

    Raises:
        UnsupportedError: If an optimizer cannot train slices, trains the two copies of a tied
            embedding differently, or cannot keep its moments in the requested dtype.

    Communication: gathers of names; the constructor is collective.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        mesh: ParallelMesh,
        division: Division,
        checks_gradients: bool | None = False,
        previous: MainParameters | None = None,
        replica_check_interval: int = 0,
    ) -> None:
        self._module = module
        self._models = [model for _, model in pipelined_modules(module)]
        self._chunks = {
            id(parameter): model.chunk_of(name)
            for model in self._models
            for name, parameter in model.named_parameters()
        }
        parameters = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        stacks = [tuple(names[id(part)] for part in stack.parts) for stack in self._stacks()]
        self.main = MainParameters(
            parameters, mesh, division, lambda name: self._chunks.get(id(parameters[name])), stacks
        )
        self._reducer = GradientReducer(self.main)
        self._checks_gradients = bool(checks_gradients)
        self.finite = FiniteWatch(mesh) if checks_gradients is None else None
        self._zero_grads: list[tuple[Optimizer | nn.Module, Any]] = []
        self._copies = TiedCopies(self.main)
        if optimizers:
            self._copies.follow(optimizers)
        for optimizer in optimizers:
            self._reducer.watch(self.main.attach(optimizer))
            check_ties(optimizer, self.main)
            self._watch_zero_grad(optimizer, partial(self.names_of, optimizer))
        if optimizers:
            self._watch_zero_grad(module, lambda: set(self.main.trained))
        self.fused_update = FusedUpdate(division.moments_dtype)
        self.fused_update.check(self.main, optimizers)
        if previous is not None:
            self.main.continue_from(previous)
        #: Comparison of replicated values.
        self.replicas = ReplicaCheck(module, self.main, self._reducer, replica_check_interval)
        self._overflowed: frozenset[str] = frozenset()
        self._unfinished: frozenset[str] = frozenset()
        #: Whether this stage trains nothing but must join the collectives after a backward pass.
        self._only_takes_part = False
        self._num_tokens: Tensor | None = None
        self._is_in_backward = False
        self._epoch: int | None = None
        self.step = 0

    @property
    def mesh(self) -> ParallelMesh:
        """Return the groups of this rank."""
        return self.main.mesh

    @mesh.setter
    def mesh(self, mesh: ParallelMesh) -> None:
        # A later run of the same trainer has its own groups.
        self.main.mesh = mesh

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether the module still has the parameters that this state trains."""
        return module is self._module and self.main.still_holds

    @property
    def observer(self) -> GradientReducer | None:
        """Return the observer of the last backward pass; None if gradients are checked first."""
        return None if self._checks_gradients else self._reducer

    def begin_step(self, step: int, looks: bool) -> None:
        """Start a training step.

        Args:
            step: Index of the training batch (batches).
            looks: Whether its values are checked after the optimizer's update.
        """
        self.step, finite = step, self.finite
        if finite is not None:
            looks = looks or self.replicas.inspector is not None
            finite.begin(step, looks)
            self._reducer.look = partial(finite.look, "gradient") if looks else None

    def note(self, kind: str, value: Tensor | None) -> None:
        """Record a loss or a gradient norm for a later check."""
        if kind == "loss":
            self.replicas.loss = value
        if self.finite is not None and value is not None:
            self.finite.note(kind, value)

    def check_values(self, *, at_end: bool = False) -> None:
        """Refuse values that are not finite, at checked steps and at the end of the fit.

        Raises:
            NonFiniteError: If a value is not finite.

        Communication: that of :meth:`FiniteWatch.check`.
        """
        if self.finite is not None and (at_end or self.finite.looks):
            self.finite.check()

    def begin_fit(self) -> None:
        """Copy weights that user hooks have written since the optimizers were attached."""
        self.main.written.take(all_values=True)

    def take_in(self, optimizers: Sequence[Optimizer], epoch: int | None = None) -> None:
        """Apply callbacks' changes of frozen parameters and optimizer groups since the last step.

        Args:
            optimizers: Optimizers of the fit.
            epoch: Index of the epoch (epochs); None outside of training steps.

        Raises:
            UnsupportedError: If an embedding with a copy on another stage was frozen or unfrozen
                within an epoch.

        Communication: that of :meth:`TiedCopies.follow` at the first step of an epoch, and outside
        of steps.
        """
        if epoch is None or epoch != self._epoch:
            self._epoch = epoch
            self._copies.follow(optimizers)
        else:
            self._copies.check()
        for optimizer in optimizers:
            if self.main.waits_for_attach(optimizer):
                self._reducer.watch(self.main.attach(optimizer))

    def overlap_gathers(self) -> None:
        """Let the layers of this package's models wait for their own parameters after a step."""
        for model in self._models:
            self.main.gather.wait_before(model.units(), self.main.buffers)
            # A plain function, because a deep copy of the model does not copy it.
            model.wait_for_parameters = lambda: self.main.wait()

    def lend_gradients(self) -> None:
        """Expose gradients as ``parameter.grad`` from now on."""
        self.main.lent.is_on = True

    def show_gradients(self) -> None:
        """Expose the gradient sums so far; finished gradients are exposed automatically."""
        if self.main.lent.is_on:
            self._reducer.lend_unreduced()

    def take_over(self) -> None:
        """Adopt the changes of user code to exposed gradients."""
        if self.main.lent.is_on:
            self._reducer.take_over()

    def hide_gradients(self) -> None:
        """Hide exposed gradients before new ones are computed."""
        if self.main.lent.is_on:
            self._reducer.take_over()
            self.main.lent.take_back()

    @contextmanager
    def backward_by_hand(self, loss_scale: DynamicLossScale | None) -> Iterator[None]:
        """Run a backward pass of manual optimization in the block, and expose full gradients.

        Gradients are reduced immediately, as under ``ddp``, because user code may read or clip
        them. Sums of earlier passes are set aside and added afterwards. A nested pass is part of
        the outer one.

        Communication: that of :meth:`finish`, if there are several ranks.
        """
        if self._is_in_backward:
            yield
            return
        self._is_in_backward = True
        try:
            with self._shown_afterwards(loss_scale):
                yield
        finally:
            self._is_in_backward = False

    @contextmanager
    def raw_backward(self, loss_scale: DynamicLossScale | None) -> Iterator[None]:
        """Run a backward pass that user code has started, as in :meth:`backward_by_hand`.

        Raises:
            UnsupportedError: If losses are scaled.
        """
        if loss_scale is not None and not self._is_in_backward:
            raise _needs_manual_backward(loss_scale)
        with self.backward_by_hand(loss_scale):
            yield

    @contextmanager
    def _shown_afterwards(self, loss_scale: DynamicLossScale | None) -> Iterator[None]:
        self.hide_gradients()
        names = frozenset(name for name in self.main.trained if self.main.is_trainable(name))
        if self.mesh.world.size == 1:
            self._reducer.resume(names)
            self.gradients_changed()
            yield
            self.show_gradients()
            return
        before = self._reducer.take_finished(names)
        yield
        self._unfinished = names
        self.finish(loss_scale)
        self._reducer.add_finished(before)

    def gradients_changed(self, num_tokens: Tensor | None = None) -> None:
        """Record that a backward pass has added to the gradients of this rank.

        Args:
            num_tokens: Tokens of this rank's batch. Gradient sums are divided by the total over
                ranks and batches. None means that gradients are averaged over the ranks.
        """
        self._unfinished = frozenset(self.main.trained)
        self._only_takes_part = not self._unfinished
        if num_tokens is not None:
            self._num_tokens = (
                num_tokens if self._num_tokens is None else self._num_tokens + num_tokens
            )

    def finish(
        self, loss_scale: DynamicLossScale | None, optimizer: Optimizer | None = None
    ) -> None:
        """Reduce gradients, detect overflow and unscale, once after a backward pass.

        Args:
            loss_scale: Loss scale of the gradients.
            optimizer: Optimizer whose gradients are finished, while others may accumulate further;
                None means all optimizers.

        Raises:
            NonFiniteError: If gradients are checked and one is infinite or not a number.
            ReplicaMismatchError: If replicas are compared in this step and differ.

        Communication: that of :meth:`GradientReducer.finish` and of :class:`ReplicaCheck`; one
        all-reduce over the world with a loss scale, one over the data axis with token counts, and
        one over the world with checks.
        """
        self._see_raw_backward(loss_scale)
        names = (
            self._unfinished if optimizer is None else self._unfinished & self.names_of(optimizer)
        )
        if not names and not self._only_takes_part:
            return
        self._only_takes_part = False
        if self._checks_gradients:
            check_finite(self._reducer.unreduced(names), self.mesh, self.step)
        if self.finite is not None and self.finite.looks:
            self.main.wait()
            self.finite.look("weight", dict(self._module.named_parameters()))
        compares = self.replicas.before_sums(names)
        self._reducer.finish(names)
        self._divide_by_tokens(names)
        self._overflowed -= names
        if loss_scale is not None:
            if loss_scale.found_nonfinite(self.main, names):
                self._overflowed |= names
            loss_scale.unscale_(self.main, names)
        if compares:
            self.check_values()
            self.replicas.after_sums(names, are_finite=self._overflowed.isdisjoint(names))
        self._unfinished -= names

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's gradients have overflowed; the same on all ranks."""
        return not self._overflowed.isdisjoint(self.names_of(optimizer))

    def rescale(self, factor: float) -> None:
        """Rescale unfinished gradients after the loss scale has changed by ``factor``."""
        gradients = list(self._reducer.unreduced(self._unfinished).values())
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def names_of(self, optimizer: Optimizer) -> set[str]:
        """Return the names of the parameters that an optimizer trains."""
        return names_in(self.main.names_of(optimizer))

    def release(self) -> None:
        """Return gradients to the module's own parameters, without moving parameter values."""
        self.main.gather.release()
        self._reducer.release()
        for owner, original in self._zero_grads:
            if original is None:
                vars(owner).pop("zero_grad", None)
            else:
                owner.zero_grad = original  # type: ignore[method-assign]
        self._zero_grads.clear()

    def _see_raw_backward(self, loss_scale: DynamicLossScale | None) -> None:
        """Detect gradients of a plain ``loss.backward()``."""
        if self._unfinished or not self._reducer.has_unreduced:
            return
        if loss_scale is not None:
            raise _needs_manual_backward(loss_scale)
        self.gradients_changed()

    def _divide_by_tokens(self, names: frozenset[str]) -> None:
        if self._num_tokens is None:
            return
        data = self.mesh.data
        total = all_reduce_(self._num_tokens.clone(), data)
        # The gradients are means over the ranks; without any token they are zero, and stay so.
        factor = torch.where(total > 0, data.size / total, torch.zeros_like(total))
        gradients = self.main.gradients(names)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self._num_tokens = None

    def _watch_zero_grad(
        self, owner: Optimizer | nn.Module, names_of: Callable[[], set[str]]
    ) -> None:
        """Clear gradient sums when ``zero_grad`` of an optimizer or the module is called."""
        original: Callable[..., None] = owner.zero_grad
        self._zero_grads.append((owner, vars(owner).get("zero_grad")))

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none)
            names = names_of()
            self._reducer.clear(names)
            if owner is self._module:
                # The module's own method does not clear gradients of main parameters.
                for name in names:
                    self.main.mains[name].grad = None
            self.main.lent.take_back(names)
            self._unfinished -= names
            self._num_tokens = None

        owner.zero_grad = zero_grad  # type: ignore[method-assign]

    def _stacks(self) -> Iterator[ParameterStack]:
        for model in self._models:
            for part in model.modules():
                if isinstance(part, ParameterStack):
                    yield part


def _needs_manual_backward(loss_scale: DynamicLossScale) -> UnsupportedError:
    return UnsupportedError(
        "precision 16-mixed needs self.manual_backward(loss): there are gradients of a plain "
        f"loss.backward(), and the loss must be multiplied by the scale ({loss_scale.scale:g}) "
        "before. Without it small gradients vanish. Call self.manual_backward(loss), or use "
        "precision bf16-mixed or 32-true."
    )
