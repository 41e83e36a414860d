"""The entries of an optimizer: its state by parameter name, so that a fresh optimizer of any layout continues."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.load import SavedTensor, load_tensors, saved_tensors
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, whole_spec
from lightning_megatron.training.main_parameters import MainParameters
from lightning_megatron.training.shared_gradients import original_name

# How the fresh optimizer computes its step stays its own choice: it depends on the device, and changes no result.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_SAVED = frozenset({"params", "param_names"}) | _IMPLEMENTATION


def optimizer_tensors(
    index: int, optimizer: torch.optim.Optimizer, main: MainParameters
) -> dict[str, tuple[Tensor, ShardSpec]]:
    """List an optimizer's state tensors for saving, under ``optimizer.{index}.state.{parameter}.{key}``.

    Tensors shaped like their parameter are cut like it; scalars are whole on every rank.

    Args:
        index: Number of the optimizer.
        optimizer: An optimizer over ``main``, after ``main.attach``.
        main: This rank's parameters.

    Raises:
        UnsupportedError: If a state tensor of a cut parameter has another shape than the parameter.
    """
    entries = {}
    for name, parameter in _parameters_of(optimizer, main):
        for key, value in _state_of(optimizer, parameter).items():
            if isinstance(value, Tensor):
                spec = _state_spec(name, key, tuple(value.shape), tuple(parameter.shape), main.spec(name))
                entries[f"{_prefix(index)}{name}.{key}"] = (value, spec)
    return entries


def optimizer_metadata(optimizer: torch.optim.Optimizer, main: MainParameters, mesh: ParallelMesh) -> dict[str, Any]:
    """Collect what else an optimizer's checkpoint holds: hyperparameters and parameter names by group, plain values.

    Args:
        optimizer: An optimizer over ``main``, after ``main.attach``.
        main: This rank's parameters.
        mesh: The groups of this rank.

    Returns:
        ``{"groups": [{"hyperparameters": {...}, "parameters": [names]}], "values": {name: {key: value}}}``, merged
        over the pipeline stages by group index.

    Raises:
        CheckpointMismatchError: If the stages' optimizers have different numbers of groups.

    Communication: one gather over pp.
    """
    groups, values = [], {}
    for group, names in zip(optimizer.param_groups, main.names_of(optimizer), strict=True):
        hyperparameters = {key: _on_cpu(value) for key, value in group.items() if key not in _NOT_SAVED}
        untied = [name for name in names if main.spec(name).tied_to is None]
        groups.append({"hyperparameters": hyperparameters, "parameters": untied})
        for name, parameter in zip(names, group["params"], strict=True):
            state = _state_of(optimizer, parameter)
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if plain and main.spec(name).tied_to is None:
                values[name] = plain
    stages = all_gather_objects((groups, values), mesh.pp_cpu)
    _check_same_groups([len(stage_groups) for stage_groups, _ in stages])
    merged = [
        {
            "hyperparameters": groups[number]["hyperparameters"],
            "parameters": [name for stage_groups, _ in stages for name in stage_groups[number]["parameters"]],
        }
        for number in range(len(groups))
    ]
    return {"groups": merged, "values": {name: plain for _, stage in stages for name, plain in stage.items()}}


def load_optimizer(
    path: str | os.PathLike[str],
    index: int,
    optimizer: torch.optim.Optimizer,
    main: MainParameters,
    mesh: ParallelMesh,
    metadata: Mapping[str, Any],
) -> None:
    """Continue an optimizer from a checkpoint of any layout, in place; its state may still be empty.

    Args:
        path: The checkpoint.
        index: Number of the optimizer.
        optimizer: An optimizer over ``main``, after ``main.attach``.
        main: This rank's parameters.
        mesh: The groups of this rank.
        metadata: What :func:`optimizer_metadata` returned when it was saved.

    Raises:
        CheckpointMismatchError: On all ranks, if groups, their parameters or the shapes of the state differ.

    Communication: gathers of names over tp x pp.
    """
    names_of_groups = main.names_of(optimizer)
    original = _originals(names_of_groups, metadata["groups"], main)
    _check_groups(names_of_groups, metadata["groups"], original, mesh)
    entries = _create_state(path, index, optimizer, main, original)
    load_tensors(path, entries, mesh, prefix=_prefix(index))
    for name, parameter in _parameters_of(optimizer, main):
        plain = metadata["values"].get(original[name], {})
        if plain:
            optimizer.state[parameter].update(plain)
    for group, saved in zip(optimizer.param_groups, metadata["groups"], strict=True):
        group.update(saved["hyperparameters"])


def _prefix(index: int) -> str:
    return f"optimizer.{index}.state."


def _parameters_of(optimizer: torch.optim.Optimizer, main: MainParameters) -> Iterator[tuple[str, nn.Parameter]]:
    for group, names in zip(optimizer.param_groups, main.names_of(optimizer), strict=True):
        yield from zip(names, group["params"], strict=True)


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    # `get`, because asking a defaultdict by index would create an empty state.
    return optimizer.state.get(parameter, {})


def _state_spec(
    name: str, key: str, shape: tuple[int, ...], local_shape: tuple[int, ...], spec: ShardSpec
) -> ShardSpec:
    """Describe how a state tensor lies in its full tensor, which is tied as the parameter is."""
    tied_to = None if spec.tied_to is None else f"{spec.tied_to}.{key}"
    if shape == local_shape:
        return ShardSpec(spec.full_shape, spec.ranges, spec.dim, spec.partial, tied_to)
    is_scalar = shape in ((), (1,))
    if not is_scalar and local_shape != spec.full_shape:
        raise UnsupportedError(
            f"optimizer state must be shaped like its parameter or be a scalar to be saved: {key!r} of {name!r} has "
            f"shape {shape}, the parameter {local_shape}, cut out of {spec.full_shape}. How such state is cut is "
            "not known. Use an element-wise optimizer such as AdamW, or tp of 1."
        )
    whole = whole_spec(torch.empty(shape, device="meta"))
    return whole if tied_to is None else whole.tied(tied_to)


def _originals(
    names_of_groups: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]], main: MainParameters
) -> dict[str, str]:
    """Name the parameter that each parameter's state was saved for: itself, or what it is a tied copy of."""
    saved = {name for group in groups for name in group["parameters"]}
    found = {}
    for name in (name for names in names_of_groups for name in names):
        tied_to = main.spec(name).tied_to
        found[name] = name if tied_to is None else original_name(name, tied_to, saved) or name
    return found


