"""Weights that ``on_save_checkpoint`` has removed, changed or added in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_megatron.checkpoint import model_tensors
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.metadata_checks import MODEL
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, replicated_spec
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.strategy.checks.run_checks import digest_of
from lightning_megatron.strategy.private.loops import is_overridden

#: Hooks that run between a save and the end of the next backward pass.
_HOOKS = tuple(
    """
    on_train_batch_start on_train_batch_end on_train_epoch_start on_train_epoch_end
    on_validation_start on_validation_epoch_start on_validation_batch_start
    on_validation_batch_end on_validation_epoch_end on_validation_end
    on_before_zero_grad optimizer_zero_grad on_after_backward on_before_backward
    """.split()
)
_LIBRARY_PACKAGES = ("lightning_megatron", "lightning")


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a model that are saved.

    Args:
        removed: Names that no rank saves.
        added: Names of tensors that are not in the model.
    """

    tensors: dict[str, Entry]
    removed: frozenset[str] = frozenset()
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class _WeightChanges:
    """Differences between a rank's ``state_dict`` and its module; ``added`` has digests.

    Changes of experts are kept apart from all others, because experts are replicated on other
    ranks. The first rank that holds a shard decides.

    Args:
        place: Whether the changes are of experts, the stage, and the shard of experts.
        part: Tensor-parallel rank.
    """

    place: tuple[bool, int, int]
    part: int
    removed: frozenset[str]
    changed: frozenset[str]
    added: Mapping[str, str] = field(default_factory=dict)


def weights_to_save(
    state_dict: Mapping[str, Any],
    module: LightningModule,
    main: MainParameters,
    mesh: ParallelMesh,
    *,
    all_changed: bool = False,
) -> SavedWeights:
    """Return the weights to save, from a checkpoint's ``state_dict`` and the module's own.

    Unchanged tensors are saved from the main parameters, in full precision. Changed tensors are
    saved as they are on the first data-parallel rank, and changed experts as they are on the first
    rank with the same experts. Lightning's other strategies save the values of rank 0 in the same
    way.

    Args:
        all_changed: Whether no tensor is the module's own. Averages may equal the weights on some
            ranks only.

    Raises:
        UnsupportedError: On all ranks, for values whose position in the full tensors is unknown.

    Communication: one all-reduce of a flag over the world, and after changes a gather of names.
    """
    current = module.state_dict()
    _warn_of_extra_states(current)
    changes, complaints = _compare(state_dict, current, main, mesh, all_changed)
    gathered = _of_all_ranks(changes, complaints, mesh)
    first = {(part.place, part.part): part for parts, _ in gathered for part in parts}
    _check(first.values(), [complaint for _, part in gathered for complaint in part])
    decided = [first[part.place, part.part] for part in changes]
    changed = frozenset().union(*(part.changed for part in decided))
    kept_out = changed.union(*(part.removed for part in decided))
    tensors = {
        name: entry
        for name, entry in model_tensors(module, main).items()
        if name.removeprefix(MODEL) not in kept_out
    }
    for name, first_name in first_names(current).items():
        if name in changed and name in state_dict and name == first_name:
            placement = _placement(name, state_dict[name], current[name], main)
            if mesh.replica_axis(placement.is_expert).is_first:
                tensors[f"{MODEL}{name}"] = Entry(
                    state_dict[name].detach(), placement, is_exclusive=True
                )
    added: dict[str, int] = {}
    for part in first.values():
        for name in part.added:
            # Several stages may have added the same tensor: only one of them saves it.
            added.setdefault(name, part.place[1])
    for name, stage in added.items():
        if stage == mesh.pp.rank and mesh.tp.is_first and mesh.data.is_first:
            tensors[f"{MODEL}{name}"] = Entry(
                state_dict[name].detach(), replicated_spec(state_dict[name]), is_exclusive=True
            )
    removed = frozenset().union(*(report.removed for report in first.values()))
    return SavedWeights(tensors, removed, tuple(sorted(added)))


def _of_all_ranks(
    changes: list[_WeightChanges], complaints: list[str], mesh: ParallelMesh
) -> list[tuple[list[_WeightChanges], list[str]]]:
    """Return the changes of the ranks that decide; those of this rank if no rank has any."""
    is_changed = complaints or any(part.removed or part.changed or part.added for part in changes)
    if not is_true_anywhere(bool(is_changed), mesh.world_cpu):
        return [(changes, [])]
    deciding = [part for part in changes if mesh.replica_axis(part.place[0]).is_first]
    return all_gather_objects((deciding, complaints), mesh.world_cpu)


def _warn_of_extra_states(current: Mapping[str, Any]) -> None:
    names = [name for name, value in current.items() if not isinstance(value, Tensor)]
    if names:
        rank_zero_warn(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} of the module's state_dict "
            f"({len(names)} in all) cannot be saved, because only tensors can be. Put such values "
            "into the checkpoint in on_save_checkpoint, under a key of their own."
        )


