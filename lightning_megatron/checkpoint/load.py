"""Loading of checkpoints: each rank reads its own pieces of the full tensors.

The checkpoint may have been saved under any layout. Reading runs no code that a file contains,
unless the caller requests it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoint.directory import find_checkpoint, is_sharded_checkpoint
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.header import METADATA, RANK_STATE, TENSOR_INDEX, Header
from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.checkpoint.open_checkpoint import (
    OpenCheckpoint,
    Source,
    TensorToRead,
    content_of,
    damaged,
    open_source,
    read_object,
)
from lightning_megatron.checkpoint.tensor_index import SavedTensor
from lightning_megatron.checkpoint.values import from_bytes, read_single_file
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement
from lightning_megatron.hub import TOKENIZER
from lightning_megatron.optimizer.main_parameters import original_name

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
    missing: set[str] = set()
    shapes: set[_OtherShape] = set()
    for name, spec in expected.items():
        if 0 in spec.full_shape:
            continue  # tensors without elements are not saved
        source = name if name in saved else None
        if spec.tied_to is not None:
            source = original_name(name, spec.tied_to, saved.keys()) or source
        if source is None:
            missing.add(name)
        elif tuple(saved[source]) != spec.full_shape:
            shapes.add((source, tuple(saved[source]), spec.full_shape))
        else:
            sources[name] = source
    found, *others = mesh.unions_over_model(set(sources.values()), missing, shapes)
    all_missing, all_shapes = map(sorted, others)
    needed = found.union(source for source, _, _ in all_shapes)
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


@dataclass(frozen=True)
class RankState:
    """Values that the rank of the saved job with the closest coordinates stored.

    Args:
        rank: Global rank of the saved rank.
        same_data: Whether the saved job divided its data among the same number of ranks. Otherwise
            the values about consumed samples are not valid for this rank.
    """

    values: dict[str, Any]
    rank: int
    same_data: bool


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a checkpoint: layout, step, epoch and files, without unpickling."""
    return find_checkpoint(path).header


def load_metadata(
    source: str | os.PathLike[str] | OpenCheckpoint, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read the metadata of a checkpoint: the values of the whole job.

    Args:
        weights_only: False unpickles objects of any type, which can run code from the file. True
            and None accept only tensors, plain values, and types registered with
            ``torch.serialization.add_safe_globals``.
    """
    checkpoint = (
        source.checkpoint if isinstance(source, OpenCheckpoint) else find_checkpoint(source)
    )
    values = _named_values(
        content_of(checkpoint, METADATA), checkpoint.file(METADATA), weights_only
    )
    check_values(values, checkpoint.file(METADATA))
    return values


def saved_tensors(source: Source) -> Mapping[str, SavedTensor]:
    """Return the shape and dtype of every full tensor of a checkpoint, by name."""
    return open_source(source).tensors


def load_tensors(
    source: Source,
    tensors: Mapping[str, Entry],
    mesh: ParallelMesh,
    strict: bool = True,
    prefix: str = "",
    expected: Mapping[str, Placement] | None = None,
) -> Match:
    """Load tensors in place, on any device and in any dtype.

    Padding rows keep their values. A tied copy is loaded from the entry of its original.

    Args:
        tensors: Entries of this rank by the names under which they were saved.
        strict: Whether missing and unexpected entries raise an error. Different shapes always do.
        prefix: Prefix of the names of entries that may be reported as unexpected.
        expected: Placements of all tensors of this rank's pipeline stage, if this rank has only
            some of them; None means those of ``tensors``.

    Returns:
        Names of found, missing and unexpected entries

    Raises:
        CheckpointMismatchError: On all ranks, with names and shapes.

    Communication: one gather of names over tp x pp; reading needs none.
    """
    stored = open_source(source)
    shapes = {name: entry.shape for name, entry in stored.tensors.items()}
    if expected is None:
        expected = {name: entry.placement for name, entry in tensors.items()}
    matched = match(shapes, expected, mesh, strict, prefix)
    stored.read(
        TensorToRead(matched.sources[name], entry.tensor, entry.placement)
        for name, entry in tensors.items()
        if name in matched.sources
    )
    return matched


def read_full(
    path: str | os.PathLike[str], names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Read full tensors into the memory of this process."""
    return OpenCheckpoint.open(path).read_full(names)


def load_rank_state(
    source: str | os.PathLike[str] | OpenCheckpoint,
    mesh: ParallelMesh,
    weights_only: bool | None = None,
) -> RankState:
    """Read the per-rank values that were saved at this rank's coordinates in the layout.

    If the saved layout is smaller along an axis and lacks this rank's coordinate, 0 takes its
    place.
    """
    stored = source if isinstance(source, OpenCheckpoint) else OpenCheckpoint.open(source)
    saved = stored.checkpoint.header.layout
    layout = mesh.layout
    coordinates = {
        axis: index if index < getattr(saved, axis) else 0
        for axis, index in layout.coordinates(mesh.rank).items()
    }
    ranks = range(saved.rank_offset, saved.rank_offset + saved.world_size)
    rank = (
        next(rank for rank in ranks if saved.coordinates(rank) == coordinates) - saved.rank_offset
    )
    name = f"{RANK_STATE}{rank}"
    if name not in stored.index.objects:
        raise damaged(stored.checkpoint, TENSOR_INDEX, f"it does not list {name}")
    content = read_object(stored.checkpoint, stored.index.objects[name])
    values = _named_values(content, f"{name} of {stored.checkpoint.path}", weights_only)
    return RankState(values, rank, (saved.dp, saved.cp) == (layout.dp, layout.cp))


def _named_values(content: bytes, what: str, weights_only: bool | None) -> dict[str, Any]:
    values = from_bytes(content, what, weights_only)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise CorruptDataError(
            f"a file of a checkpoint must be as it was written: {what} holds a "
            f"{type(values).__name__} in place of named values. The file is damaged. Use another "
            "checkpoint."
        )
    return values


def saved_hyper_parameters(path: str) -> Mapping[str, Any] | None:
    """Return the hyperparameters of the module in a checkpoint; None if there is no checkpoint.

    The result is empty if the checkpoint has no hyperparameters.
    """
    content = _values_of(path, None)
    settings = None if content is None else content.get("hyper_parameters", {})
    return settings if settings is None or isinstance(settings, Mapping) else {}


def saved_tokenizer(path: str, weights_only: bool | None = None) -> dict[str, bytes]:
    """Return the files of the tokenizer in a checkpoint, by name; empty if it has none."""
    files = (_values_of(path, weights_only) or {}).get(TOKENIZER, {})
    for name, content in files.items():
        if Path(name).name != name or not isinstance(content, bytes):
            raise CorruptDataError(
                f"the tokenizer of a checkpoint must be files by their names: {path} has {name!r}. "
                "Use another checkpoint."
            )
    return dict(files)


def _values_of(path: str, weights_only: bool | None) -> Mapping[str, Any] | None:
    if Path(path).is_file():
        return read_single_file(path, weights_only)
    return load_metadata(path, weights_only) if is_sharded_checkpoint(path) else None
