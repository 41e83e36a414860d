"""Entries of an optimizer, by parameter name, from which training resumes under any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.collective_steps import verify_together
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import load_tensors
from lightning_megatron.checkpoint.open_checkpoint import Source, open_source
from lightning_megatron.checkpoint.tensor_index import SavedTensor
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice, Placement, ShardSpec, replicated_spec
from lightning_megatron.optimizer.main_parameters import MainParameters, original_name

# Hyperparameters that select the implementation are not restored: they depend on the device and do
# not change results.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_SAVED = frozenset({"params", "param_names"}) | _IMPLEMENTATION


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group to save, with tensors on the CPU."""
    return {key: _on_cpu(value) for key, value in group.items() if key not in _NOT_SAVED}


def different_hyperparameters(
    stages: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[int, str, list[Any]] | None:
    """Return the first hyperparameter that differs between the pipeline stages.

    Returns:
        Index of the group, name of the hyperparameter, and its values by stage (None where a stage
        lacks it); None if all hyperparameters are equal.
    """
    for number, groups in enumerate(zip(*stages, strict=True)):
        for key in sorted({key for group in groups for key in group}):
            values = [_plain(group.get(key)) for group in groups]
            if any(value != values[0] for value in values):
                return number, key, values
    return None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def check_same_groups(stages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Check that the optimizers of all pipeline stages have the same parameter groups."""
    counts = [len(groups) for groups in stages]
    different = None if len(set(counts)) > 1 else different_hyperparameters(stages)
    if len(set(counts)) > 1 or different is not None:
        raise CheckpointMismatchError(
            "the optimizers of all pipeline stages must have the same parameter groups and "
            f"hyperparameters: numbers of groups {counts}, differing (group, name, values by "
            f"stage) {different}. A checkpoint merges groups by number. Build the same groups on "
            "every stage in configure_optimizers, empty ones included."
        )


def check_saved_groups(
    names_of_groups: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    original: Mapping[str, str],
    mesh: ParallelMesh,
) -> None:
    """Compare the parameter groups of all ranks with the saved ones.

    Args:
        original: Name of the saved parameter for each name of this rank.

    Raises:
        CheckpointMismatchError: On all ranks, if a group of any rank differs.

    Communication: a gather of names over ep, and one over tp x pp.
    """
    saved = {name: number for number, group in enumerate(groups) for name in group["parameters"]}
    moved = [
        f"{name} is in group {number}, but was saved in {saved.get(original[name], 'none')}"
        for number, names in enumerate(names_of_groups)
        for name in names
        if saved.get(original[name]) != number
    ]
    numbers, moved_of_all, present = mesh.unions_over_model(
        {len(names_of_groups)}, set(moved), set(original.values())
    )
    complaints = [
        f"{len(groups)} groups were saved, the optimizer has {number}"
        for number in numbers - {len(groups)}
    ]
    complaints += sorted(moved_of_all)[:10]
    dropped = [name for name in saved if name not in present]
    complaints += [f"saved, but now in no group: {', '.join(dropped[:10])}"] if dropped else []
    if complaints:
        raise CheckpointMismatchError(
            "an optimizer must have the parameter groups that were saved: "
            f"{'; '.join(complaints)}. Its state would be loaded into other parameters. Restore "
            "configure_optimizers as it was, or load only the weights."
        )


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def check_hyperparameters(
    groups: Iterable[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]], index: int
) -> None:
    """Check that saved hyperparameters have the types of the optimizer's current ones.

    Values may differ. A hyperparameter that is None in the optimizer may have any type.
    """
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        for key in saved_group.keys() & group.keys() - {"params", "param_names"}:
            current = group[key]
            if current is not None and _form_of(current) != _form_of(saved_group[key]):
                raise CheckpointMismatchError(
                    "a hyperparameter in a checkpoint must have the same type as in the optimizer: "
                    f"{key!r} of group {number} of optimizer {index} is {saved_group[key]!r} "
                    f"({type(saved_group[key]).__name__}) there, and {current!r} "
                    f"({type(current).__name__}) in configure_optimizers. The optimizer does "
                    "not check loaded values. Restore configure_optimizers as it was, or load only "
                    "the weights."
                )


def _form_of(value: Any) -> Any:
    """Return what a saved value must share with the current one; int and float are one type."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return [_form_of(part) for part in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float
    return type(value)


def optimizer_tensors(
    index: int, optimizer: torch.optim.Optimizer, main: MainParameters
) -> dict[str, Entry]:
    """Return the entries of this rank's optimizer state.

    The name of an entry is ``optimizer.{index}.state.{parameter}.{key}``. A state tensor with the
    shape of its main parameter has the same placement. Every rank has a scalar in full.
    """
    entries = {}
    for name, parameter in _parameters_of(optimizer, main):
        held_part = _held(main, name)
        for key, value in _state_of(optimizer, parameter).items():
            if held_part is not None and isinstance(value, Tensor):
                placement = _placement(
                    name, key, tuple(value.shape), tuple(parameter.shape), held_part[0]
                )
                entries[f"{_prefix(index)}{name}.{key}"] = Entry(value, placement, held_part[1])
    return entries


def optimizer_metadata(
    optimizer: torch.optim.Optimizer, main: MainParameters, mesh: ParallelMesh
) -> dict[str, Any]:
    """Collect what an optimizer's state has besides tensors: parameter groups and plain values.

    Returns:
        ``{"groups": [...], "values": {name: {key: value}}}``, where a group is
        ``{"hyperparameters": {...}, "parameters": [names]}``, merged over the pipeline stages by
        group index

    Communication: one gather over the data axis, or over the world if ep is above 1, and one over
        pp.
    """
    groups: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    for group, names in zip(optimizer.param_groups, main.names_of(optimizer), strict=True):
        untied = [name for name in names if main.spec(name).tied_to is None]
        groups.append({"hyperparameters": hyperparameters_of(group), "parameters": untied})
        for name, parameter in zip(names, group["params"], strict=True):
            state = _state_of(optimizer, parameter)
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if plain and main.spec(name).tied_to is None:
                values[name] = plain
    _join_stage(groups, values, mesh)
    stages = all_gather_objects((groups, values), mesh.pp_cpu)
    hyperparameters = []
    for stage_groups, _ in stages:
        hyperparameters.append([group["hyperparameters"] for group in stage_groups])
    check_same_groups(hyperparameters)
    for number, group in enumerate(groups):
        group["parameters"] = [
            name for stage_groups, _ in stages for name in stage_groups[number]["parameters"]
        ]
    return {
        "groups": groups,
        "values": {name: plain for _, stage in stages for name, plain in stage.items()},
    }


def load_optimizer(
    source: Source,
    index: int,
    optimizer: torch.optim.Optimizer,
    main: MainParameters,
    mesh: ParallelMesh,
    metadata: Mapping[str, Any],
) -> None:
    """Load the state of an optimizer in place, and remove state that was not saved.

    Args:
        metadata: Result of :func:`optimizer_metadata` at the save.

    Raises:
        CheckpointMismatchError: On all ranks, if groups, their parameters, the types of their
            hyperparameters or the shapes of the state differ.
        UnsupportedError: On all ranks, if the state of a parameter cannot be sharded like the
            parameter.

    Communication: gathers of names over tp x pp and over the world.
    """
    names_of_groups = main.names_of(optimizer)
    original = _originals(names_of_groups, metadata["groups"], main)
    check_saved_groups(names_of_groups, metadata["groups"], original, mesh)
    load_optimizer_state(source, index, optimizer, main, mesh, metadata, original)


def load_optimizer_state(
    source: Source,
    index: int,
    optimizer: torch.optim.Optimizer,
    main: MainParameters,
    mesh: ParallelMesh,
    metadata: Mapping[str, Any],
    original: Mapping[str, str],
) -> None:
    """Load the state of an optimizer whose parameter groups are those that were saved.

    Args:
        original: Name under which the state of each parameter of this rank was saved.

    Raises:
        CheckpointMismatchError: On all ranks, if types of hyperparameters or shapes differ.
        UnsupportedError: On all ranks, if the state of a parameter cannot be sharded like the
            parameter.

    Communication: gathers of names over tp x pp and of errors over the world.
    """
    hyperparameters = [group["hyperparameters"] for group in metadata["groups"]]
    check_hyperparameters(optimizer.param_groups, hyperparameters, index)
    stored = open_source(source)
    saved = _saved_state(stored.tensors, index)
    expected = {
        f"{_prefix(index)}{name}.{key}": _replicated_spec(tensor.shape, main.spec(name), key)
        for name in original
        for key, tensor in saved.get(original[name], {}).items()
    }
    for name, parameter in _parameters_of(optimizer, main):
        # Remove state that the checkpoint lacks, such as that of a learning rate search, so that
        # training continues as if the search had not run.
        kept = (
            saved.get(original[name], {}).keys() | metadata["values"].get(original[name], {}).keys()
        )
        state = optimizer.state.pop(parameter, {})
        if remaining := {key: value for key, value in state.items() if key in kept}:
            optimizer.state[parameter] = remaining
    states = {name: saved.get(original[name], {}) for name in original}
    entries: dict[str, Entry] = {}
    # Data ranks have different parameters, so an error of one rank must reach all of them.
    # Otherwise they would wait in the next collective.
    verify_together(
        lambda: entries.update(_create_state(index, optimizer, main, states)), mesh.world_cpu
    )
    load_tensors(stored, entries, mesh, prefix=_prefix(index), expected=expected)
    for name, parameter in _parameters_of(optimizer, main):
        values = metadata["values"].get(original[name], {})
        if values and _held(main, name) is not None:
            optimizer.state[parameter].update(values)
    for group, values_of_group in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update(values_of_group)


def _prefix(index: int) -> str:
    return f"optimizer.{index}.state."


def _parameters_of(
    optimizer: torch.optim.Optimizer, main: MainParameters
) -> Iterator[tuple[str, nn.Parameter]]:
    for group, names in zip(optimizer.param_groups, main.names_of(optimizer), strict=True):
        yield from zip(names, group["params"], strict=True)


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    # `optimizer.state` is a defaultdict: indexing it would create an empty state.
    return optimizer.state.get(parameter, {})


def _held(main: MainParameters, name: str) -> tuple[Placement, bool] | None:
    """Return the placement and ``is_exclusive`` of this rank's part of a parameter, if any."""
    rank_slice = main.slices.get(name)
    if rank_slice is not None:
        return rank_slice.placement, rank_slice.is_exclusive
    return None if name in main.main_parameters else (main.spec(name), False)


def _placement(
    name: str, key: str, shape: tuple[int, ...], part_shape: tuple[int, ...], placement: Placement
) -> Placement:
    """Return the placement of a state tensor, which is tied if the parameter is tied.

    Args:
        name: Name of the parameter in errors.
        key: Name of the state.
        shape: Shape of the state tensor.
        part_shape: Shape of this rank's main parameter or slice of it.
        placement: Placement of this rank's main parameter or slice.
    """
    spec = placement.spec if isinstance(placement, FlatSlice) else placement
    if shape == part_shape:
        tied = replace(spec, tied_to=_tied_state(spec, key))
        return tied if spec is placement else replace(placement, spec=tied)  # type: ignore[arg-type]
    if shape not in ((), (1,)) and (
        isinstance(placement, FlatSlice) or part_shape != spec.full_shape
    ):
        raise UnsupportedError(
            "optimizer state must be shaped like its parameter or be a scalar to be saved: "
            f"{key!r} of {name!r} has shape {shape}, this rank's part of the parameter has "
            f"{part_shape} of {spec.full_shape}. There is no rule that shards such a state. Use an "
            "element-wise optimizer such as AdamW, or tp=1 with optimizer.zero=0."
        )
    # Data ranks with slices of the same parameter have equal scalars. The rank with the first
    # element saves them, and the others count as copies.
    is_copy = isinstance(placement, FlatSlice) and placement.start > 0
    return _replicated_spec(shape, spec, key, copy=1 if is_copy else 0)


def _replicated_spec(shape: tuple[int, ...], spec: ShardSpec, key: str, copy: int = 0) -> ShardSpec:
    whole = replicated_spec(torch.empty(shape, device="meta"), copy)
    return replace(whole, tied_to=_tied_state(spec, key), is_expert=spec.is_expert)


def _tied_state(spec: ShardSpec, key: str) -> str | None:
    return None if spec.tied_to is None else f"{spec.tied_to}.{key}"


def _originals(
    names_of_groups: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    main: MainParameters,
) -> dict[str, str]:
    """Return the name under which each parameter's state was saved.

    The state of a tied copy was saved under the name of the original parameter.
    """
    saved = {name for group in groups for name in group["parameters"]}
    originals = {}
    for name in (name for names in names_of_groups for name in names):
        tied_to = main.spec(name).tied_to
        originals[name] = name if tied_to is None else original_name(name, tied_to, saved) or name
    return originals


def _join_stage(groups: list[dict[str, Any]], values: dict[str, Any], mesh: ParallelMesh) -> None:
    """Merge the values and expert parameters of the other ranks of this pipeline stage."""
    # Without expert parallelism, the data ranks of a stage have the same names in the same order.
    axes = [mesh.data_cpu] if mesh.layout.ep == 1 else [mesh.data_cpu, mesh.tp_cpu]
    for axis in axes:
        for other_groups, part in all_gather_objects((groups, values), axis):
            values |= part
            for group, other_group in zip(groups, other_groups, strict=True):
                names = [*group["parameters"], *other_group["parameters"]]
                group["parameters"] = list(dict.fromkeys(names))


def _saved_state(
    tensors: Mapping[str, SavedTensor], index: int
) -> dict[str, dict[str, SavedTensor]]:
    """Return the shape and dtype of every saved state, by parameter and key."""
    states: dict[str, dict[str, SavedTensor]] = {}
    for entry, saved in tensors.items():
        if entry.startswith(_prefix(index)):
            name, key = entry.removeprefix(_prefix(index)).rsplit(".", 1)
            states.setdefault(name, {})[key] = saved
    return states


def _create_state(
    index: int,
    optimizer: torch.optim.Optimizer,
    main: MainParameters,
    saved: Mapping[str, Mapping[str, SavedTensor]],
) -> dict[str, Entry]:
    """Create the saved state tensors of every parameter or slice, and return them as entries."""
    capturable = {
        id(p): g.get("fused") or g.get("capturable")
        for g in optimizer.param_groups
        for p in g["params"]
    }
    entries: dict[str, Entry] = {}
    for name, parameter in _parameters_of(optimizer, main):
        held_part = _held(main, name)
        if held_part is None:
            continue
        state = dict(_state_of(optimizer, parameter))
        part_shape = tuple(parameter.shape)
        for key, saved_tensor in saved[name].items():
            # For a scalar parameter, `step` has the shape of the parameter but is not element-wise.
            is_like = saved_tensor.shape == held_part[0].full_shape and not (
                key == "step" and saved_tensor.shape == ()
            )
            shape = part_shape if is_like else saved_tensor.shape
            placement = _placement(name, key, shape, part_shape, held_part[0])
            if not isinstance(state.get(key), Tensor) or tuple(state[key].shape) != shape:
                # torch keeps `step` on the CPU unless the optimizer is fused or capturable, so that
                # reading it does not synchronize with the device.
                on_cpu = key == "step" and not capturable[id(parameter)]
                # Moments saved in lower precision are restored in the parameter's precision; the
                # next step converts them again if the option asks for it.
                is_lower = (
                    is_like
                    and saved_tensor.dtype.is_floating_point
                    and saved_tensor.dtype.itemsize < parameter.dtype.itemsize
                )
                dtype = parameter.dtype if is_lower else saved_tensor.dtype
                state[key] = torch.zeros(
                    shape, dtype=dtype, device="cpu" if on_cpu else parameter.device
                )
            entries[f"{_prefix(index)}{name}.{key}"] = Entry(state[key], placement, held_part[1])
        if state:
            optimizer.state[parameter] = state
    return entries
