"""Loading: each rank reads the pieces that it holds now, whatever layout wrote them, and runs nothing that it reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoint.directory import find_checkpoint
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.header import METADATA, Header
from lightning_megatron.checkpoint.matching import Match, match
from lightning_megatron.checkpoint.metadata_checks import check_metadata
from lightning_megatron.checkpoint.planners import ShardLoadPlanner, TensorToRead
from lightning_megatron.checkpoint.save import RANK_STATE
from lightning_megatron.checkpoint.stored import SavedTensor, Stored, content_of
from lightning_megatron.checkpoint.values import from_bytes
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement


@dataclass(frozen=True)
class RankState:
    """Hold the per-rank values that fit this rank best.

    Args:
        values: What ``rank_state`` was on the rank that saved it.
        rank: That rank's global rank.
        same_data: Whether the job that saved it cut its data among as many ranks; if not, values that say which samples
            were read are not this rank's.
    """

    values: dict[str, Any]
    rank: int
    same_data: bool


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read what is known of a checkpoint without unpickling anything: layout, step, epoch, files.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint.
        CorruptDataError: If its header is damaged.
    """
    return find_checkpoint(path).header


def load_metadata(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read the values of the whole job.

    Args:
        path: The checkpoint.
        weights_only: False unpickles whatever is there, which runs code that the file names; otherwise only tensors,
            plain values and types that ``torch.serialization.add_safe_globals`` was told of are read.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint.
        UnsupportedError: If there are other objects, naming their types.
        CorruptDataError: If the file is damaged.
    """
    checkpoint = find_checkpoint(path)
    values = _named_values(content_of(checkpoint, METADATA), checkpoint.file(METADATA), weights_only)
    check_metadata(values, checkpoint.header, checkpoint.file(METADATA))
    return values


def saved_tensors(path: str | os.PathLike[str]) -> dict[str, SavedTensor]:
    """List the full tensors of a checkpoint by name."""
    return Stored.open(path).tensors


def load_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Entry],
    mesh: ParallelMesh,
    strict: bool = True,
    prefix: str = "",
    expected: Mapping[str, Placement] | None = None,
) -> Match:
    """Fill tensors in place, on whatever device and in whatever dtype they are.

    Padding rows keep their value. A tied copy is filled from its original's entry.

    Args:
        path: The checkpoint, saved by any layout.
        tensors: This rank's tensors by the names that they were saved under.
        mesh: The groups of this rank.
        strict: Refuse tensors that the checkpoint lacks and entries that no rank asks for; shapes must agree in any
            case.
        prefix: Only entries that start with it can be unexpected.
        expected: All tensors of this rank's stage, where this rank holds only some of them; None means ``tensors``.

    Returns:
        what was found, missing and unexpected.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.
        CorruptDataError: If a file that is read is damaged, naming it.

    Communication: one gather of names over tp x pp; reading needs none.
    """
    stored = Stored.open(path)
    shapes = {name: entry.shape for name, entry in stored.tensors.items()}
    found = match(shapes, _all_expected(tensors, expected), mesh, strict, prefix)
    wanted = {
        name: TensorToRead(found.sources[name], entry.tensor, entry.placement)
        for name, entry in tensors.items()
        if name in found.sources
    }
    stored.read(ShardLoadPlanner(wanted))
    return found


def copy_full_tensors(
    full: Mapping[str, Tensor],
    tensors: Mapping[str, Entry],
    mesh: ParallelMesh,
    strict: bool = True,
    prefix: str = "",
    expected: Mapping[str, Placement] | None = None,
) -> Match:
    """Fill tensors in place from full ones that are in memory, such as those of a one-process checkpoint file.

    Args:
        full: The full tensors, by the names that they would be saved under.
        tensors: As for :func:`load_tensors`.
        mesh: As for :func:`load_tensors`.
        strict: As for :func:`load_tensors`.
        prefix: As for :func:`load_tensors`.
        expected: As for :func:`load_tensors`.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: one gather of names over tp x pp.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    found = match(shapes, _all_expected(tensors, expected), mesh, strict, prefix)
    for name, entry in tensors.items():
        if name in found.sources:
            entry.placement.copy_from_full(entry.tensor.detach(), full[found.sources[name]])
    return found


def read_full(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read full tensors into the memory of this process.

    Args:
        path: The checkpoint, saved by any layout.
        names: The entries to read; None means all.

    Raises:
        CheckpointMismatchError: If the checkpoint lacks one.
        CorruptDataError: If a file that is read is damaged, naming it.
    """
    return Stored.open(path).read_full(names)


def load_rank_state(path: str | os.PathLike[str], mesh: ParallelMesh, weights_only: bool | None = None) -> RankState:
    """Read the per-rank values saved at this rank's place, or at the nearest place of another layout.

    The place on the data axes counts most: the same dp and cp position where the saved layout has it. Positions that
    it does not have become 0.

    Args:
        path: The checkpoint, saved by any layout.
        mesh: The groups of this rank.
        weights_only: As for :func:`load_metadata`.
    """
    checkpoint = find_checkpoint(path)
    saved, now = checkpoint.header.layout, mesh.layout
    place = {axis: index if index < getattr(saved, axis) else 0 for axis, index in now.coordinates(mesh.rank).items()}
    ranks = range(saved.rank_offset, saved.rank_offset + saved.world_size)
    rank = next(rank for rank in ranks if saved.coordinates(rank) == place) - saved.rank_offset
    values = load_rank_states(path, [rank], weights_only)[rank]
    return RankState(values, rank, (saved.dp, saved.cp) == (now.dp, now.cp))


def load_rank_states(
    path: str | os.PathLike[str], ranks: Iterable[int] | None = None, weights_only: bool | None = None
) -> dict[int, dict[str, Any]]:
    """Read the per-rank values of some ranks of the job that saved, or of all.

    Args:
        path: The checkpoint.
        ranks: Global ranks of that job, counted from its first; None means all.
        weights_only: As for :func:`load_metadata`.
    """
    stored = Stored.open(path)
    checkpoint = stored.checkpoint
    chosen = range(checkpoint.header.layout.world_size) if ranks is None else ranks
    entries = {rank: f"{RANK_STATE}{rank}" for rank in chosen}
    planner = ShardLoadPlanner({}, entries.values())
    stored.read(planner)
    return {
        rank: _named_values(planner.bytes_of[entry].getvalue(), f"{entry} of {checkpoint.path}", weights_only)
        for rank, entry in entries.items()
    }


def _all_expected(tensors: Mapping[str, Entry], expected: Mapping[str, Placement] | None) -> Mapping[str, Placement]:
    return {name: entry.placement for name, entry in tensors.items()} if expected is None else expected


def _named_values(content: bytes, what: str, weights_only: bool | None) -> dict[str, Any]:
    found = from_bytes(content, what, weights_only)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CorruptDataError(
            f"a file of a checkpoint must be as it was written: {what} holds a {type(found).__name__} in place of "
            "named values. It is damaged. Use another checkpoint."
        )
    return found
