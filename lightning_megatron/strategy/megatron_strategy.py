"""Strategy that trains a LightningModule over tensor, pipeline and data-parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.strategy import plain_checkpoint
from lightning_megatron.strategy.callback_checks import check_callbacks, without_example
from lightning_megatron.strategy.checkpoints import RunCheckpoints
from lightning_megatron.strategy.dataloaders import needs_distributed_sampler
from lightning_megatron.strategy.garbage import LongLived
from lightning_megatron.strategy.model_strategy import ModelStrategy
from lightning_megatron.strategy.options import StrategyOptions
from lightning_megatron.strategy.parameter_data import seeing_data
from lightning_megatron.strategy.private import (
    call_nothing_before_epoch_ends,
    find_last_checkpoint_by,
    inject_samplers_as_before,
    inject_samplers_where,
    publish_device_mesh,
    training_loader_states,
)
from lightning_megatron.strategy.private_callbacks import foresee_no_saves, foresee_saves, restore_finetuning
from lightning_megatron.strategy.weight_averaging import (
    average_mains,
    average_models,
    averaging_callback,
)
from lightning_megatron.strategy.weight_changes import only_steps_change_weights
from lightning_megatron.swap.foreign_names import to_own_names


class MegatronStrategy(ModelStrategy):
    """Train models that are too large or too slow for one GPU, with an ordinary LightningModule.

    A Lightning batch is what one data-parallel rank contributes to a step. With ``pp`` above 1, or where
    ``microbatch_size`` says so, it is cut into microbatches, and ``training_step`` runs once for each of them; losses
    and logged values are averaged over the microbatches, so that they equal those of the whole batch where every sample
    weighs alike. With ``pp`` above 1, code after the call of the model runs on the last stage alone, and what it logs
    appears on every rank.

    Args:
        tp: Ranks that share every matrix product (tensor parallel).
        pp: Stages that the layers are cut into (pipeline parallel).
        vpp: Chunks of layers on every stage (virtual pipeline stages); above 1 shortens the pipeline's bubble.
        cp: Ranks that share a sequence (context parallel); only 1 is available yet.
        ep: Ranks that share the experts of a layer in equal parts (expert parallel). They are ranks of tp and dp, too:
            ep and etp divide the same ranks otherwise.
        etp: Ranks that share each expert's matrix products. None means as many as tp.
        sequence_parallel: Whether activations between tensor-parallel regions are cut along the sequence, which must
            divide by tp then. None means True if tp is above 1. It concerns this package's models, and plain modules
            where their tensor_parallel_plan says "sequence"; others take whole sequences.
        schedule: Order of forward and backward passes: 1f1b, interleaved or gpipe. None means interleaved if vpp is
            above 1, else 1f1b.
        microbatch_size: Samples of one data-parallel rank in a microbatch, or "batch" for one microbatch. None means
            one without pipeline stages; with them the fewest microbatches of equal size that keep the stages idle for
            at most a fifth of a step, as the log says: at least 4 * (pp - 1) / vpp, or one for each sample.
        microbatch_group_size: Microbatches that run through one chunk before the next chunk has its turn (interleaved
            only). None means one for each stage.
        check_microbatches: Whether the first batch is tried, without gradients, where microbatches cut its samples, or
            a plan its features: loss and logs of parts must be those of all, and batch norms, steps that count their
            calls and the like are refused. False says that what parts compute is meant.
        order: Axes from the fastest to the slowest: neighbours on the first axis are neighbouring ranks.
        recompute: Which activations are computed again in the backward pass instead of kept: none, selective (the
            attention core), experts (what experts make of their rows) or full (whole blocks). None leaves the models'
            own setting.
        expert_transport: How tokens come to the ranks of their experts: all_gather (static sizes; ranks must have
            equally many tokens), all_to_all (each token to its experts alone; the host reads sizes) or one_sided (each
            token to its experts alone, with the sizes of all_gather, into the memory of other GPUs of the host, which
            needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment where there is NVLink multicast). auto takes
            static sizes where a token goes to as many experts as there are ranks of ep or more: one_sided where GPUs
            can and there is no shared expert to run beside, else all_gather; and all_to_all elsewhere.
        tensor_parallel_plan: How plain torch.nn modules are cut over tp: name patterns and kinds, such as
            {"*.up": "column", "*.down": "row"}. None swaps the blocks that are known.
        pipeline_plan: What the stages share of a model that is not of this package: {"model.layers": "blocks"} names
            its nn.ModuleList or nn.Sequential. Modules defined before it are those of the first stage alone,
            after it those of the last, unless they are given "first" or "last". None asks a Hugging Face model.
        timeout: Seconds that a collective may wait for a rank before the job fails. None leaves torch's default.
        process_group_backend: Communication library: nccl or gloo. None means nccl on GPUs, else gloo.
        nccl_options: NCCL settings by axis, such as {"pp": {"max_ctas": 4}}, or the path of a YAML file with such a
            mapping; Megatron-LM's files and names are understood. Axes: world, tp, cp, dp, pp, data (dp x cp), model
            (tp x pp), embedding, position_embedding, etp, ep, edp. Settings: high_priority, and fields of NCCL's
            configuration such as min_ctas, max_ctas, cga_cluster_size and net_name.
        signal_check_interval: Training batches between two agreements of all ranks on a received SIGTERM.
        zero: 1 divides the optimizer's state among the data-parallel ranks (distributed optimizer): each keeps and
            updates its part of the main parameters, and all gather the result. 0 gives every rank the whole state.
        optimizer_slices: What a rank's part is made of under zero=1: elements (equal shares that cut through
            parameters; for optimizers that treat every element alike, such as AdamW or SGD) or parameters (whole ones,
            dealt out by size). auto tries the optimizer out on small tensors and takes the first where it changes
            nothing.
        bucket_size: Gradients are summed, and parameters gathered, in messages of about this size (elements).
        gradient_dtype: Type in which mixed precisions sum gradients: float32, or bfloat16 for half of the memory.
        overlap_gradients: Whether the sum over the data-parallel ranks starts inside the backward pass.
        overlap_parameters: Whether updated parameters are gathered while the next forward pass begins. None means
            True unless a callback might read parameters before.
        overlap_tensor_parallel: Whether the matrix products at the border of a sequence that tp shares are cut into
            pieces that run beside their communication, through memory that the ranks share: in half precisions on GPUs
            of one host that reach each other directly (NVLink). It takes two buffers of a microbatch's activation.
        check_gradients: When values that are infinite or not a number end the run, naming rank, batch and parameter.
            None looks at losses, gradients and weights where values are logged (log_every_n_steps) and at the end, in
            one pass over them (about 1.5 % of such a step); not with 16-mixed, whose loss scale skips such steps. True
            looks at the gradients of every step before the optimizer uses them, and waits for the device. False: never.
        replica_check_interval: Optimizer steps between two comparisons of what several ranks hold or compute alike
            (parameters, and gradients of those that tp does not cut), after the first two steps, where it is always
            done. One message for each axis, and a wait for the device: about as long as one optimizer step, so that
            the default takes less than half a percent. 0 means the first steps alone.
        async_save: Whether checkpoints are written behind the training.
        moments_dtype: Type of Adam's and AdamW's moments: float32, or bfloat16 for half of their memory, which needs
            fused=True in the optimizer and a GPU. bfloat16 keeps 8 bits of each moment; they are rounded up or down by
            a draw that depends on the step and the element's place alone, so that their means stay right. Runs repeat
            exactly under one layout, but not across layouts.
    """

    strategy_name = "megatron"

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        sequence_parallel: bool | None = None,
        schedule: Literal["1f1b", "interleaved", "gpipe"] | None = None,
        microbatch_size: int | Literal["batch"] | None = None,
        microbatch_group_size: int | None = None,
        check_microbatches: bool = True,
        order: str = "tp-cp-ep-dp-pp",
        recompute: Literal["none", "selective", "experts", "full"] | None = None,
        expert_transport: Literal["auto", "all_gather", "all_to_all", "one_sided"] = "auto",
        tensor_parallel_plan: dict[str, str] | None = None,
        pipeline_plan: dict[str, str] | None = None,
        timeout: float | timedelta | None = None,
        process_group_backend: Literal["nccl", "gloo"] | None = None,
        nccl_options: dict[str, dict[str, Any]] | str | None = None,
        signal_check_interval: int = 10,
        zero: Literal[0, 1] = 1,
        optimizer_slices: Literal["auto", "elements", "parameters"] = "auto",
        bucket_size: int = 40_000_000,
        gradient_dtype: Literal["float32", "bfloat16"] = "float32",
        overlap_gradients: bool = True,
        overlap_parameters: bool | None = None,
        overlap_tensor_parallel: bool = False,
        check_gradients: bool | None = None,
        replica_check_interval: int = 200,
        async_save: bool = False,
        moments_dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        options = StrategyOptions(
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            ep=ep,
            etp=etp,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            microbatch_size=microbatch_size,
            microbatch_group_size=microbatch_group_size,
            check_microbatches=check_microbatches,
            order=order,
            recompute=recompute,
            expert_transport=expert_transport,
            tensor_parallel_plan=tensor_parallel_plan,
            pipeline_plan=pipeline_plan,
            timeout=timeout,
            process_group_backend=process_group_backend,
            nccl_options=nccl_options,
            signal_check_interval=signal_check_interval,
            zero=zero,
            optimizer_slices=optimizer_slices,
            bucket_size=bucket_size,
            gradient_dtype=gradient_dtype,
            overlap_gradients=overlap_gradients,
            overlap_parameters=overlap_parameters,
            overlap_tensor_parallel=overlap_tensor_parallel,
            check_gradients=check_gradients,
            replica_check_interval=replica_check_interval,
            async_save=async_save,
            moments_dtype=moments_dtype,
        )
        super().__init__(options)
        self._checkpoints = RunCheckpoints()
        self._long_lived = LongLived()
        #: Whose callbacks are told of what this strategy does.
        self._prepared: Trainer | None = None
        self._for_the_run = ExitStack()

    # ---- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        # load_checkpoint fills the optimizers, unless the checkpoint is a file of another strategy.
        return self._checkpoints.is_plain

    @override
    def check_run(self, arguments: Mapping[str, Any]) -> None:
        super().check_run(arguments)
        # Lightning does not pass it on to a strategy that loads after its setup.
        self._checkpoints.weights_only = arguments.get("weights_only")
        if "train_dataloaders" in arguments:
            check_callbacks(arguments["trainer"], self.layout)
        find_last_checkpoint_by(arguments["trainer"], self._find_last_checkpoint)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._prepared = trainer
        inject_samplers_where(trainer, lambda loader: needs_distributed_sampler(loader, self.data_parallel_size))
        if trainer.state.fn == TrainerFn.FITTING:
            assert self._state is not None, "setup has run"
            self._for_the_run.enter_context(seeing_data(self._state.main.written.note))
            if self.layout.pp > 1:
                self._for_the_run.enter_context(without_example(self.user_module))
            average_mains(trainer, self.user_module, self._state.main, self.mesh)
        if self.options.async_save:
            foresee_saves(trainer, self._checkpoints.foresees, self._checkpoints.link)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._checkpoints.restore_random_states(self.root_device)
        self._checkpoints.defers_copies = only_steps_change_weights(self.user_module, self.user_module.trainer)
        self._long_lived.freeze()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._checkpoints.poll()
        if self.options.async_save and self.user_module.trainer.global_step and self._state is not None:
            self._checkpoints.reserve(self.user_module, self.optimizers, self._state.main, self.mesh)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        # The optimizer's update comes next.
        self._checkpoints.hold_updates()
        return output

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._state is not None:
            self._state.check_values(at_end=True)
        self._checkpoints.wait()

    @override
    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's shards of the model's own parameters by name."""
        assert self._state is not None, "setup has run"
        self._state.main.wait()
        return self.user_module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # save_checkpoint reads the optimizers themselves.
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a directory that any layout can load; a collective over all ranks."""
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` is not supported, because every rank writes its "
                "own files. Leave "
                "it out."
            )
        assert self._state is not None, "setup has run"
        in_run, trainer = self._mesh is not None, self.user_module.trainer
        self.settle_buffers()
        background = in_run and self.options.async_save and trainer.state.fn == TrainerFn.FITTING
        with self.temporary_mesh() as mesh:
            self._checkpoints.save(
                self.broadcast(os.fspath(filepath)),
                checkpoint,
                self.user_module,
                self.optimizers,
                self._state.main,
                mesh,
                training_loader_states(trainer),
                background,
            )
            if not in_run:
                self._checkpoints.close()

    @override
    def finish_saves(self) -> None:
        self._checkpoints.wait()

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, after any save in progress is complete."""
        self._checkpoints.remove(filepath, self._mesh)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the module, and the optimizers in a fit; return the entries left for Lightning."""
        assert self._state is not None, "setup has run"
        self._checkpoints.wait()
        # An earlier fit of this trainer has left optimizers, which evaluation has nothing to do with.
        optimizers = self.optimizers if self.user_module.trainer.state.fn == TrainerFn.FITTING else ()
        path = self.broadcast(os.fspath(checkpoint_path))
        return self._checkpoints.load(
            path, self.user_module, optimizers, self._state.main, self.mesh, self._make_groups
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Sharded checkpoints are in the module already; files of other strategies come with full tensors.
        if self._checkpoints.is_plain and "state_dict" in checkpoint:
            assert self._state is not None, "setup has run"
            trainer, full = self.user_module.trainer, checkpoint["state_dict"]
            if trainer.state.fn == TrainerFn.FITTING and averaging_callback(trainer) is not None:
                full = checkpoint.get("current_model_state", full)
            full = to_own_names(self.user_module, full)
            plain_checkpoint.load_state_dict(full, self.user_module, self._state.main, self.mesh, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers from another strategy's file; directories need no second load."""
        if "optimizer_states" in checkpoint:
            assert self._state is not None, "setup has run"
            self._make_groups(checkpoint)
            main, full = self._state.main, checkpoint["state_dict"]
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                plain_checkpoint.load_optimizer(optimizer, saved, full, self.user_module, main, self.mesh)

    def _make_groups(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer groups that callbacks had added before a checkpoint was saved."""
        assert self._state is not None, "setup has run"
        restore_finetuning(self.user_module.trainer, self.user_module, checkpoint)
        self._state.take_in(self.optimizers)

    def _find_last_checkpoint(self) -> str | None:
        self._checkpoints.wait()
        return self._checkpoints.find_last(self.user_module.trainer, self.mesh)

    # ---- end

    @override
    def teardown(self) -> None:
        """Release the resources of the run: hooks, signal handlers and process groups."""
        self._long_lived.release()
        self._for_the_run.close()
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        if self._metrics is not None:
            self._metrics.restore()
        if self._state is not None:
            self._state.release()
        self._steps, self._buffers = None, None
        if self._prepared is not None:
            foresee_no_saves(self._prepared)
            inject_samplers_as_before(self._prepared)
            average_models(self._prepared)
            call_nothing_before_epoch_ends(self._prepared)
            self._prepared = None
        self._checkpoints.close(abandon=self._watch.has_failed)
        self.leave_mesh()
        if self.lightning_module is not None:
            publish_device_mesh(self.lightning_module, None)
        assert self.cluster_environment is not None, "the Trainer sets the cluster environment"
        assert self.accelerator is not None, "the Trainer sets the accelerator"
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._watch.cleanup_done()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``Trainer(strategy="megatron")`` once."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=(cls.__doc__ or "").partition("\n")[0])


MegatronStrategy.register_strategies(StrategyRegistry)