def _compare(
    state_dict: Mapping[str, Any],
    current: Mapping[str, Any],
    main: MainParameters,
    mesh: ParallelMesh,
    all_changed: bool,
) -> tuple[list[_WeightChanges], list[str]]:
    """Return the changes of all other weights and of experts, and what cannot be saved."""
    changed = set()
    added = {}
    complaints = []
    experts = frozenset(name for name in current if main.holds(name) and main.spec(name).is_expert)
    first_name = first_names(current)
    for name, value in state_dict.items():
        now = current.get(name)
        if name in current and not isinstance(now, Tensor):
            continue
        if not isinstance(value, Tensor):
            complaints.append(
                "values that on_save_checkpoint puts into checkpoint['state_dict'] must be "
                f"tensors: {name!r} is a {type(value).__name__}. The state_dict is saved as "
                "tensors that every layout can load. Put other values into the checkpoint under a "
                "key of their own."
            )
        elif now is None:
            added[name] = digest_of(value) if mesh.model.size > 1 else ""
        elif (
            all_changed
            or main.user_writes.has_replaced_memory(name)
            or not _is_same(value, now, main.main(name).dtype if main.holds(name) else now.dtype)
        ):
            changed.add(name)
            axis = mesh.etp if name in experts else mesh.tp
            if axis.size > 1 and value.shape != now.shape:
                complaints.append(
                    f"with {axis.name} ({axis.size}) above 1 on_save_checkpoint may replace a "
                    f"tensor of checkpoint['state_dict'] only by one of the same shape: {name!r} "
                    f"was {tuple(now.shape)} and is {tuple(value.shape)}. The part of the full "
                    "tensor on each rank would be unknown. Keep the shape, put the tensor into the "
                    "checkpoint under a key of its own, or change it in the file that "
                    "'lightning-megatron checkpoint consolidate' writes."
                )
            elif not _is_equal(value, state_dict.get(first_name[name])):
                complaints.append(
                    "names that share one parameter must have one value: on_save_checkpoint has "
                    f"changed {name!r}, but not the parameter's first name in the same way. The "
                    "parameter is saved once. Change all its names alike."
                )
    removed = current.keys() - state_dict.keys()
    of_others = _WeightChanges(
        (False, mesh.pp.rank, 0),
        mesh.tp.rank,
        frozenset(removed - experts),
        frozenset(changed - experts),
        added,
    )
    of_experts = _WeightChanges(
        (True, mesh.pp.rank, mesh.ep.rank), mesh.etp.rank, experts & removed, experts & changed
    )
    return [of_others, of_experts], complaints


def _check(first: Iterable[_WeightChanges], complaints: list[str]) -> None:
    """Refuse changes that cannot be merged, on all ranks."""
    whole_of: dict[tuple[bool, int, int], _WeightChanges] = {}
    known_digests: dict[str, str] = {}
    for report in first:
        # Tensor-parallel ranks hold shards of the same tensors, so all must agree with the first.
        whole = whole_of.setdefault(report.place, report)
        differing = (
            (report.removed ^ whole.removed)
            | (report.changed ^ whole.changed)
            | (report.added.keys() ^ whole.added)
        )
        complaints += [
            "on_save_checkpoint must change checkpoint['state_dict'] alike on all tensor-parallel "
            f"ranks: {name!r} is changed, added or left out on some of them. Each rank has a part "
            "of the full tensor. Make the same change on every rank."
            for name in sorted(differing)
        ]
        complaints += [
            "a tensor that on_save_checkpoint adds to checkpoint['state_dict'] must be the same on "
            f"all tensor and pipeline-parallel ranks: {name!r} is not. The place of parts in a "
            "full tensor is not known. Add whole tensors, or put the parts into the checkpoint "
            "under a key of their own."
            for name, digest in report.added.items()
            if known_digests.setdefault(name, digest) != digest
        ]
    if complaints:
        raise UnsupportedError(complaints[0])


def _is_same(value: Tensor, current: Tensor, main_dtype: torch.dtype) -> bool:
    """Return whether a tensor is the module's own or a copy, possibly of main parameters."""
    if value.shape != current.shape or value.dtype not in (current.dtype, main_dtype):
        return False
    has_same_layout = (
        value.dtype == current.dtype
        and value.device == current.device
        and value.stride() == current.stride()
    )
    return (has_same_layout and value.data_ptr() == current.data_ptr()) or torch.equal(
        value, current.to(value.device, value.dtype)
    )


def first_names(current: Mapping[str, Any]) -> dict[str, str]:
    """Return the name under which each tensor is saved: the first of its names."""
    first_name_of: dict[tuple[Any, ...], str] = {}
    return {
        name: first_name_of.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if tensor.numel()
        else name
        for name, tensor in current.items()
        if isinstance(tensor, Tensor)
    }


def _is_equal(value: Tensor, reference: Any) -> bool:
    return (
        isinstance(reference, Tensor)
        and reference.shape == value.shape
        and torch.equal(reference, value.to(reference))
    )


def _placement(name: str, value: Tensor, current: Tensor, main: MainParameters) -> ShardSpec:
    spec = main.spec(name) if main.holds(name) else replicated_spec(current)
    return (
        spec
        if value.shape == current.shape
        else replace(replicated_spec(value), is_expert=spec.is_expert)
    )


def only_steps_change_weights(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether only optimizer steps can change weights and optimizer states.

    If so, a GPU may run forward and backward passes while a save still copies weights and states.
    User hooks may change anything, so a hook in between makes the step wait for the copies.
    """
    if not module.automatic_optimization:
        return False
    if not _is_of_library(module) and any(_has_own(module, hook) for hook in _HOOKS):
        return False
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    changing = (StochasticWeightAveraging, WeightAveraging)
    return all(
        _is_of_library(callback) and not isinstance(callback, changing) for callback in callbacks
    )


def _has_own(module: LightningModule, hook: str) -> bool:
    """Return whether a user wrote a hook; a user's subclass may inherit one of this package."""
    return is_overridden(hook, module, LightningModule) and not _is_library_module(
        getattr(getattr(module, hook), "__module__", "")
    )


def _is_of_library(part: object) -> bool:
    return _is_library_module(type(part).__module__)


def _is_library_module(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARY_PACKAGES
