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
        missing: Names of the tensors that any rank needs and the checkpoint lacks.
        unexpected: Names of the entries that no rank needs.
    """

    sources: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


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
        mesh: Mesh of this rank.
        strict: Whether missing and unexpected entries raise an error.
        prefix: Prefix of the names of entries that may be reported as unexpected.

    Raises:
        CheckpointMismatchError: On all ranks, with names and shapes.

    Communication: one gather of names over tp x pp, or over the world if ep is above 1.
    """
    sources: dict[str, str] = {}
    missing: list[str] = []
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
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
    reports = all_gather_objects((set(sources.values()), missing, shapes), mesh.full_model_cpu)
    needed = set().union(*(report[0] for report in reports)) | {
        source for report in reports for source, _, _ in report[2]
    }
    all_missing = sorted({name for report in reports for name in report[1]})
    all_shapes = sorted({entry for report in reports for entry in report[2]})
    unexpected = sorted(name for name in saved if name.startswith(prefix) and name not in needed)
    result = Match(sources, tuple(all_missing), tuple(unexpected))
    complaints = [
        f"{name} is {saved_shape} in the checkpoint and {model_shape} in the model"
        for name, saved_shape, model_shape in all_shapes[:_NUM_SHOWN]
    ]
    complaints += (
        [f"{len(all_shapes) - _NUM_SHOWN} more have other shapes"]
        if len(all_shapes) > _NUM_SHOWN
        else []
    )
    if strict:
        complaints += _listed("missing in the checkpoint", all_missing)
        complaints += _listed("unexpected in the checkpoint", unexpected)
    if complaints:
        raise CheckpointMismatchError(
            f"the tensors of the checkpoint must match the model: {'; '.join(complaints)}. Build "
            "the model with the saved configuration"
            + ("." if all_shapes else ", or load with strict=False.")
        )
    return result


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return [f"{what}: {', '.join(names[:_NUM_SHOWN])}{more}"]
