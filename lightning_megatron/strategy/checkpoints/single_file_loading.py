"""Loading of weights and optimizers from single files, as ``ddp`` and one process write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint import load_model, model_placements
from lightning_megatron.checkpoint.collective_steps import verify_together
from lightning_megatron.checkpoint.metadata_checks import MODEL
from lightning_megatron.checkpoint.open_checkpoint import FullTensors
from lightning_megatron.checkpoint.optimizer import hyperparameters_of, load_optimizer_state
from lightning_megatron.checkpoint.values import read_single_file
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
)
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.main_parameters import MainParameters, original_name
from lightning_megatron.plan.settings import Pattern, coerced, shown
from lightning_megatron.strategy.checkpoints.single_process_record import (
    gather_parts,
    named_numbers,
    order_groups,
)
from lightning_megatron.swap.hugging_face.class_tensors import (
    ClassTensors,
    class_name_in,
    owner_of,
    state_from_class,
)

#: States of schedulers from which rates are computed.
_OF_RATES = ("last_epoch", "_step_count", "base_lrs", "lr_lambdas", "_schedulers", "milestones")


#: Entries that Lightning reads, and those that it reads only if a fit resumes.
_READ: Mapping[str, Any] = {
    "pytorch-lightning_version": Annotated[str, Pattern(r"\d.*", "that begins with a digit")]
}


class _Loops(TypedDict):
    fit_loop: dict[str, Any]


_RESUMED: Mapping[str, Any] = {**_READ, "loops": _Loops, "lr_schedulers": list[Any]}


def read_entries(path: str, needs_optimizers: bool, weights_only: bool | None) -> dict[str, Any]:
    """Read a single-file checkpoint, with full tensors and entries as Lightning expects them."""
    checkpoint = read_single_file(path, weights_only)
    if needs_optimizers and "optimizer_states" not in checkpoint:
        raise no_optimizers(path)
    for name, kind in (_RESUMED if needs_optimizers else _READ).items():
        try:
            coerced(name, checkpoint.get(name), kind)
        except ParallelPlanError as error:
            raise CorruptDataError(
                f"a checkpoint file must be written by Lightning: in {path} {error} The file is "
                "damaged or edited. Use another checkpoint, or load the weights in your module."
            ) from error
    _translate_precision(checkpoint)
    return checkpoint


def no_optimizers(path: str) -> CheckpointMismatchError:
    """Return the error for a checkpoint of weights from which a training should continue."""
    return CheckpointMismatchError(
        f"a checkpoint to continue training from must hold optimizer states: {path!r} has weights "
        "alone, as save_weights_only=True and `lightning-megatron convert` write them. Load it "
        "with validate, test or predict, or continue from a full checkpoint.\n"
        "To start a new training of a Hugging Face model from its weights: lightning-megatron "
        f"convert {path} FOLDER, and fit with --model.path FOLDER"
    )


def check_training_states(
    checkpoint: Mapping[str, Any], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> None:
    """Refuse a file whose optimizers and schedulers are not those of the module."""
    states = checkpoint["optimizer_states"]
    if len(optimizers) != len(states):
        raise CheckpointMismatchError(
            f"a module must have the optimizers that were saved: {len(states)} were saved, "
            f"configure_optimizers returns {len(optimizers)}. States would be loaded into the "
            "wrong optimizers. Restore configure_optimizers as it was, or load only the weights."
        )
    # Further states of schedulers in the file are ignored, as by Lightning.
    for scheduler, state in zip(schedulers, checkpoint.get("lr_schedulers", ()), strict=False):
        for key, current in scheduler.state_dict().items():
            saved = state.get(key) if isinstance(state, Mapping) else state
            if key in _OF_RATES and not _is_like(saved, current):
                raise CorruptDataError(
                    "the state of a learning rate scheduler must have the form in which it was "
                    f"saved: {key} of {type(scheduler).__name__} is {shown(saved)} in the file, "
                    f"and {shown(current)} in the new scheduler. The fit would continue with other "
                    "learning rates. Restore configure_optimizers as it was, use another "
                    "checkpoint, or load only the weights."
                )


def _is_like(saved: Any, current: Any) -> bool:
    is_list = isinstance(current, list)
    return type(saved) is type(current) and (not is_list or len(saved) == len(current))


def load_full_weights(
    full: Mapping[str, Any],
    module: LightningModule,
    main: MainParameters,
    mesh: ParallelMesh,
    strict: bool,
) -> None:
    """Load this rank's parameters and buffers from full tensors.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: a gather of names over pp, and that of ``load_model``.
    """
    expected = model_placements(module, main)
    # The file has one entry for each name of a shared parameter, but there is one main parameter.
    others = {f"{MODEL}{name}" for name in module.state_dict()} - expected.keys()
    tensors = {
        f"{MODEL}{name}": tensor
        for name, tensor in full.items()
        if isinstance(tensor, Tensor) and f"{MODEL}{name}" not in others
    }
    here = {name: (place.full_shape, place.tied_to) for name, place in expected.items()}
    stages = all_gather_objects(here, mesh.pp_cpu)
    places = {name: place for stage in stages for name, place in stage.items() if name in tensors}
    for name, (_, tied_to) in places.items():
        # A tied copy is filled from its original on another stage; the file may have both names.
        original = original_name(name, tied_to, tensors.keys()) if tied_to else None
        if original is not None and torch.equal(tensors[name], tensors[original]):
            del tensors[name]
    for name in places.keys() & tensors.keys():
        tensors[name] = without_padding(tensors[name], places[name][0])
    load_model(FullTensors(tensors), module, main, mesh, strict)


def load_full_optimizer(
    index: int,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    full: Mapping[str, Any],
    module: LightningModule,
    main: MainParameters,
    mesh: ParallelMesh,
) -> None:
    """Load an optimizer from its torch state dict, which numbers the parameters.

    Args:
        saved: State dict of a torch optimizer, with ``state`` and ``param_groups``.
        full: Full tensors of the module in the file, by name, in module order.
        module: Module that is trained. For a Hugging Face model that has been replaced, the file
            contains the tensors of the original class.

    Communication: one gather of names over pp, or over the world if ep is above 1, one gather of
    failures over the world, and that of ``load_optimizer_state``.
    """
    models = ClassTensors.of_module(module)
    own_names = main.names_of(optimizer)
    names_here = []
    for group_names in own_names:
        untied = [name for name in group_names if main.spec(name).tied_to is None]
        names_here.append(list(dict.fromkeys(class_name_in(models, name) for name in untied)))
    names = order_groups(gather_parts(names_here, mesh), full)
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    if len(groups) != len(names):
        raise CheckpointMismatchError(
            f"an optimizer must have the parameter groups that were saved: {len(groups)} were "
            f"saved, the optimizer has {len(names)}. Restore configure_optimizers as it was, or "
            "load only the weights."
        )
    state_of: dict[str, Mapping[str, Any]] = {}
    for group, group_names in zip(groups, names, strict=True):
        for number, name in zip(group["params"], named_numbers(group, group_names), strict=True):
            state_of[name] = saved["state"].get(number, {})
            _check_shapes(name, state_of[name], full)
    held = [name for group_names in own_names for name in group_names if name in main.slices]
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {name: {} for name in held}

    def divide() -> None:
        for name in held:
            for key, value in _own_state(name, main, models, state_of, full).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.state.{name}.{key}"] = value
                else:
                    values[name][key] = value

    # Data ranks own different parameters: a failure on one rank must not leave the others waiting.
    verify_together(divide, mesh.world_cpu)
    metadata = {
        "groups": [{"hyperparameters": hyperparameters_of(group)} for group in groups],
        "values": values,
    }
    original = {name: name for group_names in own_names for name in group_names}
    load_optimizer_state(FullTensors(tensors), index, optimizer, main, mesh, metadata, original)


def _own_state(
    name: str,
    main: MainParameters,
    models: Sequence[ClassTensors],
    state_of: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the full state of a parameter, from that of its class and in its main dtype."""
    spec = main.spec(name)
    dtype = main.main(name).dtype
    if spec.tied_to is not None:
        name = original_name(name, spec.tied_to, state_of.keys()) or name
    model = owner_of(models, name)
    whole = class_name_in(models, name)
    state = {}
    for key, value in state_of[whole].items():
        value = state_from_class(model, name, key, value, full[whole].shape)
        if isinstance(value, Tensor) and key != "step":
            value = without_padding(value, spec.full_shape)
            if value.is_floating_point():
                value = value.to(dtype)
        state[key] = value
    return state


