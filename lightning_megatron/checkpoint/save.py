"""Saving: every piece of every full tensor once, by ranks that share the work, into a directory that appears whole."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_megatron.checkpoint.directory import (
    discard,
    local_path,
    on_first_rank,
    prepare,
    publish,
    unfinished_path,
    write_metadata,
)
from lightning_megatron.checkpoint.planners import BoxToWrite, ShardSavePlanner
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec

RANK_STATE = "rank_state."

#: Boxes below this size are written by the first data rank: spreading them gains nothing (bytes).
_SMALL = 65536


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[Tensor, ShardSpec]],
    metadata: dict[str, Any],
    rank_state: Mapping[str, Any],
    mesh: ParallelMesh,
) -> None:
    """Write a checkpoint that any layout can load.

    Every full tensor becomes one entry without padding. Copies and tied copies are left out, and the data-parallel
    ranks share the writing. The files are written beside ``path`` and get its name only when all ranks are done, so
    that an interrupted save is never seen; a checkpoint of that name stays until then.

    Args:
        path: The directory to create or replace, on a file system that all ranks see.
        tensors: This rank's tensors by names that do not depend on the layout. Ranks of tp and pp may have different
            ones; the data-parallel ranks of one place have the same, in the same order.
        metadata: Picklable values of the whole job; those of rank 0 are saved.
        rank_state: Picklable values of this rank, found again by the rank at the same place.
        mesh: The groups of this rank.

    Raises:
        UnsupportedError: For a URL.
        RuntimeError: On all ranks, if any rank cannot write.

    Communication: gathers plans and results over the world; call it on all ranks.
    """
    folder = local_path(path)
    on_first_rank(partial(prepare, folder), mesh, f"preparing the checkpoint {folder}")
    objects = {f"{RANK_STATE}{mesh.world.rank}": partial(_pickled, dict(rank_state))}
    try:
        _write(ShardSavePlanner(boxes_to_write(tensors, mesh), objects), folder, mesh)
        unfinished = unfinished_path(folder)
        write = partial(write_metadata, unfinished, metadata, mesh.layout)
        on_first_rank(write, mesh, f"writing the metadata of {folder}")
    except RuntimeError:
        # All ranks come here together, so that nobody is writing any more.
        on_first_rank(partial(discard, folder), mesh, f"removing the unfinished {folder}")
        raise
    on_first_rank(partial(publish, folder), mesh, f"naming the checkpoint {folder}")


def boxes_to_write(tensors: Mapping[str, tuple[Tensor, ShardSpec]], mesh: ParallelMesh) -> list[BoxToWrite]:
    """List the pieces that this rank writes: counted ones, divided among the data ranks by bytes."""
    candidates = [
        BoxToWrite(name, spec.full_shape, box, view)
        for name, (tensor, spec) in tensors.items()
        if spec.tied_to is None
        for box, view in spec.local_views(tensor)
        if box.copy == 0
    ]
    writers = assign_writers([prod(c.box.sizes) * c.view.element_size() for c in candidates], mesh.data.size)
    return [candidate for candidate, writer in zip(candidates, writers, strict=True) if writer == mesh.data.rank]


def assign_writers(sizes: Sequence[int], num_writers: int) -> list[int]:
    """Divide pieces among writers so that each writes about equally many bytes; small pieces go to the first.

    Args:
        sizes: Size of every piece (bytes).
        num_writers: Number of ranks that hold the same pieces.

    Returns:
        the writer of every piece.
    """
    loads, writers = [0] * num_writers, [0] * len(sizes)
    loads[0] = sum(size for size in sizes if size < _SMALL)
    large = [index for index, size in enumerate(sizes) if size >= _SMALL]
    for index in sorted(large, key=lambda index: -sizes[index]):
        writers[index] = loads.index(min(loads))
        loads[writers[index]] += sizes[index]
    return writers


def _write(planner: ShardSavePlanner, folder: Any, mesh: ParallelMesh) -> None:
    with warnings.catch_warnings():
        # One process without process groups is a supported way to save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(unfinished_path(folder)),
                planner=planner,
                process_group=mesh.world_cpu.group,
                no_dist=mesh.world.size == 1,
            )
        except CheckpointException as error:
            reasons = {rank: f"{type(e[0]).__name__}: {e[0]}" for rank, e in sorted(error.failures.items())}
            shown = "; ".join(f"rank {rank}: {reason}" for rank, reason in list(reasons.items())[:4])
            raise RuntimeError(f"saving the checkpoint {folder} failed on {len(reasons)} rank(s): {shown}") from error


def _pickled(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
