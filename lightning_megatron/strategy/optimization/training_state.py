"""State of a fit between steps: main parameters, gradients and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.update_graph import Update, UpdateGraph
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.fp8_layers import weights_in_eight_bits
from lightning_megatron.models.layered import neighbours_in
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.optimizer.clip import Clipping, Deferral, StepClipping
from lightning_megatron.optimizer.fused_update import (
    FusedStep,
    FusedUpdate,
    UpdatePiece,
    has_step_hooks,
)
from lightning_megatron.optimizer.loss_scale import DynamicLossScale
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.sharding import DistributedOptimizerConfig
from lightning_megatron.optimizer.step_checks import StepChecks
from lightning_megatron.optimizer.step_gradients import StepGradients
from lightning_megatron.optimizer.ties import TiedCopies, check_ties
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.loops import searches_learning_rate


def division_of(
    options: StrategyOptions, main_dtype: torch.dtype | None
) -> DistributedOptimizerConfig:
    """Return the division of main parameters and gradients; without a dtype it is the model's."""
    return DistributedOptimizerConfig(
        main_dtype=main_dtype,
        gradient_dtype=torch.bfloat16 if options.optimizer.gradient_dtype == "bfloat16" else None,
        zero=options.optimizer.zero,
        bucket_size=options.optimizer.bucket_size,
        moments_dtype=getattr(torch, options.optimizer.moments_dtype),
        exchanges_rows=options.graph_mode != "full",
    )


def checks_of(chosen: bool | None, scales_loss: bool, trainer: Trainer) -> bool | None:
    """Return whether values are checked at every step; None means at logging steps.

    Args:
        scales_loss: Whether the precision scales losses. Gradients then overflow from time to time,
            and the loss scaler skips these steps.
        trainer: The Trainer. A learning rate search continues until losses explode, so that the
            default is no check.
    """
    return False if chosen is None and (scales_loss or searches_learning_rate(trainer)) else chosen


