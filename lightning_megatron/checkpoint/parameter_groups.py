"""Comparison of an optimizer's parameter groups among stages and with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh

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
    if len(set(counts)) > 1:
        raise CheckpointMismatchError(
            "the optimizers of all pipeline stages must have equally many parameter groups: "
            f"{counts}. A checkpoint merges them by number. Build the same groups on every stage "
            "in configure_optimizers, empty ones included."
        )
    different = different_hyperparameters(stages)
    if different is not None:
        number, key, values = different
        raise CheckpointMismatchError(
            f"a parameter group must have the same hyperparameters on all pipeline stages: {key!r} "
            f"of group {number} is {values} by stage. A checkpoint merges groups by number and "
            "keeps one value. Build the same groups on every stage in configure_optimizers, empty "
            "ones included."
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

    Communication: a gather of names over all ranks.
    """
    saved = {name: number for number, group in enumerate(groups) for name in group["parameters"]}
    moved = [
        f"{name} is in group {number}, but was saved in {saved.get(original[name], 'none')}"
        for number, names in enumerate(names_of_groups)
        for name in names
        if saved.get(original[name]) != number
    ]
    report = len(names_of_groups), moved, set(original.values())
    numbers, moved_of, present_of = zip(
        *all_gather_objects(report, mesh.full_model_cpu), strict=True
    )
    complaints = [
        f"{len(groups)} groups were saved, the optimizer has {number}"
        for number in set(numbers) - {len(groups)}
    ]
    complaints += sorted(set().union(*moved_of))[:10]
    present = set().union(*present_of)
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
    groups: Iterable[Mapping[str, Any]],
    saved: Iterable[Mapping[str, Any]],
    index: int,
) -> None:
    """Check that saved hyperparameters have the types of the optimizer's current ones.

    Values may differ. A hyperparameter that is None in the optimizer may have any type.
    """
    for number, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        for key in saved_group.keys() & group.keys() - {"params", "param_names"}:
            if not _has_same_type(group[key], saved_group[key]):
                raise CheckpointMismatchError(
                    "a hyperparameter in a checkpoint must have the same type as in the optimizer: "
                    f"{key!r} of group {number} of optimizer {index} is {saved_group[key]!r} "
                    f"({type(saved_group[key]).__name__}) there, and {group[key]!r} "
                    f"({type(group[key]).__name__}) in configure_optimizers. The optimizer does "
                    "not check loaded values. Restore configure_optimizers as it was, or load only "
                    "the weights."
                )


def _has_same_type(current: Any, saved: Any) -> bool:
    """Return whether a saved value has the type of the current one; int and float are one type."""
    if current is None:
        return True
    if isinstance(current, Tensor) or isinstance(saved, Tensor):
        return (
            isinstance(current, Tensor)
            and isinstance(saved, Tensor)
            and current.shape == saved.shape
        )
    if isinstance(current, bool) or isinstance(saved, bool):
        return isinstance(current, bool) and isinstance(saved, bool)
    if isinstance(current, (int, float)):
        return isinstance(saved, (int, float))
    if isinstance(current, (list, tuple)):
        is_list = isinstance(saved, (list, tuple)) and len(current) == len(saved)
        return is_list and all(map(_has_same_type, current, saved))
    return isinstance(saved, type(current)) or isinstance(current, type(saved))
