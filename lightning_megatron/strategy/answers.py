"""Answers to Lightning's queries about precision, devices and supported features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.cuda import RunStream
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.strategy.checks.batch_checks import check_batch
from lightning_megatron.strategy.checks.engine_checks import (
    check_engine,
    check_fp8,
    with_plugin_recipe,
)
from lightning_megatron.strategy.checks.graph_checks import check_graphs
from lightning_megatron.strategy.checks.module_comparison import hyperparameter_fields
from lightning_megatron.strategy.checks.run_checks import configuration_fields
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.strategy.private.loops import attached_trainer
from lightning_megatron.strategy.process.ranks import RankStrategy
from lightning_megatron.swap import build_on_meta


class TrainerAnswers(RankStrategy):
    """Strategy methods with which the Trainer queries precision, device and supported features."""

    strategy_name = "megatron"

    #: Function that creates the backend of CUDA graphs; None means CUDA itself.
    _make_backend: Callable[[ParallelMesh], CaptureBackend] | None = None
    _stream: RunStream | None = None

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
        else:
            check_fp8(self.options.products, self.root_device, precision)
        check_graphs(self.options, device_type, precision, module, trainer)

    @override
    def _configure_launcher(self) -> None:
        self.check_device()
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # The stream must be current before modules, hooks and optimizers are created.
        if self.options.cuda_graphs is not None and self.root_device.type == "cuda":
            self._stream = self._stream or RunStream(self.root_device)
            self._stream.enter()

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
        move = super().batch_to_device
        if (
            isinstance(batch, list)
            and batch
            and all(isinstance(part, Microbatch) for part in batch)
        ):
            for part in batch:
                check_batch(part.data, self.user_module)
            return [
                Microbatch(move(part.data, device, dataloader_idx), part.num_samples)
                for part in batch
            ]
        check_batch(batch, self.user_module)
        return move(batch, device, dataloader_idx)

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

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``Trainer(strategy="megatron")`` once."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description=(cls.__doc__ or "").partition("\n")[0]
            )
