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

from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.schedule import ScheduleName
from lightning_megatron.strategy.checkpoints import plain_checkpoint
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from lightning_megatron.strategy.checkpoints.weight_averaging import (
    average_main_parameters,
    average_model_parameters,
    averaging_callback,
)
from lightning_megatron.strategy.checkpoints.weight_changes import only_steps_change_weights
from lightning_megatron.strategy.checks.callback_checks import check_callbacks, hiding_example_input
from lightning_megatron.strategy.model_strategy import ModelStrategy
from lightning_megatron.strategy.optimization.parameter_data import seeing_data
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.callback_patches import (
    announce_no_saves,
    announce_saves,
    restore_finetuning,
)
from lightning_megatron.strategy.private.checkpoint_search import replace_last_checkpoint_search
from lightning_megatron.strategy.private.data_loading import (
    filter_sampler_injection,
    restore_sampler_injection,
    training_loader_states,
)
from lightning_megatron.strategy.private.loops import restore_epoch_ends
from lightning_megatron.strategy.private.user_module import publish_device_mesh
from lightning_megatron.strategy.process.dataloaders import needs_distributed_sampler
from lightning_megatron.strategy.process.garbage import LongLivedObjects
from lightning_megatron.swap.hugging_face.state_dict import to_own_names


class MegatronStrategy(ModelStrategy):
    """Train models that are too large or too slow for one GPU, with an ordinary LightningModule.

    A Lightning batch is the contribution of one data-parallel rank to a step. It is cut into
    microbatches if ``pp`` is above 1 or ``microbatch_size`` says so, and ``training_step`` runs
    once per microbatch. Losses and logged values are averaged over the microbatches, which equals
    the whole batch's value if every sample has the same weight. With ``pp`` above 1, code after the
    call of the model runs on the last stage only, and its logged values appear on every rank.

    Args:
        tp: Ranks that share every matrix product (tensor parallel).
        pp: Stages that the layers are cut into (pipeline parallel).
        vpp: Chunks of layers per stage (virtual pipeline stages); values above 1 shorten the
            pipeline bubble.
        cp: Ranks that share a sequence (context parallel); only 1 is available yet.
        ep: Ranks that share the experts of a layer in equal parts (expert parallel). ep and etp
            divide the ranks of tp and dp in another way, and add no ranks.
        etp: Ranks that share each expert's matrix products. None means tp.
        sequence_parallel: Whether activations between tensor-parallel regions are sharded along the
            sequence, whose length must then be divisible by tp. None means True if tp is above 1.
            It applies to this package's models and to plain modules whose tensor_parallel_plan says
            "sequence"; other modules receive whole sequences.
        schedule: Order of forward and backward passes: 1f1b, interleaved or gpipe. None means
            interleaved if vpp is above 1, else 1f1b.
        microbatch_size: Samples per microbatch of one data-parallel rank, or "batch" for one
            microbatch. None means one microbatch without pipeline stages. With stages, None means
            the fewest equal microbatches with at most a fifth of the step idle: at least 4 * (pp -
            1) / vpp, or one per sample. The log names the choice.
        microbatch_group_size: Microbatches that run through one chunk before the next chunk runs
            (interleaved only). None means pp.
        check_microbatches: Whether the first batch is tried without gradients, if microbatches cut
            its samples or a plan cuts its features. Loss and logs of the parts must equal those of
            the whole; batch norms, steps that count their calls and similar code are refused. False
            skips the trial.
        order: Axes from the fastest to the slowest; neighbours on the first axis are neighbouring
            ranks.
        recompute: Activations that the backward pass recomputes: none, selective (attention core),
            experts (outputs of experts) or full (whole blocks). None keeps the models' own setting.
        expert_transport: Transport of tokens to the ranks of their experts. all_gather has static
            sizes and needs equal token counts on all ranks. all_to_all sends each token to its
            experts only, and the host reads sizes. one_sided sends each token to its experts only,
            with static sizes, into the memory of other GPUs of the host; with NVLink multicast it
            needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment. auto means all_to_all if a
            token has fewer experts than ep. Otherwise, auto means one_sided if GPUs support it and
            no shared expert runs concurrently, else all_gather.
        tensor_parallel_plan: Name patterns and kinds of cuts of plain torch.nn modules over tp,
            such as {"*.up": "column", "*.down": "row"}. None replaces known blocks.
        pipeline_plan: Parts of a model from outside this package that are cut into stages:
            {"model.layers": "blocks"} names its nn.ModuleList or nn.Sequential. Modules defined
            before it belong to the first stage, and modules after it to the last, unless the plan
            says "first" or "last". None asks a Hugging Face model.
        timeout: Seconds that a collective may wait for a rank before the job fails. None means
            torch's default.
        process_group_backend: Communication library: nccl or gloo. None means nccl on GPUs, else
            gloo.
        nccl_options: NCCL settings by axis, such as {"pp": {"max_ctas": 4}}, or the path of a YAML
            file with such a mapping; Megatron-LM's files and names are accepted. Axes: world, tp,
            cp, dp, pp, data (dp x cp), model (tp x pp), embedding, position_embedding, etp, ep,
            edp. Settings: high_priority, and fields of NCCL's configuration such as min_ctas,
            max_ctas, cga_cluster_size and net_name.
        signal_check_interval: Training batches between checks of all ranks for a received SIGTERM.
        zero: Stage of the distributed optimizer. With 1, each data-parallel rank keeps and updates
            its part of the optimizer state and main parameters, and all ranks gather the result.
            With 0, every rank has the whole state.
        optimizer_slices: Division of the optimizer state with zero=1: elements (equal shares that
            cut through parameters, for elementwise optimizers such as AdamW or SGD) or parameters
            (whole parameters, distributed by size). auto tries the optimizer on small tensors, and
            means elements if the result is unchanged.
        bucket_size: Approximate size of a message that sums gradients or gathers parameters
            (elements).
        gradient_dtype: Type in which mixed precisions sum gradients: float32, or bfloat16 for half
            of the memory.
        overlap_gradients: Whether the sum over the data-parallel ranks starts inside the backward
            pass.
        overlap_parameters: Whether updated parameters are gathered during the next forward pass.
            None means True unless a callback may read parameters before it.
        overlap_tensor_parallel: Whether the matrix products next to tp's communication of sequences
            are cut into pieces that overlap with it, through memory shared by the ranks. It needs
            half precision and GPUs of one host with direct access to each other (NVLink), and two
            buffers of a microbatch's activation.
        check_gradients: When values that are infinite or not a number end the run with rank, batch
            and parameter. None checks losses, gradients and weights at logging steps
            (log_every_n_steps) and at the end, in one pass (about 1.5 % of such a step); 16-mixed
            skips this check, because its loss scale skips such steps. True checks the gradients of
            every step before the optimizer uses them, and waits for the device. False means never.
        replica_check_interval: Optimizer steps between comparisons of replicated values
            (parameters, and gradients of parameters that tp does not cut). The first two steps are
            always compared. A comparison needs one message per axis and waits for the device, about
            as long as one optimizer step: less than half a percent by default. 0 means the first
            two steps only.
        async_save: Whether checkpoints are written in the background during training.
        moments_dtype: Type of the moments of Adam and AdamW: float32, or bfloat16 for half of their
            memory, which needs fused=True in the optimizer and a GPU. bfloat16 keeps 8 bits of each
            moment, with unbiased stochastic rounding that depends on the step and the element's
            position only. Runs repeat exactly under one layout, but not across layouts.
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
        schedule: ScheduleName | None = None,
        microbatch_size: int | Literal["batch"] | None = None,
        microbatch_group_size: int | None = None,
        check_microbatches: bool = True,
        order: str = "tp-cp-ep-dp-pp",
        recompute: Recompute | None = None,
        expert_transport: Transport = "auto",
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
        super().__init__(StrategyOptions.among(locals()))
        self._checkpoints = RunCheckpoints()
        self._long_lived = LongLivedObjects()
        #: Trainer whose callbacks this strategy has patched.
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
        # Lightning does not pass weights_only to strategies that load after setup.
        self._checkpoints.weights_only = arguments.get("weights_only")
        if "train_dataloaders" in arguments:
            check_callbacks(arguments["trainer"], self.layout)
        replace_last_checkpoint_search(arguments["trainer"], self._find_last_checkpoint)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._prepared = trainer
        filter_sampler_injection(
            trainer, lambda loader: needs_distributed_sampler(loader, self.data_parallel_size)
        )
        if trainer.state.fn == TrainerFn.FITTING:
            assert self._state is not None, "setup has run"
            self._for_the_run.enter_context(seeing_data(self._state.main.user_writes.note))
            if self.layout.pp > 1:
                self._for_the_run.enter_context(hiding_example_input(self.user_module))
            average_main_parameters(trainer, self.user_module, self._state.main, self.mesh)
        if self.options.async_save:
            announce_saves(trainer, self._checkpoints.will_exist, self._checkpoints.link)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._checkpoints.restore_random_states(self.root_device)
        self._checkpoints.defers_copies = only_steps_change_weights(
            self.user_module, self.user_module.trainer
        )
        self._long_lived.freeze()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._checkpoints.poll()
        if (
            self.options.async_save
            and self.user_module.trainer.global_step
            and self._state is not None
        ):
            self._checkpoints.reserve(
                self.user_module, self.optimizers, self._state.main, self.mesh
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        # The optimizer's update comes next, and may overwrite weights that a save still copies.
        self._checkpoints.wait_for_snapshot()
        return output

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._state is not None:
            self._state.checks.check_values(at_end=True)
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
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write a directory that any layout can load; a collective over all ranks."""
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` is not supported, because "
                "every rank writes its own files. Leave it out."
            )
        assert self._state is not None, "setup has run"
        in_run, trainer = self._mesh is not None, self.user_module.trainer
        self.synchronise_buffers()
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
        # Optimizers of an earlier fit of this trainer are not those of an evaluation.
        optimizers = (
            self.optimizers if self.user_module.trainer.state.fn == TrainerFn.FITTING else ()
        )
        path = self.broadcast(os.fspath(checkpoint_path))
        return self._checkpoints.load(
            path, self.user_module, optimizers, self._state.main, self.mesh, self._make_groups
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # load_checkpoint has loaded sharded directories. Other strategies' files have full tensors.
        if self._checkpoints.is_plain and "state_dict" in checkpoint:
            assert self._state is not None, "setup has run"
            trainer, full = self.user_module.trainer, checkpoint["state_dict"]
            if trainer.state.fn == TrainerFn.FITTING and averaging_callback(trainer) is not None:
                full = checkpoint.get("current_model_state", full)
            full = to_own_names(self.user_module, full)
            plain_checkpoint.load_state_dict(
                full, self.user_module, self._state.main, self.mesh, strict
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers from another strategy's file; directories need no second load."""
        if "optimizer_states" in checkpoint:
            assert self._state is not None, "setup has run"
            self._make_groups(checkpoint)
            main, full = self._state.main, checkpoint["state_dict"]
            for optimizer, saved in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            ):
                plain_checkpoint.load_optimizer(
                    optimizer, saved, full, self.user_module, main, self.mesh
                )

    def _make_groups(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer groups that callbacks had added before a checkpoint was saved."""
        assert self._state is not None, "setup has run"
        restore_finetuning(self.user_module.trainer, self.user_module, checkpoint)
        self._state.attach_new(self.optimizers)

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
            announce_no_saves(self._prepared)
            restore_sampler_injection(self._prepared)
            average_model_parameters(self._prepared)
            restore_epoch_ends(self._prepared)
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
            strategy_registry.register(
                cls.strategy_name, cls, description=(cls.__doc__ or "").partition("\n")[0]
            )


MegatronStrategy.register_strategies(StrategyRegistry)
