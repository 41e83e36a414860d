"""Matching of a model's tensors with the entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement
from lightning_megatron.optimizer.shared_gradients import original_name

_NUM_SHOWN = 10


@dataclass(frozen=True)
class Match:
    """Result of matching a model's tensors with the entries of a checkpoint.

    Args:
        sources: Name of the entry for every tensor of this rank's stage that the checkpoint has.
    """

    sources: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


#: Name of an entry, its shape in the checkpoint and in the model.
_OtherShape = tuple[str, tuple[int, ...], tuple[int, ...]]


def match(
    saved: Mapping[str, Sequence[int]],
    expected: Mapping[str, Placement],
    mesh: ParallelMesh,
    strict: bool,
    prefix: str,
) -> Match:
    """Find the entry of every tensor; a tied copy uses the entry of its original.

    Args:
        saved: Full shape of every entry of the checkpoint.
        expected: Placements of the tensors of this rank's stage, including those of other data
            ranks.
        prefix: Prefix of the names of entries that may be reported as unexpected.

    Raises:
        CheckpointMismatchError: On all ranks, with names and shapes.

    Communication: one gather of names over tp x pp, or over the world if ep is above 1.
    """
    sources: dict[str, str] = {}
    missing: list[str] = []
    shapes: list[_OtherShape] = []
    for name, spec in expected.items():
        if 0 in spec.full_shape:
            continue  # tensors without elements are not saved
        source = name if name in saved else None
        if spec.tied_to is not None:
            source = original_name(name, spec.tied_to, saved.keys()) or source
        if source is None:
            missing.append(name)
        elif tuple(saved[source]) != spec.full_shape:
            shapes.append((source, tuple(saved[source]), spec.full_shape))
        else:
            sources[name] = source
    report = set(sources.values()), missing, shapes
    found, missing_of, shapes_of = zip(
        *all_gather_objects(report, mesh.full_model_cpu), strict=True
    )
    all_missing = sorted(set().union(*missing_of))
    all_shapes = sorted(set().union(*shapes_of))
    needed = set().union(*found, (source for source, _, _ in all_shapes))
    unexpected = sorted(name for name in saved if name.startswith(prefix) and name not in needed)
    other_shapes = [
        f"{name} is {saved_shape} in the checkpoint and {model_shape} in the model"
        for name, saved_shape, model_shape in all_shapes
    ]
    complaints = [_listed(other_shapes)] if other_shapes else []
    if strict and all_missing:
        complaints.append(f"missing in the checkpoint: {_listed(all_missing)}")
    if strict and unexpected:
        complaints.append(f"unexpected in the checkpoint: {_listed(unexpected)}")
    if complaints:
        raise CheckpointMismatchError(
            f"the tensors of the checkpoint must match the model: {'; '.join(complaints)}. Build "
            "the model with the saved configuration"
            + ("." if all_shapes else ", or load with strict=False.")
        )
    return Match(sources, tuple(all_missing), tuple(unexpected))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{', '.join(names[:_NUM_SHOWN])}{more}"
