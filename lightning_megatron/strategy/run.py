"""A run: everything that exists between ``setup`` and ``teardown`` of the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear.feature_shard import functions_get_all_features
from lightning_megatron.models.layered import LayeredModule, layered_modules
from lightning_megatron.pipeline.action_times import MeasuredStages
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from lightning_megatron.strategy.checkpoints.weight_averaging import (
    average_main_parameters,
)
from lightning_megatron.strategy.checks.batch_comparison import BatchComparison
from lightning_megatron.strategy.checks.callback_checks import hide_example_input
from lightning_megatron.strategy.checks.engine_checks import check_not_compiled
from lightning_megatron.strategy.checks.run_checks import (
    check_train_loaders,
    check_turns,
    data_fields,
    pipelined_module,
)
from lightning_megatron.strategy.logs.run_table import count_elements, note_compiled_blocks
from lightning_megatron.strategy.modules.attribute_sync import AttributeSync
from lightning_megatron.strategy.modules.buffers import (
    SharedBuffers,
    check_averages,
    check_synchronised_norms,
    reduce_metrics_over_data,
)
from lightning_megatron.strategy.modules.full_writes import FullDraws, accept_full_loads
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.optimization.parameter_readers import (
    SHARDED_GRADIENTS_WARNING,
    gradient_reader,
    parameter_reader,
    record_data_access,
)
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.optimization.training_state import (
    TrainingState,
    checks_of,
    division_of,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.callback_patches import (
    announce_saves,
    patch_finetuning,
    remove_found_checkpoint,
    summarize_whole_model,
)
from lightning_megatron.strategy.private.data_loading import (
    filter_sampler_injection,
)
from lightning_megatron.strategy.private.loops import (
    call_around_epochs,
    install_scheduled_loop,
)
from lightning_megatron.strategy.process.dataloaders import needs_distributed_sampler
from lightning_megatron.strategy.process.random_states import exclude_garbage
from lightning_megatron.strategy.process.signals import SignalAgreement
from lightning_megatron.strategy.step.batch_cuts import BatchCuts
from lightning_megatron.strategy.step.graph_builds import MakeBackend, build_graphs
from lightning_megatron.strategy.step.limited_rows import LimitedRows
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from lightning_megatron.strategy.step.schedule_choice import ScheduleChoice
from lightning_megatron.strategy.step.step import Step, StepTrials
from lightning_megatron.strategy.trials.feature_trial import FeatureTrials
from lightning_megatron.strategy.trials.microbatch_check import MicrobatchTrials
from lightning_megatron.swap.blocks.cut_modules import FullColumnLinear
from lightning_megatron.swap.whole_features import full_layers


class Run:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``, after the module is sharded.

    The constructor changes the Trainer: its optimization loop, signal handlers, samplers and some
    callbacks. :meth:`close` undoes all changes. The training state stays, so that weights can be
    saved after the run.

    Args:
        optimizers: The user's optimizers; empty outside of a fit.
        previous: Training state of an earlier run of the same strategy; None without one.
        make_backend: Function that creates the backend of CUDA graphs; None means CUDA itself.
        twin: See ``twin_before_sharding``.

    Communication: collective over all ranks.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        options: StrategyOptions,
        precision: MegatronPrecision,
        optimizers: Sequence[Optimizer],
        layers: LayerStates,
        checkpoints: RunCheckpoints,
        previous: TrainingState | None,
        make_backend: MakeBackend | None = None,
        twin: nn.Module | UnsupportedError | None = None,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.precision = precision
        self.layers = layers
        self.is_fit = module.trainer.state.fn == TrainerFn.FITTING
        self.options = options
        #: Copy of the module before it was sharded, whose step is traced, or why there is none.
        self.twin = twin
        self._checkpoints = checkpoints
        self._hooks = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.end_hooks)
            reduce_metrics_over_data(module, mesh, undo)
            check_synchronised_norms(module, mesh)
            self.buffers = SharedBuffers(module, mesh)
            self._casts = SharedCasts(layered_modules(module), options)
            attributes = AttributeSync(module, mesh)
            self.state = self._training_state(precision, optimizers, previous)
            undo.callback(self.state.release)
            precision.bind(self.state)
            #: CUDA graphs of the steps; None without any.
            self.graphs = self._build_graphs(make_backend)
            if self.graphs is not None:
                undo.callback(self.graphs.close)
            self.executor = self._make_executor()
            self._choice = self._make_choice()
            #: Steps whose experts have a limit on their rows; None without a limit.
            self.limited_rows = self._limit_rows()
            #: Comparison of batches between the ranks of a model replica.
            self.comparison = BatchComparison(mesh, options.job.replica_check_interval)
            self.step = self._make_step(precision, attributes)
            self._patch_trainer(attributes, undo)
            self._start_full_layers(undo)
            if self.is_fit:
                self._patch_fit(undo)
            self._undo = undo.pop_all()

    # ---- parts

    def _start_full_layers(self, undo: ExitStack) -> None:
        """Prepare layers whose sharded outputs user code sees in full."""
        layers = full_layers(self.module)
        for layer in layers:
            if isinstance(layer.module, FullColumnLinear):
                # An earlier run may have found streams of random numbers, which this one lacks.
                layer.module.use.draws_on_parts = False
        if layers:
            undo.enter_context(functions_get_all_features())

    def _make_executor(self) -> PipelineExecutor:
        order = self.options.custom_order
        limit = self.layers.row_limit
        read_missing_rows = None if limit is None else limit.start_read
        actions = None if self.graphs is None else self.graphs.actions
        return PipelineExecutor(
            self.mesh,
            pipelined_module(self.module, self.mesh),
            self.options.schedule_name if order is None else order.build,
            self.options.pipeline.microbatch_group_size,
            self._casts.around,
            read_missing_rows,
            actions,
        )

    def _make_choice(self) -> ScheduleChoice | None:
        if self.options.schedule != "auto" or not self.is_fit or self.mesh.pp.size == 1:
            return None
        return ScheduleChoice(self.mesh, self.executor, self.options.schedule_name)

    def _training_state(
        self,
        precision: MegatronPrecision,
        optimizers: Sequence[Optimizer],
        previous: TrainingState | None,
    ) -> TrainingState:
        """Return a new state for a fit; evaluation reuses the state of an earlier fit."""
        if not self.is_fit and previous is not None and previous.belongs_to(self.module):
            previous.mesh = self.mesh
            return previous
        if previous is not None:
            # The new state attaches its own gradient slots to the same parameters.
            previous.release()
        options = self.options
        dtypes = precision.dtypes
        main_dtype = dtypes.main_parameters if self.is_fit else None
        return TrainingState(
            self.module,
            optimizers,
            self.mesh,
            division_of(options, main_dtype),
            precision.loss_scale,
            checks_of(options.job.check_gradients, dtypes.scales_loss, self.module.trainer),
            previous.main if previous is not None else None,
            options.job.replica_check_interval,
        )

    def _build_graphs(self, make_backend: MakeBackend | None) -> RunGraphs | None:
        settings = self.options.graphs
        if settings is None or not (self.is_fit or settings.evaluation):
            return None
        if not self.is_fit:
            settings = replace(settings, optimizer=False)
        return build_graphs(settings, self.module, self.mesh, self.state, make_backend)

    def _limit_rows(self) -> LimitedRows | None:
        limit = self.layers.row_limit
        if limit is None:
            return None
        return LimitedRows(
            self.module, self.mesh, limit, self.layers, self.state.gradients, self.graphs
        )

    def _make_step(self, precision: MegatronPrecision, attributes: AttributeSync) -> Step:
        rule = self.options.microbatches(self.mesh.layout)
        return Step(
            self.module,
            self.mesh,
            precision,
            self.state,
            self.layers,
            self.buffers,
            self.comparison,
            self.graphs,
            BatchCuts(rule, self.mesh, self.module.trainer),
            self._make_trials(),
            attributes,
            self.limited_rows,
            self._choice,
            self.executor,
            overlaps_gradients=self.options.optimizer.overlap_gradients,
        )

    def _make_trials(self) -> StepTrials | None:
        options = self.options
        if not options.job.check_microbatches:
            return None
        wait = self.state.main.wait
        interval = options.job.replica_check_interval
        return StepTrials(
            MicrobatchTrials(self.module, self.mesh, wait, interval, self._suspend_graphs),
            FeatureTrials(self.module, self.mesh),
        )

    def _suspend_graphs(self) -> None:
        """Run the rest of the running step without graphs."""
        if self.graphs is not None:
            self.graphs.suspend()

    # ---- changes of the Trainer

    def _patch_trainer(self, attributes: AttributeSync, undo: ExitStack) -> None:
        trainer = self.module.trainer
        num_shares = self.mesh.dp.size
        filter_sampler_injection(
            trainer, lambda loader: needs_distributed_sampler(loader, num_shares), undo
        )
        call_around_epochs(trainer, attributes.share, undo)
        if self.options.async_save:
            announce_saves(trainer, self._checkpoints.will_exist, self._checkpoints.link, undo)
        remove_found_checkpoint(trainer, self._checkpoints.was_found, undo)

    def _patch_fit(self, undo: ExitStack) -> None:
        trainer = self.module.trainer
        main = self.state.main
        if self.mesh.model.size > 1 or self.mesh.ep.size > 1:
            summarize_whole_model(trainer, partial(count_elements, self.module, self.mesh), undo)
        patch_finetuning(trainer, lambda: main.main_parameters)
        if self._gathers_late(trainer):
            self.state.overlap_gathers()
        self._expose_gradients(gradient_reader(trainer))
        install_scheduled_loop(trainer, self.step.prepare)
        interval = self.options.job.signal_check_interval
        SignalAgreement(trainer, self.mesh, interval, self._checkpoints.wait).install(undo)
        undo.enter_context(record_data_access(self._note_data))
        accept_full_loads(self.module, undo)
        if self.mesh.model.size > 1:
            check_averages(self.module, undo)
        if self.mesh.pp.size > 1:
            hide_example_input(self.module, undo)
        average_main_parameters(self.module, main, self.mesh, undo)

    def _note_data(self, parameter: nn.Parameter) -> None:
        """Record that user code reads or replaces the memory of a parameter."""
        self.state.main.user_writes.note(parameter)
        self._casts.note(parameter)

    def _gathers_late(self, trainer: Trainer) -> bool:
        """Return whether parameters are gathered during the next forward pass."""
        chosen = self.options.optimizer.overlap_parameters
        if chosen is not None or self.mesh.data.size == 1:
            return bool(chosen)
        reader = parameter_reader(trainer)
        if reader is not None:
            rank_zero_info(
                f"Updated parameters are gathered before {reader} runs, which may read them, and "
                "not during the next forward pass; if it does not read them, set "
                "optimizer.overlap_parameters=True."
            )
        return reader is None

    def _expose_gradients(self, reader: str | None) -> None:
        """Expose gradients as ``parameter.grad`` if user code may read them there.

        Args:
            reader: Hook that may read gradients; None without one.
        """
        if reader is not None or not self.module.automatic_optimization:
            self.state.main.exposed_gradients.is_on = True
        if reader is not None and self.mesh.model.size > 1:
            rank_zero_info(f"{reader} {SHARDED_GRADIENTS_WARNING}")

    # ---- start and end of training

    @property
    def is_in_stage(self) -> bool:
        """Return whether a step of several stages is running."""
        model = self.executor.model
        return model is not None and model.cursor is not None

    @property
    def measured_stages(self) -> MeasuredStages | None:
        """Return what ``schedule="auto"`` has measured; None before its choice and without it."""
        return None if self._choice is None else self._choice.measured

    def begin_hooks(self) -> None:
        """Let hooks before the training initialise sharded weights as in one process."""
        if self.is_fit and (self.mesh.model.size > 1 or self.mesh.ep.size > 1):
            self._hooks.enter_context(FullDraws(self.module, self.mesh))

    def end_hooks(self) -> None:
        """End what :meth:`begin_hooks` has begun, before a step runs."""
        self._hooks.close()

    def recheck_graphs(self) -> None:
        """Check before the next step whether graphs are still valid; called on all ranks."""
        if self.graphs is not None:
            self.graphs.recheck()

    def begin_training(self) -> None:
        """Check the training data, and prepare for the first step.

        Communication: one comparison over the world on the CPU, and that of
            ``note_compiled_blocks``.
        """
        trainer = self.module.trainer
        if self.module.automatic_optimization:
            check_train_loaders(trainer, self.options, self.mesh.layout)
        check_same_everywhere(self.mesh.world_cpu, data_fields(trainer))
        self.layers.warn_of_evaluation()
        note_compiled_blocks(self.module, self.mesh, self.options)
        check_not_compiled(self.module, self.options.products)
        check_turns(self.module, self.options)
        self.state.begin_fit()

    def end_training(self) -> None:
        """Complete all parameters, and check the batches and values of the last steps.

        Weights that were kept in 8 bits are ordinary parameters afterwards.

        Communication: that of :meth:`BatchComparison.finish`, :meth:`MainParameters.wait`,
            :meth:`StepChecks.check_values` and :meth:`TrainingState.leave_eight_bits`.
        """
        self.comparison.finish()
        self.state.main.wait()
        self.state.checks.check_values(at_end=True)
        self.state.leave_eight_bits(gathers=True)

    def exclude_garbage(self) -> None:
        """Exclude the objects that exist now from garbage collection until the end of the run."""
        exclude_garbage(self._undo)

    def close(self) -> None:
        """Undo the changes of the Trainer and the module."""
        self._undo.close()


class SharedCasts:
    """Casts of weights to 8 bits that are computed once for all microbatches of a batch."""

    def __init__(self, models: Sequence[LayeredModule], options: StrategyOptions) -> None:
        casts_of_models = [model.weight_casts for model in models]
        self._casts = [casts for casts in casts_of_models if casts is not None]
        self._settings = options.products
        self._graphs = options.graph_mode

    @contextmanager
    def around(self, num_microbatches: int) -> Iterator[None]:
        """Let the microbatches of a training batch share casts if the settings permit it."""
        with ExitStack() as stack:
            settings = self._settings
            if settings is not None and settings.shares_casts(num_microbatches, self._graphs):
                for casts in self._casts:
                    stack.enter_context(casts.shared())
            yield

    def note(self, parameter: nn.Parameter) -> None:
        """Stop sharing the casts of a parameter in this batch: user code may write to it."""
        for casts in self._casts:
            casts.stop(parameter)
