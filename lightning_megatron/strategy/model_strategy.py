"""Modules, optimizers and steps: the part of the strategy that depends on the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.checks.callback_checks import (
    saves_optimizers,
    update_callbacks,
)
from lightning_megatron.strategy.checks.run_checks import (
    check_module,
    check_train_loaders,
    configuration_fields,
    data_fields,
    digest_of,
    pipelined_module,
)
from lightning_megatron.strategy.mesh_strategy import MeshStrategy
from lightning_megatron.strategy.modules.attribute_sync import AttributeSync
from lightning_megatron.strategy.modules.buffers import SharedBuffers, check_synchronised_norms
from lightning_megatron.strategy.modules.rebind import MetricGroups, find_models, rebind_mesh
from lightning_megatron.strategy.optimization.empty_optimizers import (
    allowing_empty_optimizers,
    check_trained_somewhere,
)
from lightning_megatron.strategy.optimization.finite_watch import checks_of
from lightning_megatron.strategy.optimization.mixtures import ExpertsOfRun, check_experts
from lightning_megatron.strategy.optimization.parameter_readers import (
    SEES_PARTS,
    gradient_reader,
    parameter_reader,
)
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.optimization.training_state import TrainingState, division_of
from lightning_megatron.strategy.options.sizes import check_hosts, check_sizes
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.callback_patches import (
    patch_finetuning,
    record_module_names_again,
)
from lightning_megatron.strategy.private.loops import (
    accumulates,
    call_after_backward_hooks,
    call_before_epoch_ends,
    forward_zero_grad,
    is_logged,
    run_backward,
    skips_backward,
    total_batch_index,
)
from lightning_megatron.strategy.private.user_module import attached_trainer
from lightning_megatron.strategy.process.signals import SignalAgreement
from lightning_megatron.strategy.step.raw_backward import surrounding_backward
from lightning_megatron.strategy.step.runner import BackwardPasses, StepResult, StepRunner
from lightning_megatron.strategy.step.scheduled_loop import Forget, install_scheduled_loop
from lightning_megatron.strategy.trials.feature_trial import FeatureTrials
from lightning_megatron.strategy.trials.microbatch_check import MicrobatchTrials
from lightning_megatron.strategy.trials.uncut_modules import naming_uncut_modules
from lightning_megatron.swap import building_on_meta, parallelize
from lightning_megatron.swap.decide.model_plan import whole_parts
from lightning_megatron.training.ties import naming_copies_as_originals

log = logging.getLogger(__name__)


class ModelStrategy(MeshStrategy):
    """Strategy that shards the module, owns its main parameters and runs its steps.

    Args:
        options: Options of the strategy.
    """

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        super().__init__(
            options.sizes(),
            options.shards_sequence,
            options.timeout_delta,
            options.process_group_backend,
            options.nccl_options,
            options.overlap_tensor_parallel,
        )
        self._state: TrainingState | None = None
        self._executor: PipelineExecutor | None = None
        self._experts: ExpertsOfRun | None = None
        self._steps: StepRunner | None = None
        self._signals: SignalAgreement | None = None
        self._metrics: MetricGroups | None = None
        self._has_checked_batch = False
        self._forget: Forget | None = None

    @property
    def user_module(self) -> LightningModule:
        """Return the user's LightningModule."""
        assert self.lightning_module is not None, (
            "the Trainer connects the module before anything else"
        )
        return self.lightning_module

    @property
    def expert_statistics(self) -> Mapping[int, StepStatistics] | None:
        """Return the token counts of this stage's routers in the last step, by layer index."""
        return None if self._experts is None else self._experts.statistics

    # ---- precision

    @property
    @override
    def precision_plugin(self) -> MegatronPrecision:
        if not isinstance(self._precision_plugin, MegatronPrecision):
            self._precision_plugin = MegatronPrecision.from_lightning(self._precision_plugin)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer ignores its precision argument if a plugin is set, so None stays None.
        ours = (
            None if precision_plugin is None else MegatronPrecision.from_lightning(precision_plugin)
        )
        self._precision_plugin = ours

    # ---- setup

    @override
    def check_run(self, arguments: Mapping[str, Any]) -> None:
        check_sizes(self.user_module, self.options, self.layout, arguments)
        check_hosts(self.options, self.layout, self.num_processes)

    @override
    def configuration(self) -> dict[str, str | int]:
        layout, trainer = super().configuration(), attached_trainer(self.user_module)
        arguments = {
            name: value for name, value in self.options.as_dict().items() if name not in layout
        }
        return layout if trainer is None else {**layout, **configuration_fields(arguments, trainer)}

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with building_on_meta():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None, "the Trainer sets the accelerator"
        module, fitting = self.user_module, trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        rebind_mesh(module, self.mesh)
        plans = self.options.tensor_parallel_plan, self.options.pipeline_plan
        record_module_names_again(trainer)
        shows_progress, needs_tables = (
            trainer.progress_bar_callback is not None,
            self.options.needs_tables,
        )
        for record in parallelize(module, self.mesh, *plans, shows_progress, needs_tables):
            rank_zero_info(str(record))
        if plans[0] is not None and self.mesh.tp.size > 1:
            rank_zero_info(f"tensor_parallel_plan: {whole_parts(module) or 'everything is cut.'}")
        check_module(module, self.mesh)
        if fitting:
            update_callbacks(trainer, module, self.layout)
        models = find_models(module, self.options.recompute)
        check_experts(models, self.layout, self.options.recompute)
        self._experts = ExpertsOfRun(models, self.mesh, self.options.expert_transport)
        for note in self._experts.notes():
            rank_zero_info(note)
        kind = self.root_device.type
        for note in self.options.notes(
            self.precision_plugin.precision, kind, has_models=bool(models)
        ):
            rank_zero_info(note)
        self.precision_plugin.converts_inputs = not models
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._metrics = MetricGroups(module, self.mesh)
        check_synchronised_norms(module, self.mesh)
        self._buffers = SharedBuffers(module, self.mesh)
        self._executor = PipelineExecutor(
            self.mesh,
            pipelined_module(module, self.mesh),
            self.options.schedule_name,
            self.options.microbatch_group_size,
        )
        kept = AttributeSync(module, self.mesh)
        call_before_epoch_ends(trainer, kept.share)
        mesh, options = self.mesh, self.options
        trials = (
            (MicrobatchTrials(module, mesh), FeatureTrials(module, mesh))
            if options.check_microbatches
            else None
        )
        self._steps = StepRunner(
            mesh, self._executor, options.microbatches(self.layout), kept, trials
        )
        self._setup_training(trainer, fitting)

    def _setup_training(self, trainer: Trainer, fitting: bool) -> None:
        if fitting:
            self._reset_optimizers_and_schedulers()
            with allowing_empty_optimizers(self.mesh), naming_copies_as_originals(self.user_module):
                self.setup_optimizers(trainer)
            check_trained_somewhere(self.optimizers, self.mesh, saves_optimizers(trainer))
        previous, self._state = self._state, self._state_of_run(fitting)
        if previous is not None and previous is not self._state:
            previous.release()
        self.precision_plugin.bind(self._state)
        self.setup_precision_plugin()
        if not fitting:
            return
        forward_zero_grad(self)
        patch_finetuning(
            trainer, lambda: {} if self._state is None else self._state.main.main_parameters
        )
        if self._gathers_late(trainer):
            self._state.overlap_gathers()
        reader = gradient_reader(trainer)
        if reader is not None or not self.user_module.automatic_optimization:
            self._state.gradients.expose()
        if reader is not None and self.mesh.model.size > 1:
            rank_zero_info(f"{reader} {SEES_PARTS}")
        install_scheduled_loop(trainer, self._prepare_forget)
        self._has_checked_batch = False
        self._signals = SignalAgreement(
            trainer, self.mesh, self.options.signal_check_interval, self.finish_saves
        )
        self._signals.install()

    def finish_saves(self) -> None:
        """Wait for the save in progress; a collective over all ranks."""

    def _state_of_run(self, fitting: bool) -> TrainingState:
        """Return a new state for a fit; evaluation reuses the state of an earlier fit."""
        module, previous = self.user_module, self._state
        if not fitting and previous is not None and previous.belongs_to(module):
            previous.mesh = self.mesh
            return previous
        options, dtypes = self.options, self.precision_plugin.dtypes
        division = division_of(options, dtypes.main_parameters if fitting else None)
        return TrainingState(
            module,
            self.optimizers if fitting else (),
            self.mesh,
            division,
            self.precision_plugin.loss_scale,
            checks_of(options.check_gradients, dtypes.scales_loss, module.trainer),
            previous.main if previous is not None else None,
            options.replica_check_interval,
        )

    def _gathers_late(self, trainer: Trainer) -> bool:
        """Return whether parameters are gathered during the next forward pass."""
        chosen = self.options.overlap_parameters
        if chosen is not None or self.mesh.data.size == 1:
            return bool(chosen)
        reader = parameter_reader(trainer)
        if reader is not None:
            rank_zero_info(
                f"Updated parameters are gathered before {reader} runs, which might read them, and "
                "not beside the next forward pass; overlap_parameters=True says that it does not."
            )
        return reader is None

    @override
    def model_to_device(self) -> None:
        assert self.model is not None, "the Trainer has connected the module"
        self.model.to(self.root_device)

    @override
    def on_train_start(self) -> None:
        trainer = self.user_module.trainer
        if self.user_module.automatic_optimization:
            check_train_loaders(trainer, self.options, self.layout)
        check_same_everywhere(self.mesh.world_cpu, data_fields(trainer))
        if self._state is not None:
            assert self._experts is not None, "setup has run"
            self._experts.warn_of_evaluation()
            self._state.begin_fit()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if (
            isinstance(batch, list)
            and batch
            and all(isinstance(part, Microbatch) for part in batch)
        ):
            move = super().batch_to_device
            return [
                Microbatch(move(part.data, device, dataloader_idx), part.num_samples)
                for part in batch
            ]
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---- steps

    @property
    @override
    def is_in_stage(self) -> bool:
        model = None if self._executor is None else self._executor.model
        return model is not None and model.cursor is not None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of all microbatches, and reduce gradients before a step."""
        assert self._steps is not None, "setup has run"
        module, trainer = self.user_module, self.user_module.trainer
        step, precision = total_batch_index(trainer), self.precision_plugin
        assert self._buffers is not None, "setup has run"
        self._buffers.begin_batch(not module.automatic_optimization or not accumulates(trainer))
        if not module.automatic_optimization:
            self._prepare_step(step)
            self._wait_for_parameters()
            self.mesh.random.begin_microbatch(step, self.mesh.dp.rank)
            return self._step_by_hand(*args, **kwargs)
        self._check_first_batch(args[0])
        self._prepare_step(step)
        passes = None if skips_backward(trainer) else self._backward_passes()
        with precision.train_step_context():
            result = self._steps.train(
                module,
                args[0],
                args[1:],
                step=step,
                passes=passes,
                divisor=trainer.accumulate_grad_batches,
                factor=precision.loss_factor,
                values_to_log=precision.values_to_log(),
            )
            if passes is not None:
                self._after_backward(result)
        return result.output

    def _backward_passes(self) -> BackwardPasses:
        assert self._state is not None, "setup has run"
        assert self._experts is not None, "setup has run"
        overlaps = self.options.overlap_gradients and not accumulates(self.user_module.trainer)
        return BackwardPasses(
            self._forget_gradients,
            self._run_backward,
            self._state.gradients.observer if overlaps else None,
            self._state.checks.inspector,
            self._experts.loss_weight,
        )

    def _forget_gradients(self) -> None:
        assert self._state is not None, "setup has run"
        if self._forget is not None:
            self._forget()
        if self.mesh.pp.size > 1:
            self._state.gradients.hide()

    def _run_backward(self, loss: Tensor) -> None:
        assert self._state is not None, "setup has run"
        run_backward(self.user_module.trainer, loss, self._state.gradients.hide)

    def _prepare_forget(self, forget: Forget | None) -> None:
        self._forget = forget

    def _step_by_hand(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step of manual optimization."""
        assert self._experts is not None, "setup has run"
        if self._experts.loss_weight is not None:
            self._experts.loss_weight.value = self.precision_plugin.loss_factor
        assert self._steps is not None, "setup has run"
        assert self._state is not None, "setup has run"
        guard = self._steps.reads.guard(self.user_module, "training_step")
        passes = surrounding_backward(self._state.gradients.raw_backward)
        uncut = naming_uncut_modules(self.user_module, self.mesh)
        with self.precision_plugin.train_step_context(), guard, passes, uncut:
            output = self.user_module.training_step(*args, **kwargs)
        self._experts.finish_step()
        return output

    def _after_backward(self, result: StepResult) -> None:
        assert self._state is not None, "setup has run"
        assert self._experts is not None, "setup has run"
        trainer = self.user_module.trainer
        will_step = not accumulates(trainer)
        self._state.checks.note("loss", result.loss)
        self._state.gradients.end_batch(result.num_tokens, will_step)
        if will_step:
            self._experts.finish_step()
        call_after_backward_hooks(trainer)

    def _prepare_step(self, step: int) -> None:
        """Update the set of trained parameters, and adopt weights that user code has written."""
        assert self._state is not None, "setup has run"
        trainer = self.user_module.trainer
        self._state.checks.begin_step(step, not accumulates(trainer) and is_logged(trainer))
        self._state.attach_new(self.optimizers, trainer.current_epoch)
        self._state.main.user_writes.adopt_noted()

    def _check_first_batch(self, batch: Any) -> None:
        """Compare the first batch over the ranks that must see the same one."""
        if self._has_checked_batch or self.mesh.model.size == 1:
            return
        self._has_checked_batch = True
        check_same_everywhere(
            self.mesh.model_cpu,
            {"first training batch of its data-parallel rank": digest_of(batch)},
        )

    def _wait_for_parameters(self) -> None:
        if self._state is not None:
            self._state.main.wait()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args)

    def _evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        assert self._steps is not None, "setup has run"
        self._wait_for_parameters()
        batch, rest = args[0], args[1:]
        step = rest[0] if rest and isinstance(rest[0], int) else 0
        # The second argument is the dataloader's index, if there are several.
        return self._steps.evaluate(
            self.user_module, name, batch, rest, step=step, key=(name, *rest[1:])
        )
