"""Entries of a checkpoint: local tensors with their placement in full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Box, Placement

#: Smallest piece that may be assigned to another than the first data-parallel rank (bytes).
#: Distributing smaller pieces saves no time.
_MIN_DISTRIBUTED_BYTES = 65536


@dataclass(frozen=True)
class Entry:
    """Local tensor with its placement in a full tensor of the checkpoint.

    Args:
        tensor: Local tensor; a ``FlatSlice`` has one dimension.
        is_exclusive: Whether, among the data-parallel ranks (for expert parameters: among the ranks
            with the same experts), only this rank has these elements, and therefore writes them.
            Otherwise these ranks have equal tensors, and each of them writes some pieces.
        changes_in_forward: Whether a forward pass may change the tensor, as for the statistics of
            a batch norm.
    """

    tensor: Tensor
    placement: Placement
    is_exclusive: bool = False
    changes_in_forward: bool = False


@dataclass(frozen=True)
class BoxToWrite:
    """Piece of a full tensor that this rank writes."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    view: Tensor
    changes_in_forward: bool = False


def boxes_to_write(tensors: Mapping[str, Entry], mesh: ParallelMesh) -> list[BoxToWrite]:
    """Return the pieces of tensors that this rank writes.

    Over all ranks, each element of each full tensor is in exactly one piece. Ranks with equal
    tensors divide the pieces by size.

    Args:
        tensors: Entries of this rank. Entries that are not exclusive must be the same, in the same
            order, on all data ranks with the same tp and pp rank (for expert parameters: on all
            ranks with the same experts).
    """
    assigned: list[BoxToWrite] = []
    shared: dict[bool, list[BoxToWrite]] = {False: [], True: []}
    for name, entry in tensors.items():
        if entry.placement.tied_to is not None:
            continue
        for box, view in entry.placement.local_views(entry.tensor.detach()):
            if box.copy == 0:
                piece = BoxToWrite(
                    name, entry.placement.full_shape, box, view, entry.changes_in_forward
                )
                (assigned if entry.is_exclusive else shared[entry.placement.is_expert]).append(
                    piece
                )
    for is_expert, pieces in shared.items():
        axis = mesh.replica_axis(is_expert)
        writers = assign_writers(
            [prod(piece.box.sizes) * piece.view.element_size() for piece in pieces], axis.size
        )
        assigned += [
            piece for piece, writer in zip(pieces, writers, strict=True) if writer == axis.rank
        ]
    return assigned


def assign_writers(sizes: Sequence[int], num_writers: int) -> list[int]:
    """Assign pieces to writers so that each writes about the same number of bytes.

    The first writer gets all small pieces. The others are assigned in order of decreasing size,
    each to the writer with the smallest load.

    Returns:
        Index of the writer of every piece
    """
    loads = [0] * num_writers
    writers = [0] * len(sizes)
    loads[0] = sum(size for size in sizes if size < _MIN_DISTRIBUTED_BYTES)
    large = [index for index, size in enumerate(sizes) if size >= _MIN_DISTRIBUTED_BYTES]
    for index in sorted(large, key=lambda index: -sizes[index]):
        writers[index] = loads.index(min(loads))
        loads[writers[index]] += sizes[index]
    return writers