def without_padding(full: Tensor, shape: Sequence[int]) -> Tensor:
    """Remove the padding rows of a vocabulary table if ``shape`` has fewer rows."""
    if not shape or full.dim() != len(shape) or full.shape[0] <= shape[0]:
        return full
    return full[: shape[0]]


def _check_shapes(name: str, state: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    """Refuse optimizer states whose shapes do not fit the parameter."""
    shape = tuple(full[name].shape)
    large = [
        value for value in state.values() if isinstance(value, Tensor) and value.dim() == len(shape)
    ]
    wrong = [
        tuple(value.shape) for value in large if value.numel() > 1 and tuple(value.shape) != shape
    ]
    if wrong:
        raise CheckpointMismatchError(
            "an optimizer's state must be shaped like its parameter: the state saved with the "
            f"number of {name!r} has shape {wrong[0]}, the parameter has {shape}. The parameters "
            "were numbered in another order. Restore configure_optimizers as it was, or load only "
            "the weights."
        )


def _translate_precision(checkpoint: dict[str, Any]) -> None:
    """Convert the loss scale of Lightning's mixed precision, in place."""
    scaler = checkpoint.get("MixedPrecision")
    if isinstance(scaler, Mapping) and "scale" in scaler:
        counts = {"clean_steps": int(scaler.get("_growth_tracker", 0)), "hysteresis_left": 1}
        checkpoint.setdefault(
            "MegatronPrecision",
            {"loss_scale": {"scale": float(scaler["scale"]), **counts}, "skipped_steps": 0},
        )
