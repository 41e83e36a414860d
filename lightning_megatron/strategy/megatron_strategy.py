"""Strategy that trains a LightningModule over tensor, pipeline and data-parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.cuda import RunStream
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule, join_frozen
from lightning_megatron.optimizer.ties import name_copies_as_originals
from lightning_megatron.pipeline.microbatch import is_cut
from lightning_megatron.plan.cuda_graphs import CudaGraphs, GraphMode
from lightning_megatron.plan.custom_schedule import RowFunction
from lightning_megatron.plan.fp8 import FP8, FP8Recipe
from lightning_megatron.plan.recomputation import Recomputation, Recompute
from lightning_megatron.plan.schedule import ScheduleOption
from lightning_megatron.strategy.checkpoints.run_checkpoints import (
    RunCheckpoints,
    refuse_storage_options,
)
from lightning_megatron.strategy.checkpoints.saved_weights import only_steps_change_weights
from lightning_megatron.strategy.checkpoints.single_file_loading import (
    check_training_states,
    load_full_optimizer,
    load_full_weights,
    read_entries,
)
from lightning_megatron.strategy.checkpoints.source import CheckpointSource
from lightning_megatron.strategy.checkpoints.weight_averaging import average_loaded_weights
from lightning_megatron.strategy.checks.batch_checks import check_batch
from lightning_megatron.strategy.checks.callback_checks import (
    check_callbacks,
    saves_optimizers,
    update_callbacks,
)
from lightning_megatron.strategy.checks.engine_checks import (
    check_cudnn,
    check_engine,
    check_fp8,
    load_cudnn_of_torch,
    with_plugin_recipe,
)
from lightning_megatron.strategy.checks.graph_checks import check_graphs
from lightning_megatron.strategy.checks.module_comparison import (
    check_same_module,
    hyperparameter_fields,
)
from lightning_megatron.strategy.checks.run_checks import check_data, configuration_fields
from lightning_megatron.strategy.layout_choice import choose_layout
from lightning_megatron.strategy.logs.run_table import show_choices, show_memory
from lightning_megatron.strategy.memory_estimate import (
    estimate_before_batches,
    estimate_with_batch,
    twin_before_sharding,
)
from lightning_megatron.strategy.optimization.empty_optimizers import (
    build_optimizers_of_stage,
    check_trained_somewhere,
)
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.options.records import (
    ContextOptions,
    ExpertOptions,
    JobOptions,
    LinearOptions,
    OptimizerOptions,
    PipelineOptions,
)
from lightning_megatron.strategy.options.sizes import (
    check_hosts,
    check_sizes,
    shape_of_batches,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions, documents_options
from lightning_megatron.strategy.out_of_memory import BEFORE_RUN, explain_out_of_memory
from lightning_megatron.strategy.private.callback_patches import (
    averaging_callbacks,
    count_replicas_once,
    restore_finetuning,
    skip_first_copy,
)
from lightning_megatron.strategy.private.data_loading import (
    replace_last_checkpoint_search,
    training_loader_states,
)
from lightning_megatron.strategy.private.loops import (
    attached_trainer,
    forward_zero_grad,
    publish_device_mesh,
)
from lightning_megatron.strategy.private.processes import reset_seed
from lightning_megatron.strategy.process.failure import say_refusals_once
from lightning_megatron.strategy.process.ranks import RankStrategy
from lightning_megatron.strategy.run import Run
from lightning_megatron.strategy.sharding import shard_module, start_layers
from lightning_megatron.swap import build_on_meta
from lightning_megatron.swap.hugging_face.class_tensors import to_package_names


@documents_options
class MegatronStrategy(RankStrategy):
    """Train models that are too large or too slow for one GPU, with an ordinary LightningModule.

    A Lightning batch is the contribution of one data-parallel rank to a step. It is cut into
    microbatches if ``pp`` is above 1 or ``microbatch_size`` says so, and ``training_step`` runs
    once per microbatch. Losses and logged values are averaged over the microbatches, which equals
    the whole batch's value if every sample has the same weight. With ``pp`` above 1, code after the
    call of the model runs on the last stage only, and its logged values appear on every rank.

    Its arguments are the fields of :class:`StrategyOptions`, which documents them.
    """

    strategy_name = "megatron"

    #: Function that creates the backend of CUDA graphs; None means CUDA itself.
    _make_backend: Callable[[ParallelMesh], CaptureBackend] | None = None
    _stream: RunStream | None = None

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        sequence_parallel: bool | None = None,
        schedule: ScheduleOption | RowFunction | None = None,
        microbatch_size: int | Literal["batch"] | None = None,
        recompute: Recompute | Recomputation | None = None,
        loss_chunk: int | Literal["auto", "forward"] | None = None,
        fp8: FP8Recipe | FP8 | None = None,
        cuda_graphs: GraphMode | CudaGraphs | None = None,
        async_save: bool = False,
        tensor_parallel_plan: dict[str, str] | None = None,
        pipeline_plan: dict[str, str] | None = None,
        pipeline: PipelineOptions | dict[str, Any] = PipelineOptions(),
        context: ContextOptions | dict[str, Any] = ContextOptions(),
        experts: ExpertOptions | dict[str, Any] = ExpertOptions(),
        linear: LinearOptions | dict[str, Any] = LinearOptions(),
        optimizer: OptimizerOptions | dict[str, Any] = OptimizerOptions(),
        job: JobOptions | dict[str, Any] = JobOptions(),
        layout: Literal["auto"] | dict[str, Any] | None = None,
    ) -> None:
        say_refusals_once()
        load_cudnn_of_torch()
        super().__init__(StrategyOptions.from_locals(locals()))
        self._checkpoints = RunCheckpoints()
        self._source: CheckpointSource | None = None  #: The checkpoint that was loaded last.
        #: The current run, or the last one, whose weights can still be saved.
        self._run: Run | None = None
        #: Samples of a batch of this rank, and tokens of a sample, where they are known.
        self._batches: tuple[int | None, int | None] = (None, None)
        self._twin: nn.Module | UnsupportedError | None = None
        self._shows_memory = False  #: Whether the next batch shows the estimate of a step.

    @property
    def run(self) -> Run:
        """The current run, or the last one, whose weights can still be saved.

        Raises:
            RuntimeError: Before the first ``setup``.
        """
        if self._run is None:
            raise RuntimeError(
                "parameters, optimizers and steps exist from the `setup` hook on, which no run of "
                "this strategy has reached. Call fit, validate, test or predict of its Trainer."
            )
        return self._run

    @property
    def expert_statistics(self) -> Mapping[int, StepStatistics] | None:
        """Return the token counts of this stage's routers in the last step, by layer index."""
        return None if self._run is None else self._run.layers.statistics

    @property
    @override
    def is_in_stage(self) -> bool:
        return self._run is not None and self._run.is_in_stage

    # ---- answers to queries of the Trainer

    @property
    def user_module(self) -> LightningModule:
        """Return the user's LightningModule."""
        assert self.lightning_module is not None, (
            "the Trainer connects the module before anything else"
        )
        return self.lightning_module

    @property
    def is_fitting(self) -> bool:
        """Return whether the Trainer runs ``fit``."""
        return self.user_module.trainer.state.fn == TrainerFn.FITTING

    def check_device(
        self, module: LightningModule | None = None, trainer: Trainer | None = None
    ) -> None:
        """Check that the device supports the requested CUDA graphs and matrix products.

        The launcher calls this before it starts other processes.

        Args:
            module: Module that will run; None before it is known.
            trainer: Trainer of the run; None before it is known.
        """
        device_type = self.root_device.type if self._make_backend is None else "cuda"
        precision = str(self.precision_plugin.precision)
        if self.options.linear.backend == "te":
            check_engine(self.options, self.root_device, precision)
        check_cudnn(self.options, self.root_device)
        if self.options.linear.backend_of("products") == "native":
            check_fp8(self.options.products, self.root_device, precision)
        check_graphs(self.options, device_type, precision, module, trainer)

    @override
    def _configure_launcher(self) -> None:
        self.check_device()
        super()._configure_launcher()

    @override
    def leave_mesh(self) -> None:
        super().leave_mesh()
        if self._stream is not None:
            self._stream.leave()

    @property
    @override
    def precision_plugin(self) -> MegatronPrecision:
        if not isinstance(self._precision_plugin, MegatronPrecision):
            self._precision_plugin = MegatronPrecision.from_lightning(self._precision_plugin)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer ignores its precision argument if a plugin is set, so None stays None.
        if precision_plugin is not None:
            self.options = with_plugin_recipe(self.options, precision_plugin)
            precision_plugin = MegatronPrecision.from_lightning(precision_plugin)
        self._precision_plugin = precision_plugin

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        device = torch.device("meta") if empty_init else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with build_on_meta():
            yield

    @override
    def model_to_device(self) -> None:
        assert self.model is not None, "the Trainer has connected the module"
        self.model.to(self.root_device)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # Record masks and lengths on the host, so that code that needs them later does not wait for
        # the device.
        with self.mesh.host_values.record_moves():
            return self._moved(batch, device, dataloader_idx)

    def _moved(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        if is_cut(batch):
            return [
                replace(part, data=self._moved(part.data, device, dataloader_idx)) for part in batch
            ]
        check_batch(batch, self.user_module)
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # save_checkpoint reads the optimizers themselves.
        return {}

    @override
    def configuration(self) -> dict[str, str | int]:
        fields = super().configuration()
        trainer = attached_trainer(self.user_module)
        if trainer is None:
            return fields
        options = self.options.contents().items()
        arguments = {name: value for name, value in options if name not in fields}
        hyperparameters = hyperparameter_fields(self.user_module)
        return {**fields, **configuration_fields(arguments, trainer), **hyperparameters}

    # ---- fit, validate, test or predict: before processes exist

    def check_run(self, arguments: Mapping[str, Any]) -> None:
        """Check the keyword arguments of fit, validate, test or predict before any launch."""
        if self.options.layout is not None:
            self.options = choose_layout(self, arguments)
        check_sizes(self.user_module, self.options, self.layout, arguments)
        self._batches = shape_of_batches(arguments, self.layout)
        self.check_device(self.user_module, arguments["trainer"])
        check_hosts(self.options, self.layout, self.num_processes)
        # Lightning does not pass weights_only to strategies that load after setup.
        self._checkpoints.weights_only = arguments.get("weights_only")
        if "train_dataloaders" in arguments:
            check_callbacks(arguments["trainer"], self.layout, self.options)
        environment = self.cluster_environment
        # Files may differ between hosts, whose ranks then fail together once they have met.
        if self.num_nodes == 1 and environment and not environment.creates_processes_externally:
            check_data(self.user_module, arguments)
        replace_last_checkpoint_search(arguments["trainer"], self._find_last_checkpoint)

    @override
    def explain_out_of_memory(self, error: BaseException) -> str:
        if self._run is None:
            return BEFORE_RUN
        return explain_out_of_memory(self._run, self.optimizers, error)

    def _find_last_checkpoint(self) -> str | None:
        self._checkpoints.wait()
        return self._checkpoints.find_last(self.user_module.trainer, self.mesh)

    # ---- processes and groups

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # The stream must be current before modules, hooks and optimizers are created.
        if self.options.cuda_graphs is not None and self.root_device.type == "cuda":
            self._stream = self._stream or RunStream(self.root_device)
            self._stream.enter()
        reset_seed()
        self.set_world_ranks()
        self._failure_watch.rank = self.global_rank
        mesh = self.join_mesh()
        publish_device_mesh(self.user_module, mesh)
        if mesh.model.size > 1 or mesh.ep.size > 1:
            skip_first_copy(self.user_module.trainer)

    # ---- model and optimizers

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the module, create its optimizers, and build the run."""
        assert self.accelerator is not None, "the Trainer sets the accelerator"
        self.accelerator.setup(trainer)
        count_replicas_once(trainer, self.layout.world_size // self.layout.dp)
        check_same_module(self.user_module, self.mesh, is_new=self._run is None)
        if self._run is None or self._run.module is not self.user_module:
            self._twin = twin_before_sharding(self.user_module, self.mesh)
        models = shard_module(self.user_module, self.mesh, self.options)
        if self.is_fitting:
            update_callbacks(trainer, self.user_module, self.layout, self.options)
        layers = start_layers(self.user_module, models, self.mesh, self.options)
        self._convert_module(models)
        if self.is_fitting:
            self._create_optimizers(trainer)
        self._begin_run(layers)
        if self.is_fitting:
            stages, text, self._shows_memory = estimate_before_batches(
                self.run, self.optimizers, *self._batches
            )
            precision = self.precision_plugin
            show_choices(self.user_module, self.mesh, self.options, precision, stages, text)

    def _convert_module(self, models: Sequence[LayeredModule]) -> None:
        """Move the module to its device and precision."""
        precision = self.precision_plugin
        precision.converts_inputs = not models
        self.model = precision.convert_module(self.user_module)
        self.model_to_device()
        join_frozen(models)

    def _create_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        with build_optimizers_of_stage(self.mesh), name_copies_as_originals(self.user_module):
            self.setup_optimizers(trainer)
        check_trained_somewhere(self.optimizers, self.mesh, saves_optimizers(trainer))

    def _begin_run(self, layers: LayerStates) -> None:
        previous = None if self._run is None else self._run.state
        self._run = Run(
            self.user_module,
            self.mesh,
            self.options,
            self.precision_plugin,
            self.optimizers if self.is_fitting else (),
            layers,
            self._checkpoints,
            previous,
            self._make_backend,
            self._twin,
        )
        self.setup_precision_plugin()
        forward_zero_grad(self)
        self._run.begin_hooks()

    # ---- loading of checkpoints

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the module, and the optimizers in a fit; return the entries left for Lightning."""
        self._checkpoints.wait()
        self.run.recheck_graphs()
        # An evaluation must not load the optimizers of an earlier fit of this trainer.
        optimizers = self.optimizers if self.run.is_fit else ()
        path = self.broadcast(os.fspath(checkpoint_path))
        self._source = self._checkpoints.source_of(path, self.mesh)
        if self._source.is_single_file:
            # Lightning passes its tensors to load_model_state_dict and load_optimizer_state_dict.
            return read_entries(path, bool(optimizers), self._checkpoints.weights_only)
        main = self.run.state.main
        return self._checkpoints.load(
            OpenCheckpoint.open(path),
            self.user_module,
            optimizers,
            main,
            self.mesh,
            self._make_groups,
        )

    def _make_groups(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer groups that callbacks had added before a checkpoint was saved."""
        restore_finetuning(self.user_module.trainer, self.user_module, checkpoint)
        self.run.state.attach_new(self.optimizers)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning restores single files; load_checkpoint has loaded a sharded directory.
        if not self.lightning_restore_optimizer or "state_dict" not in checkpoint:
            return
        self._load_full(checkpoint["state_dict"], strict)
        if self.run.is_fit and averaging_callbacks(self.user_module.trainer):
            average_loaded_weights(self.user_module, self.run.state.main, self.mesh)
            if "current_model_state" in checkpoint:
                self._load_full(checkpoint["current_model_state"], strict)

    def _load_full(self, full: Mapping[str, Any], strict: bool) -> None:
        renamed = to_package_names(self.user_module, full)
        load_full_weights(renamed, self.user_module, self.run.state.main, self.mesh, strict)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        # load_checkpoint fills the optimizers, unless the checkpoint is a file of another strategy.
        return self._source is not None and self._source.is_single_file

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers from another strategy's file; directories need no second load."""
        if "optimizer_states" not in checkpoint:
            return
        self._make_groups(checkpoint)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        check_training_states(checkpoint, self.optimizers, schedulers)
        weights = checkpoint["state_dict"]
        main = self.run.state.main
        states = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        for index, (optimizer, saved) in enumerate(states):
            load_full_optimizer(index, optimizer, saved, weights, self.user_module, main, self.mesh)

    # ---- training

    @override
    def on_train_start(self) -> None:
        self.run.end_hooks()
        self.run.begin_training()
        self._checkpoints.restore_random_states(self.root_device)
        module = self.user_module
        self._checkpoints.defers_copies = only_steps_change_weights(module, module.trainer)
        self.run.exclude_garbage()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.poll()
        if self._shows_memory:
            self._shows_memory = False
            memory = estimate_with_batch(self.run, self.optimizers, batch)
            show_memory(self.user_module, self.mesh, *memory)
        if self.options.async_save and self.user_module.trainer.global_step:
            main = self.run.state.main
            self._checkpoints.reserve(self.user_module, self.optimizers, main, self.mesh)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of all microbatches, and finish gradients before a step."""
        output = self.run.step.train(args, kwargs)
        # The optimizer's update comes next, and may overwrite weights that a save still copies.
        self._checkpoints.wait_for_snapshot()
        return output

    @override
    def on_train_end(self) -> None:
        self._synchronise_buffers()
        self.run.end_training()
        self._checkpoints.wait()

    @override
    def on_validation_start(self) -> None:
        self.run.end_hooks()
        self._synchronise_buffers()

    @override
    def on_test_start(self) -> None:
        self._synchronise_buffers()

    @override
    def on_predict_start(self) -> None:
        self._synchronise_buffers()

    @override
    def on_validation_end(self) -> None:
        self.run.comparison.finish()
        if self.user_module.trainer.sanity_checking:
            self.run.begin_hooks()

    @override
    def on_test_end(self) -> None:
        self.run.comparison.finish()

    @override
    def on_predict_end(self) -> None:
        self.run.comparison.finish()

    def _synchronise_buffers(self) -> None:
        """Copy the buffers of the first data rank; a collective over the data axis."""
        if self._mesh is not None:
            self.run.buffers.share(look=True)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.run.step.evaluate("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.run.step.evaluate("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.run.step.evaluate("predict_step", args)

    # ---- saving of checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards of the model's own parameters by name."""
        self.run.state.main.wait()
        return self.user_module.state_dict()

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write a directory that any layout can load; a collective over all ranks."""
        refuse_storage_options(storage_options)
        is_in_run = self._mesh is not None
        self._synchronise_buffers()
        with self.temporary_mesh() as mesh:
            self._checkpoints.save(
                self.broadcast(os.fspath(filepath)),
                checkpoint,
                self.user_module,
                self.optimizers,
                self.run.state.main,
                mesh,
                training_loader_states(self.user_module.trainer),
                background=is_in_run and self.options.async_save and self.run.is_fit,
            )
            if not is_in_run:
                self._checkpoints.close()

    def finish_saves(self) -> None:
        """Wait for the save in progress; a collective over all ranks."""
        self._checkpoints.wait()

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, after any save in progress is complete."""
        self._checkpoints.remove(filepath, self._mesh)

    # ---- end

    @override
    def teardown(self) -> None:
        """Release the resources of the run: hooks, signal handlers and process groups."""
        if self._run is not None:
            self._run.close()
        self._checkpoints.close(abandon=self._failure_watch.has_failed)
        self.leave_mesh()
        if self.lightning_module is not None:
            publish_device_mesh(self.lightning_module, None)
        assert self.cluster_environment is not None, "the Trainer sets the cluster environment"
        assert self.accelerator is not None, "the Trainer sets the accelerator"
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._failure_watch.cleanup_done()


StrategyRegistry.register(
    MegatronStrategy.strategy_name,
    MegatronStrategy,
    description=(MegatronStrategy.__doc__ or "").partition("\n")[0],
    # This module may be imported again, as after an import that has failed.
    override=True,
)
