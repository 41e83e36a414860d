"""Checks before training: unsupported modules, batch sizes and differences between ranks."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.stage import PipelinedModule, pipelined_modules
from lightning_megatron.nest import leaves
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.optimization.parameter_readers import backward_observer
from lightning_megatron.strategy.options.sizes import (
    check_batch_size,
    check_last_batch,
    check_optimization,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.data_loading import train_dataloaders
from lightning_megatron.swap.decide.automatic import suggest_pipeline_plan, suggest_tensor_plan
from lightning_megatron.user_code import is_compiled
from lightning_megatron.version import __version__

#: Trainer settings that decide how many steps run and what they compute.
_TRAINER_FIELDS = tuple(
    """
    accumulate_grad_batches check_val_every_n_epoch fast_dev_run gradient_clip_algorithm
    gradient_clip_val limit_predict_batches limit_test_batches limit_train_batches
    limit_val_batches max_epochs max_steps min_epochs min_steps num_sanity_val_steps
    overfit_batches precision val_check_interval
    """.split()
)


def pipelined_module(module: LightningModule, mesh: ParallelMesh) -> PipelinedModule | None:
    """Return the module that is cut into stages; None with one stage."""
    if mesh.pp.size == 1:
        return None
    modules = list(pipelined_modules(module))
    if len(modules) != 1:
        names = ", ".join(name for name, _ in modules) or "none"
        remedy = _remedy_of_several(module, mesh) if modules else _remedy_of_none(module, mesh)
        raise UnsupportedError(
            f"pp ({mesh.pp.size}) above 1 needs exactly one model that can be cut into stages: "
            f"{type(module).__name__} has {names}. {remedy}"
        )
    return modules[0][1]


def _remedy_of_several(module: LightningModule, mesh: ParallelMesh) -> str:
    """Describe how the user can leave one model to divide among the stages."""
    models = [module.get_submodule(name) for name, _ in pipelined_modules(module)]
    is_trained = any(part.requires_grad for model in models for part in model.parameters())
    can_freeze = mesh.cp.size == 1 and not any(
        isinstance(part, PipelinedModule | AveragedModel) for part in module.modules()
    )
    if not can_freeze or not is_trained:
        return "Use pp=1."
    return (
        "Stages divide the blocks of one trained model. Freeze the others in configure_model "
        "(requires_grad_(False)), as the teacher of a distillation, or use pp=1."
    )


def _remedy_of_none(module: LightningModule, mesh: ParallelMesh) -> str:
    """Describe how the user can divide a module into stages."""
    plan = suggest_pipeline_plan(module, mesh.layout)
    if plan is None:
        return (
            "A pipeline_plan needs an nn.ModuleList or nn.Sequential with at least "
            f"{mesh.layout.pp * mesh.layout.vpp} blocks of one kind, and this module has none. Use "
            "pp=1 with tp or dp, or a model with such a list, such as lightning_megatron.GPT with "
            "mesh=self.device_mesh."
        )
    return f"It has blocks in lists: use the pipeline_plan {plan}, or pp=1."


def check_is_sharded(module: LightningModule, mesh: ParallelMesh) -> None:
    """Refuse tp above 1 if no rank has a part of any weight.

    Communication: one all-reduce of a flag over the world, on the CPU.
    """
    tp = mesh.tp.size
    specs = map(shard_spec_of, module.parameters())
    has_parts = not all(spec.is_whole or spec.over_ep for spec in specs)
    if tp == 1 or is_true_anywhere(has_parts, mesh.world_cpu):
        return
    plan = suggest_tensor_plan(module, tp)
    remedy = "Its linear layers can be cut: use the tensor_parallel_plan {}, or tp=1 with more data"
    raise UnsupportedError(
        f"tp ({tp}) above 1 needs a module that can be cut over tp, a lightning_megatron.GPT or "
        "Encoder, a Hugging Face model of a supported family, or layers that a "
        f"tensor_parallel_plan names: {type(module).__name__} has none. All {tp} ranks would train "
        f"equal copies. {remedy.format(plan) if plan else 'Use tp=1 with more data'} ranks instead."
    )


def check_module(module: LightningModule, mesh: ParallelMesh) -> None:
    """Refuse modules and hooks that a pipeline does not support."""
    if mesh.pp.size == 1:
        return
    check_optimization(module, mesh.pp.size)
    pipelined = pipelined_module(module, mesh)
    inside = {
        id(parameter)
        for parameter in (pipelined.stage_parameters() if pipelined is not None else ())
    }
    outside = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]
    if outside:
        raise UnsupportedError(
            f"with pp ({mesh.pp.size}) above 1 all trained parameters must be inside the pipelined "
            f"model: {', '.join(outside[:5])} would be trained only on the last stage. Move them "
            "into the model, freeze them, or use pp=1."
        )
    observer = (
        backward_observer(module.trainer) if module.trainer.state.fn == TrainerFn.FITTING else None
    )
    if observer is not None:
        raise UnsupportedError(
            f"{observer} cannot be called with pp ({mesh.pp.size}) above 1, because it gets the "
            "loss, which only the last stage has. Change the loss in training_step, read gradients "
            "in on_after_backward or on_before_optimizer_step, or use pp=1."
        )


def check_data(module: LightningModule, arguments: Mapping[str, Any]) -> None:
    """Let a data module refuse missing files, unless code of the user may write them in time.

    Args:
        arguments: Arguments of ``fit``, ``validate``, ``test`` or ``predict``, and ``trainer``.
    """
    given = (value for value in arguments.values() if isinstance(value, LightningDataModule))
    data = next(given, None)
    check = getattr(data, "check_before_launch", None)
    if data is None or check is None:
        return
    homes = {hook.__module__ for hook in (module.prepare_data, data.prepare_data, data.setup)}
    if {home.partition(".")[0] for home in homes} <= {"lightning", "lightning_megatron"}:
        check(arguments["trainer"].state.fn)
        _check_vocabulary(module, data)


def _check_vocabulary(module: LightningModule, data: LightningDataModule) -> None:
    known = getattr(data, "vocab_size_before_launch", None)
    if isinstance(module, CausalLM) and known is not None and known > module.vocab_size:
        raise UnsupportedError(
            f"the data has more kinds of tokens than the model: its tokenizer makes {known}, and "
            f"vocab_size is {module.vocab_size}. Later tokens would have no embedding.\n"
            f"Set vocab_size to {known} or more (--model.config.vocab_size {known}), or use "
            "another tokenizer."
        )


def check_train_loaders(trainer: Trainer, options: StrategyOptions, layout: ParallelLayout) -> None:
    """Refuse training dataloaders whose batches cannot be cut for the schedule."""
    for loader in train_dataloaders(trainer):
        # Any iterable may have a batch_size, not only a DataLoader.
        batch_size = getattr(loader, "batch_size", None)
        if isinstance(batch_size, int):
            check_batch_size(batch_size, options, layout)
            if isinstance(loader, DataLoader) and trainer.num_training_batches == _length(loader):
                check_last_batch(_samples_of_last_batch(loader, batch_size), options, layout)


def check_turns(module: LightningModule, options: StrategyOptions) -> None:
    """Refuse compiled modules if the passes of two microbatches switch inside of layers."""
    for name, part in module.named_modules() if options.experts.overlap else ():
        if is_compiled(part):
            raise UnsupportedError(
                "experts.overlap cannot be used with torch.compile, because passes switch between "
                f"two microbatches inside of layers: {name or type(part).__name__} is compiled. "
                "Leave one of them out."
            )


def _samples_of_last_batch(loader: DataLoader, batch_size: int) -> int:
    num_samples = _length(loader.sampler)
    return 0 if loader.drop_last or num_samples is None else num_samples % batch_size


def configuration_fields(arguments: Mapping[str, Any], trainer: Trainer) -> dict[str, str]:
    """Return the settings and versions that must be equal on all ranks, by name."""
    settings = {f"strategy.{name}": repr(value) for name, value in arguments.items()}
    settings |= {f"trainer.{name}": repr(getattr(trainer, name, None)) for name in _TRAINER_FIELDS}
    versions = {name: version(name) for name in ("torch", "lightning")}
    versions["lightning-megatron"] = __version__
    return {
        "world_size": str(trainer.world_size),
        **settings,
        **versions,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def data_fields(trainer: Trainer) -> dict[str, str]:
    """Return the lengths of the training data, which must be equal on all ranks, by name."""
    return {
        f"train dataloader {number}: {what}": str(_length(part))
        for number, loader in enumerate(train_dataloaders(trainer))
        for what, part in (("batches", loader), ("samples", getattr(loader, "dataset", None)))
    }


def _length(part: Any) -> int | None:
    try:
        return len(part)
    except (TypeError, NotImplementedError):
        return None


def digest_of(batch: Any) -> str:
    """Hash all tensors of a batch."""
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in _tensors(batch):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(values.shape)}{values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(batch: Any) -> Iterator[Tensor]:
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes):
            # Sequences other than lists and tuples are never cut, but ranks must agree on them.
            yield from _tensors(list(leaf))
