"""Loading: each rank reads the pieces that it holds now, whatever layout wrote them."""

from __future__ import annotations

import io
import logging
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.directory import METADATA, Header, find_checkpoint
from lightning_megatron.checkpoint.matching import Match, match
from lightning_megatron.checkpoint.planners import ShardLoadPlanner, TensorToRead
from lightning_megatron.checkpoint.save import RANK_STATE
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, whole_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedTensor:
    """Describe one entry of a checkpoint.

    Args:
        shape: Shape of the full tensor (elements).
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RankState:
    """Hold the per-rank values that fit this rank best.

    Args:
        values: What ``rank_state`` was on the rank that saved it.
        rank: That rank's global rank.
        same_data: Whether the job that saved it cut its data among as many ranks; if not, values that say which samples
            were read are not this rank's.
        same_layout: Whether it had the same layout altogether.
    """

    values: dict[str, Any]
    rank: int
    same_data: bool
    same_layout: bool


def load_metadata(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read the values of the whole job.

    Args:
        path: The checkpoint.
        weights_only: True refuses anything but tensors and plain values; False unpickles whatever is there; None tries
            the first and falls back to the second, and says so in the log.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint.
    """
    file = find_checkpoint(path) / METADATA
    return _unpickle(io.BytesIO(file.read_bytes()), weights_only, str(file))


def saved_tensors(path: str | os.PathLike[str]) -> dict[str, SavedTensor]:
    """List the full tensors of a checkpoint by name."""
    return _tensors_of(_read_index(find_checkpoint(path)))


def load_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    mesh: ParallelMesh,
    strict: bool = True,
    prefix: str = "",
) -> Match:
    """Fill tensors in place, on whatever device and in whatever dtype they are.

    Padding rows keep their value. A tied copy is filled from its original's entry.

    Args:
        path: The checkpoint, saved by any layout.
        tensors: This rank's tensors by the names that they were saved under.
        mesh: The groups of this rank.
        strict: Refuse tensors that the checkpoint lacks and entries that no rank asks for; shapes must agree in any
        case. prefix: Only entries that start with it can be unexpected.

    Returns:
        what was found, missing and unexpected.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: one gather of names over tp x pp; reading needs none.
    """
    folder = find_checkpoint(path)
    saved = {name: entry.shape for name, entry in _tensors_of(_read_index(folder)).items()}
    found = match(saved, tensors, mesh, strict, prefix)
    wanted = {name: TensorToRead(source, *tensors[name]) for name, source in found.sources.items()}
    _read(ShardLoadPlanner(wanted), folder)
    return found


def copy_full_tensors(
    full: Mapping[str, Tensor],
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    mesh: ParallelMesh,
    strict: bool = True,
    prefix: str = "",
) -> Match:
    """Fill tensors in place from full ones that are in memory, such as those of a one-process checkpoint file.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: one gather of names over tp x pp.
    """
    found = match({name: tuple(tensor.shape) for name, tensor in full.items()}, tensors, mesh, strict, prefix)
    for name, source in found.sources.items():
        tensor, spec = tensors[name]
        spec.copy_from_full(tensor.detach(), full[source])
    return found


def read_full(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read full tensors into the memory of this process.

    Args:
        path: The checkpoint, saved by any layout.
        names: The entries to read; None means all.

    Raises:
        CheckpointMismatchError: If the checkpoint lacks one.
    """
    folder = find_checkpoint(path)
    saved = _tensors_of(_read_index(folder))
    chosen = list(saved) if names is None else list(names)
    absent = [name for name in chosen if name not in saved]
    if absent:
        raise CheckpointMismatchError(
            f"tensors to read must be in the checkpoint: {', '.join(absent[:10])} are not in {os.fspath(path)!r}. "
            f"It has {', '.join(list(saved)[:10])}{', ...' if len(saved) > 10 else ''}."
        )
    full = {name: torch.empty(saved[name].shape, dtype=saved[name].dtype) for name in chosen}
    _read(
        ShardLoadPlanner({name: TensorToRead(name, tensor, whole_spec(tensor)) for name, tensor in full.items()}),
        folder,
    )
    return full


def load_rank_state(path: str | os.PathLike[str], mesh: ParallelMesh, weights_only: bool | None = None) -> RankState:
    """Read the per-rank values saved at this rank's place, or at the nearest place of another layout.

    The place on the data axes counts most: the same dp and cp position where the saved layout has it. Positions that
    it does not have become 0.

    Args:
        path: The checkpoint, saved by any layout.
        mesh: The groups of this rank.
        weights_only: As for :func:`load_metadata`.
    """
    folder = find_checkpoint(path)
    saved, now = Header.read(folder).layout, mesh.layout
    place = {axis: index if index < getattr(saved, axis) else 0 for axis, index in now.coordinates(mesh.rank).items()}
    ranks = range(saved.rank_offset, saved.rank_offset + saved.world_size)
    rank = next(rank for rank in ranks if saved.coordinates(rank) == place) - saved.rank_offset
    entry = f"{RANK_STATE}{rank}"
    planner = ShardLoadPlanner({}, [entry])
    _read(planner, folder)
    values = _unpickle(planner.bytes_of[entry], weights_only, f"{entry} of {folder}")
    return RankState(values, rank, (saved.dp, saved.cp) == (now.dp, now.cp), saved == now)


def _read_index(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def _tensors_of(index: Metadata) -> dict[str, SavedTensor]:
    return {
        name: SavedTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read(planner: ShardLoadPlanner, folder: Path) -> None:
    with warnings.catch_warnings():
        # Every rank reads for itself, without communication, on purpose.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)


def _unpickle(file: io.BytesIO, weights_only: bool | None, what: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        if weights_only:
            raise
        logger.warning(
            "%s holds more than tensors and plain values, and is unpickled in full: %s", what, _first_line(error)
        )
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0] if lines else str(error).splitlines()[0]
