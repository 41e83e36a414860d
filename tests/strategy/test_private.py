"""Private names of Lightning that the package uses exist; a version that moves one fails here."""

from __future__ import annotations

import ast
import inspect
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
from lightning import Trainer
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

import lightning_megatron
from lightning_megatron.strategy import private
from lightning_megatron.strategy.private.loops import AutomaticOptimization, Closure

PACKAGE = Path(lightning_megatron.__file__).parent
PRIVATE_FOLDER = Path(private.__file__).parent
MODULES = [
    import_module(f"{private.__name__}.{path.stem}")
    for path in sorted(PRIVATE_FOLDER.glob("*.py"))
    if path.stem != "__init__"
]
TRAINER_ATTRIBUTES = sorted(
    {pair for module in MODULES for pair in getattr(module, "TRAINER_ATTRIBUTES", ())}
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


@pytest.mark.parametrize(("where", "name"), TRAINER_ATTRIBUTES)
def test_listed_attributes_of_the_trainer_exist(trainer: Trainer, where: str, name: str) -> None:
    owner = reduce(getattr, where.split("."), trainer) if where else trainer
    assert hasattr(type(owner), name) or name in vars(owner)


def test_methods_of_the_replaced_loop_have_the_expected_signatures() -> None:
    loop = AutomaticOptimization
    assert list(inspect.signature(loop._make_closure).parameters) == [
        "self",
        "kwargs",
        "optimizer",
        "batch_idx",
    ]
    assert list(inspect.signature(loop._training_step).parameters) == ["self", "kwargs"]
    assert list(inspect.signature(Closure.__init__).parameters)[1:] == [
        "step_fn",
        "backward_fn",
        "zero_grad_fn",
    ]
    assert "training_step" in inspect.getsource(loop._training_step)


def test_epoch_loop_calls_the_replaced_methods(trainer: Trainer) -> None:
    loop = type(trainer.fit_loop.epoch_loop)
    assert "self.advance(data_fetcher)" in inspect.getsource(loop.run)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)


def test_model_checkpoint_calls_the_replaced_methods() -> None:
    callback = ModelCheckpoint
    assert list(inspect.signature(callback.file_exists).parameters) == [
        "self",
        "filepath",
        "trainer",
    ]
    assert list(inspect.signature(callback._link_checkpoint).parameters) == [
        "trainer",
        "filepath",
        "linkpath",
    ]
    source = inspect.getsource(callback)
    assert "self.file_exists(filepath, trainer)" in source
    assert "self._link_checkpoint(trainer, self._last_checkpoint_saved, filepath)" in source
    assert source.count("self._should_remove_checkpoint(trainer, ") == 3
    assert inspect.getsource(callback._should_remove_checkpoint).count("trainer.") == 2


def test_weight_averaging_calls_the_replaced_methods() -> None:
    source = inspect.getsource(WeightAveraging)
    assert source.count("self._swap_models(pl_module)") == 2
    assert source.count("self._average_model.update_parameters(pl_module)") == 2
    assert list(inspect.signature(WeightAveraging._swap_models).parameters) == ["self", "pl_module"]
    assert "model=pl_module, device=device, use_buffers=self._use_buffers, **self._kwargs" in source
    assert "device = self._device or pl_module.device" in source
    assert 'pl_module.load_state_dict(checkpoint["current_model_state"])' in source


def test_data_connector_calls_the_replaced_method(trainer: Trainer) -> None:
    connector = type(trainer._data_connector)
    for method in (connector._prepare_dataloader, connector._resolve_sampler):
        assert "self._requires_distributed_sampler(dataloader)" in inspect.getsource(method)


def test_callbacks_and_profilers_have_the_names_that_the_package_uses() -> None:
    averaging, pruning = (
        inspect.getsource(StochasticWeightAveraging),
        inspect.getsource(ModelPruning),
    )
    assert (
        "self.update_parameters(self._average_model, pl_module, self.n_averaged, self._avg_fn)"
        in averaging
    )
    assert "self.transfer_weights(self._average_model, pl_module)" in averaging
    assert (
        "self._parameters_to_prune = self.filter_parameters_to_prune(parameters_to_prune)"
        in pruning
    )
    assert "self._use_lottery_ticket_hypothesis" in pruning
    assert "and self._register is None and self._record_module_names" in inspect.getsource(
        PyTorchProfiler.start
    )
    assert "self._log_graph" in inspect.getsource(TensorBoardLogger)
    unfreeze = BaseFinetuning.unfreeze_and_add_param_group
    names = ["modules", "optimizer", "lr", "initial_denom_lr", "train_bn"]
    assert list(inspect.signature(unfreeze).parameters) == names
    assert "self.unfreeze_and_add_param_group(" in inspect.getsource(BackboneFinetuning)


def files_outside_the_private_package() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PRIVATE_FOLDER]


def test_private_names_are_imported_only_in_the_private_package() -> None:
    violations = [
        f"{path.relative_to(PACKAGE)}: {alias.name}"
        for path in files_outside_the_private_package()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning.")
        for alias in node.names
        if alias.name.startswith("_") or "._" in (node.module or "")
    ]
    assert not violations


def test_private_attributes_are_read_only_in_the_private_package() -> None:
    """The strategy itself may read private attributes that it inherits."""
    names = {name for _, name in TRAINER_ATTRIBUTES if name.startswith("_")}
    names |= {
        part for where, _ in TRAINER_ATTRIBUTES for part in where.split(".") if part[:1] == "_"
    }
    names |= {"_trainer", "_device_mesh", "_lightning_optimizers"}
    violations = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} reads {node.attr}"
        for path in files_outside_the_private_package()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in names
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert not violations


def test_private_package_lists_every_private_attribute_that_it_reads(trainer: Trainer) -> None:
    """Private attributes of the Trainer and of its parts stand in ``TRAINER_ATTRIBUTES``."""
    listed = {name for _, name in TRAINER_ATTRIBUTES} | {
        part for where, _ in TRAINER_ATTRIBUTES for part in where.split(".")
    }
    owners = [
        trainer,
        *(reduce(getattr, where.split("."), trainer) for where, _ in TRAINER_ATTRIBUTES if where),
    ]
    known = {
        name
        for owner in owners
        for name in (*dir(type(owner)), *vars(owner))
        if name[:1] == "_" and name[:2] != "__"
    }
    read = {
        node.attr
        for module in MODULES
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert read & known <= listed