def _check_same_groups(counts: Sequence[int]) -> None:
    if len(set(counts)) > 1:
        raise CheckpointMismatchError(
            f"the optimizers of all pipeline stages must have equally many parameter groups: {list(counts)}. A "
            "checkpoint merges them by number. Build the same groups on every stage in configure_optimizers, empty "
            "ones included."
        )


def _check_groups(
    names_of_groups: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    original: Mapping[str, str],
    mesh: ParallelMesh,
) -> None:
    """Compare the groups of all ranks with the saved ones, so that all ranks raise alike."""
    saved = {name: number for number, group in enumerate(groups) for name in group["parameters"]}
    moved = [
        f"{name} is in group {number}, saved in {saved.get(original[name], 'none')}"
        for number, names in enumerate(names_of_groups)
        for name in names
        if saved.get(original[name]) != number
    ]
    everyone = all_gather_objects((len(names_of_groups), moved, set(original.values())), mesh.model_cpu)
    complaints = [
        f"{len(groups)} groups were saved, the optimizer has {n}" for n in {e[0] for e in everyone} - {len(groups)}
    ]
    complaints += sorted({complaint for one in everyone for complaint in one[1]})[:10]
    held = set().union(*(one[2] for one in everyone))
    dropped = [name for name in saved if name not in held]
    complaints += [f"saved but in no group: {', '.join(dropped[:10])}"] if dropped else []
    if complaints:
        raise CheckpointMismatchError(
            f"an optimizer must have the parameter groups that were saved: {'; '.join(complaints)}. Its state would "
            "go to other parameters. Restore configure_optimizers as it was, or load the weights alone."
        )


def _create_state(
    path: str | os.PathLike[str],
    index: int,
    optimizer: torch.optim.Optimizer,
    main: MainParameters,
    original: Mapping[str, str],
) -> dict[str, tuple[Tensor, ShardSpec]]:
    """Give every parameter the state tensors that were saved for it, and list them for loading."""
    keys: dict[str, dict[str, SavedTensor]] = {}
    for entry, saved in saved_tensors(path).items():
        if entry.startswith(_prefix(index)):
            name, key = entry.removeprefix(_prefix(index)).rsplit(".", 1)
            keys.setdefault(name, {})[key] = saved
    capturable = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    entries = {}
    for name, parameter in _parameters_of(optimizer, main):
        spec, state = main.spec(name), dict(_state_of(optimizer, parameter))
        for key, saved in keys.get(original[name], {}).items():
            shape = tuple(parameter.shape) if saved.shape == spec.full_shape else saved.shape
            if not isinstance(state.get(key), Tensor) or tuple(state[key].shape) != shape:
                # torch keeps the step of most optimizers on the CPU, so that reading it does not wait for the device.
                on_cpu = key == "step" and not capturable[id(parameter)]
                state[key] = torch.zeros(shape, dtype=saved.dtype, device="cpu" if on_cpu else parameter.device)
            state_spec = _state_spec(name, key, shape, tuple(parameter.shape), spec)
            entries[f"{_prefix(index)}{name}.{key}"] = (state[key], state_spec)
        if state:
            optimizer.state[parameter] = state
    return entries


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