class TrainingState:
    """Main parameters that the optimizers of one fit train, with their gradients and their update.

    Args:
        optimizers: The user's optimizers, which train slices of main parameters from now on; empty
            for an evaluation.
        checks_gradients: Whether every step checks gradients, weights and losses for values that
            are not finite; None checks logging steps.
        previous: Main parameters of an earlier fit, reused if the module still has their values.
        replica_check_interval: Optimizer steps between later comparisons of replicas; 0 means none.

    Communication: gathers of names; the constructor is collective.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        mesh: ParallelMesh,
        division: DistributedOptimizerConfig,
        loss_scale: DynamicLossScale | None = None,
        checks_gradients: bool | None = False,
        previous: MainParameters | None = None,
        replica_check_interval: int = 0,
    ) -> None:
        self._module = module
        self._models = [model for _, model in pipelined_modules(module)]
        self._chunks = self._chunks_of_parameters()
        parameters = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        stacks = [stack for model in self._models for stack in neighbours_in(model, names)]
        #: Linear layers whose weights are kept in 8 bits, by the names of the weights.
        self._eight_bits = weights_in_eight_bits(module) if optimizers else {}
        main = self.main = MainParameters(
            parameters,
            mesh,
            division,
            lambda name: self._chunks.get(id(parameters[name])),
            stacks,
            self._eight_bits,
        )
        self._loss_scale = loss_scale
        #: Owner of the gradient slots.
        self.reducer = GradientReducer(main)
        self._copies = TiedCopies(main)
        if optimizers:
            self._copies.follow(optimizers)
        for optimizer in optimizers:
            self._attach(optimizer)
            check_ties(optimizer, self.main)
        #: Update by one kernel of the optimizers that it serves.
        self.fused_update = FusedUpdate(division.moments_dtype)
        self.fused_update.adopt(main, optimizers)
        if previous is not None:
            main.continue_from(previous)
        #: Checks of the values of each step.
        self.checks = StepChecks(
            module, main, self.reducer, checks_gradients, replica_check_interval, rank_zero_info
        )
        #: Gradients of the trained parameters.
        self.gradients = StepGradients(module, main, self.reducer, self.checks, loss_scale)
        #: Clipping of the gradients of each step.
        self.clipping = StepClipping(main, self.checks.note)
        #: Graphs of the update; None updates eagerly.
        self.update_graph: UpdateGraph[Tensor | None] | None = None
        for optimizer in optimizers:
            self.gradients.watch_zero_grad(optimizer)
        if optimizers:
            self.gradients.watch_zero_grad_of_module()
        self._epoch: int | None = None
        #: Whether layers wait for their own parameters in the next forward pass.
        self._overlaps_gathers = False

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
        if module is not self._module or not self.main.still_holds:
            return False
        # Another run may have replaced a part of the module.
        return all(
            self.main.holds(name) and self.main.parameter(name) is parameter
            for name, parameter in module.named_parameters()
        )

    @property
    def effect_observers(self) -> EffectObservers:
        """Return the objects whose Python state a captured step changes, such as counts."""
        mesh = self.mesh
        return EffectObservers(mesh.random, mesh.journal, self.reducer, self.main.gather)

    def begin_fit(self) -> None:
        """Copy weights that user hooks have written since the optimizers were attached."""
        self.main.user_writes.adopt(all_values=True)

    def attach_new(self, optimizers: Sequence[Optimizer], epoch: int | None = None) -> bool:
        """Attach parameters and groups that were unfrozen or added since the last step.

        The result says whether this rank has attached any. Outside of training steps ``epoch`` is
        None; within an epoch, no embedding with a copy on another stage may be frozen or unfrozen.

        Communication: that of :meth:`TiedCopies.follow` at the first step of an epoch, and outside
        of steps.
        """
        if epoch is None or epoch != self._epoch:
            self._epoch = epoch
            self._copies.follow(optimizers)
        else:
            self._copies.check()
        waiting = [optimizer for optimizer in optimizers if self.main.needs_attach(optimizer)]
        for optimizer in waiting:
            self._attach(optimizer)
        return bool(waiting)

    def _attach(self, optimizer: Optimizer) -> None:
        self.reducer.watch(self.main.attach(optimizer))
        self._set_weight_readers()

    def _set_weight_readers(self) -> None:
        """Let linear layers read the weights that are now kept in 8 bits, and cast all others."""
        for names, linear in self._eight_bits.items():
            if linear.scaling is not None:
                linear.scaling = linear.scaling.reading(self.main.stored_weight(names))

    def leave_eight_bits(self, *, gathers: bool) -> None:
        """Convert weights that are kept in 8 bits back to ordinary parameters.

        Values come from the main parameters of all ranks if ``gathers``, else from the 8 bits.

        Communication: an all-gather of each bucket over the data ranks if ``gathers``.
        """
        self.main.leave_eight_bits(gathers=gathers)
        self._set_weight_readers()

    def overlap_gathers(self) -> None:
        """Gather updated parameters during the next forward pass, layer by layer, from now on."""
        self._overlaps_gathers = True
        for model in self._models:
            self.main.gather.wait_before(model.gather_groups())
            # The attribute is a function, because a deep copy of the model does not copy functions.
            model.wait_for_parameters = lambda: self.main.wait()

    def update(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """Update the parameters that an optimizer trains.

        Adam and AdamW of torch run as one fused kernel if possible, which also clips gradients and
        writes the model's parameters.

        Args:
            closure: Function that computes, finishes and clips the gradients. Optimizers such as
                LBFGS call it several times.

        Returns:
            The result of the closure, and whether the update was skipped on all ranks, because
            gradients have overflowed under the loss scale.

        Communication: that of the closure; gathers of updated parameters over the data axis.
        """
        num_calls = 0

        def with_gradients() -> Any:
            nonlocal num_calls
            if num_calls:
                # Optimizers such as LBFGS move main parameters between two evaluations of the loss.
                self.main.publish()
            num_calls += 1
            result = closure()
            self.gradients.adopt_user_changes()
            self.main.user_writes.adopt()
            return result

        is_fused = self.fused_update.serves(self.main, optimizer)
        is_skipped = False
        stored = False
        with self.clipping.defer_to(self._deferral(is_fused)):
            if self._loss_scale is None and not is_fused:
                result = optimizer.step(closure=with_gradients, **options)
            else:
                result = with_gradients()
                is_skipped = self._loss_scale is not None and self.gradients.has_overflowed(
                    optimizer
                )
                if not is_skipped:
                    stored = self._step(optimizer, options)
        if self._loss_scale is not None:
            scale = self._loss_scale.scale
            self._loss_scale.update(is_skipped)
            self.gradients.rescale(self._loss_scale.scale / scale)
        self.main.publish(wait=not self._overlaps_gathers, stored=stored)
        self.checks.check_values()
        return result, is_skipped

    def _step(self, optimizer: Any, options: Mapping[str, Any]) -> bool:
        """Update main parameters; return whether the model's parameters are updated, too."""
        stored = False
        # The closure may have changed the optimizer's parameters.
        if self.fused_update.serves(self.main, optimizer):
            step = self.fused_update.begin(self.main, optimizer)
            # Hooks may change main parameters after they were rounded.
            stored = not has_step_hooks(optimizer)
            if stored:
                self.main.gather.start_during_update(self.mesh, step.names)
            self._clip_and_step(step, self.clipping.take())
            step.end()
        else:
            self.clipping.apply()
        optimizer.step(**options)
        return stored

    def _clip_and_step(self, step: FusedStep, clipping: Clipping | None) -> None:
        """Complete the deferred clipping and run the fused step, by a graph if there is one."""
        factor: Tensor | None = None

        def begin() -> Tensor | None:
            nonlocal factor
            norm, factor = (None, None) if clipping is None else clipping.begin()
            step.pieces[0].run(factor)
            return norm

        def after(part: int) -> None:
            self.main.gather.mark_updated(step.pieces[part].names)

        def part_of(piece: UpdatePiece) -> Callable[[], None]:
            # The first part sets the factor when it runs or is captured.
            return lambda: piece.run(factor)

        form = (step.form, None if clipping is None else clipping.form)
        reason = None if step.is_static else "gradients are not in the flat buffers"
        parts = (begin, *map(part_of, step.pieces[1:]))
        update = Update[Tensor | None](form, step, step.addresses, parts, reason, after)
        norm = update.run() if self.update_graph is None else self.update_graph.run(update)
        if clipping is not None:
            clipping.receive(norm)

    def _deferral(self, is_fused: bool) -> Deferral:
        """Return the part of the clipping that is deferred to the update."""
        # User code that reads gradients expects clipped ones.
        if not is_fused or self.main.exposed_gradients.is_on:
            return "nothing"
        return "scaling" if self.update_graph is None else "all"

    def release(self) -> None:
        """Return gradients to the module's own parameters, without moving parameter values.

        If the run ended with an error, weights in 8 bits are converted from their 8-bit values.
        """
        self.main.gather.release()
        self.leave_eight_bits(gathers=False)
        self.gradients.release()

    def _chunks_of_parameters(self) -> dict[int, int | None]:
        """Return the chunk of each parameter by identity; None for one that several chunks read."""
        chunks_by_id: dict[int, set[int | None]] = {}
        for model in self._models:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                chunks_by_id.setdefault(id(parameter), set()).add(model.chunk_of(name))
        return {
            key: chunks.pop() if len(chunks) == 1 else None for key, chunks in chunks_by_id.items()
        }
