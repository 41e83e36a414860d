"""Private names of Lightning that the package uses exist; a version that moves one fails here."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

import lightning_megatron
from lightning_megatron.strategy import private
from lightning_megatron.strategy.private.loops import AutomaticOptimization, Closure
from tests.fits import Job, trainer_of

PACKAGE = Path(lightning_megatron.__file__).parent
PRIVATE_FOLDER = Path(private.__file__).parent
MODULES = [
    import_module(f"{private.__name__}.{path.stem}")
    for path in sorted(PRIVATE_FOLDER.glob("*.py"))
    if path.stem != "__init__"
]
#: Attributes that the functions use: path of the owner from the Trainer, and name.
TRAINER_ATTRIBUTES = (
    ("fit_loop.epoch_loop", "automatic_optimization"),
    ("fit_loop.epoch_loop", "total_batch_idx"),
    ("fit_loop.epoch_loop.automatic_optimization", "optim_progress"),
    ("fit_loop.epoch_loop.automatic_optimization", "_skip_backward"),
    ("fit_loop.epoch_loop.automatic_optimization", "_make_closure"),
    ("fit_loop.epoch_loop.automatic_optimization", "_make_zero_grad_fn"),
    ("fit_loop", "_should_accumulate"),
    ("fit_loop", "_skip_backward"),
    ("", "log_every_n_steps"),
    ("fit_loop.epoch_loop", "_batches_that_stepped"),
    ("", "_results"),
    ("", "_logger_connector"),
    ("_logger_connector", "_first_loop_iter"),
    ("fit_loop", "on_advance_end"),
    ("fit_loop.epoch_loop.val_loop", "on_run_start"),
    ("fit_loop.epoch_loop.val_loop", "_store_dataloader_outputs"),
    ("fit_loop.epoch_loop.val_loop", "_on_evaluation_epoch_end"),
    ("predict_loop", "_on_predict_epoch_end"),
    ("fit_loop.epoch_loop", "_broadcast_sigterm_tensor"),
    ("fit_loop.epoch_loop", "advance"),
    ("fit_loop.epoch_loop", "_on_before_fetch"),
    ("fit_loop.epoch_loop", "_on_after_fetch"),
    ("", "_signal_connector"),
    ("_signal_connector", "_sigterm_notifier_fn"),
    ("_signal_connector", "_slurm_sigusr_handler_fn"),
    ("_signal_connector", "received_sigterm"),
    ("", "_accelerator_connector"),
    ("_accelerator_connector", "cluster_environment"),
    ("", "_checkpoint_connector"),
    ("_checkpoint_connector", "hpc_save_path"),
    ("_checkpoint_connector", "_parse_ckpt_path"),
    ("_checkpoint_connector", "resume_start"),
    ("fit_loop", "_combined_loader"),
    ("", "_data_connector"),
    ("_data_connector", "_requires_distributed_sampler"),
)


@pytest.fixture(scope="module")
def trainer():
    return trainer_of(Job())


def owner_of(trainer: Trainer, where: str) -> Any:
    return reduce(getattr, where.split("."), trainer) if where else trainer


def test_listed_attributes_of_the_trainer_exist(trainer):
    for where, name in TRAINER_ATTRIBUTES:
        owner = owner_of(trainer, where)
        assert hasattr(type(owner), name) or name in vars(owner), f"{where}.{name}"


def arguments_of(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def test_replaced_methods_have_the_expected_arguments():
    loop, averaging = AutomaticOptimization, WeightAveraging
    unfreeze = BaseFinetuning.unfreeze_and_add_param_group
    for method, arguments in (
        (loop._make_closure, "kwargs optimizer batch_idx"),
        (loop._training_step, "kwargs"),
        (Closure.__init__, "step_fn backward_fn zero_grad_fn"),
        (_ResultCollection.update_metrics, "key value batch_size"),
        (ModelCheckpoint.file_exists, "filepath trainer"),
        (ModelCheckpoint._link_checkpoint, "trainer filepath linkpath"),
        (averaging._swap_models, "pl_module"),
        (unfreeze, "modules optimizer lr initial_denom_lr train_bn"),
    ):
        assert arguments_of(method) == arguments.split(), method


def test_lightning_calls_the_replaced_methods_and_uses_the_names_that_the_package_uses(trainer):
    epoch_loop, connector = type(trainer.fit_loop.epoch_loop), type(trainer._data_connector)
    distributed = "self._requires_distributed_sampler(dataloader)"
    averages = (
        "self.update_parameters(self._average_model, pl_module, self.n_averaged, self._avg_fn)"
    )
    pruned = "self._parameters_to_prune = self.filter_parameters_to_prune(parameters_to_prune)"
    saved = "self._link_checkpoint(trainer, self._last_checkpoint_saved, filepath)"
    copied = "model=pl_module, device=device, use_buffers=self._use_buffers, **self._kwargs"
    for place, words, number in (
        (AutomaticOptimization._training_step, "training_step", 0),
        (epoch_loop.run, "self.advance(data_fetcher)", 0),
        (epoch_loop.advance, "self._broadcast_sigterm_tensor()", 0),
        (epoch_loop.on_run_start, "data_fetcher._start_profiler = self._on_before_fetch", 0),
        (epoch_loop.on_run_start, "data_fetcher._stop_profiler = self._on_after_fetch", 0),
        (ModelCheckpoint, "self.file_exists(filepath, trainer)", 0),
        (ModelCheckpoint, saved, 0),
        (ModelCheckpoint, "self._should_remove_checkpoint(trainer, ", 3),
        (ModelCheckpoint._should_remove_checkpoint, "trainer.", 2),
        (WeightAveraging, "self._swap_models(pl_module)", 2),
        (WeightAveraging, "self._average_model.update_parameters(pl_module)", 2),
        (WeightAveraging, copied, 0),
        (WeightAveraging, "device = self._device or pl_module.device", 0),
        (WeightAveraging, 'pl_module.load_state_dict(checkpoint["current_model_state"])', 0),
        (connector._prepare_dataloader, distributed, 0),
        (connector._resolve_sampler, distributed, 0),
        (StochasticWeightAveraging, averages, 0),
        (StochasticWeightAveraging, "self.transfer_weights(self._average_model, pl_module)", 0),
        (ModelPruning, pruned, 0),
        (ModelPruning, "self._use_lottery_ticket_hypothesis", 0),
        (PyTorchProfiler.start, "and self._register is None and self._record_module_names", 0),
        (TensorBoardLogger, "self._log_graph", 0),
        (BackboneFinetuning, "self.unfreeze_and_add_param_group(", 0),
    ):
        count = inspect.getsource(place).count(words)
        assert count == number if number else count > 0, f"{place}: {words}"


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_private_names_are_used_only_in_the_private_package():
    """The strategy itself may read private attributes that it inherits."""
    parts = {part for where, name in TRAINER_ATTRIBUTES for part in (name, *where.split("."))}
    names = {part for part in parts if part.startswith("_")}
    names |= {"_trainer", "_device_mesh", "_lightning_optimizers"}
    violations = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes(path) if path.parent != PRIVATE_FOLDER else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
                imported = [f".{alias.name}" for alias in node.names]
                violations += [
                    f"{path}: {name}" for name in imported if "._" in f"{node.module}{name}"
                ]
            if isinstance(node, ast.Attribute) and node.attr in names:
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                violations += [] if is_own else [f"{path}:{node.lineno} reads {node.attr}"]
    assert not violations


def test_private_package_lists_every_private_attribute_that_it_reads(trainer):
    """Private attributes of the Trainer and of its parts stand in ``TRAINER_ATTRIBUTES``."""
    listed = {part for where, name in TRAINER_ATTRIBUTES for part in (name, *where.split("."))}
    owners = [owner_of(trainer, where) for where, _ in TRAINER_ATTRIBUTES]
    known = {
        name
        for owner in (trainer, *owners)
        for name in (*dir(type(owner)), *vars(owner))
        if name[:1] == "_" and name[:2] != "__"
    }
    read = {
        node.attr
        for module in MODULES
        for node in nodes(Path(str(module.__file__)))
        if isinstance(node, ast.Attribute)
    }
    assert read & known <= listed
