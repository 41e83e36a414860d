"""What is saved and loaded: tensors, each with its place in a full tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_megatron.checkpoint.planners import BoxToWrite
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement

#: Pieces below this size are written by the first data rank: spreading them gains nothing (bytes).
_SMALL = 65536


@dataclass(frozen=True)
class Entry:
    """Hold a tensor and where it lies in the full tensor that checkpoints have.

    Args:
        tensor: What this rank has: the local tensor, or one dimension for a ``FlatSlice``.
        placement: Where that lies in the full tensor.
        is_exclusive: Whether no other data-parallel rank (of an expert's tensor, no rank with the same experts) has
            these elements, so that this rank writes them; if not, those ranks have the same and share the writing.
        changes_in_forward: Whether a forward pass may change it, as it does the statistics of a batch norm.
    """

    tensor: Tensor
    placement: Placement
    is_exclusive: bool = False
    changes_in_forward: bool = False


def boxes_to_write(tensors: Mapping[str, Entry], mesh: ParallelMesh) -> list[BoxToWrite]:
    """List the pieces that this rank writes: counted ones, those that several ranks share divided by bytes.

    Args:
        tensors: This rank's entries. Those that are not exclusive must be the same, in the same order, on the data
            ranks of one place, those of experts on the ranks with the same experts.
        mesh: The groups of this rank.
    """
    own: list[BoxToWrite] = []
    shared: dict[bool, list[BoxToWrite]] = {False: [], True: []}
    for name, entry in tensors.items():
        if entry.placement.tied_to is not None:
            continue
        for box, view in entry.placement.local_views(entry.tensor.detach()):
            if box.copy == 0:
                piece = BoxToWrite(name, entry.placement.full_shape, box, view, entry.changes_in_forward)
                (own if entry.is_exclusive else shared[entry.placement.is_expert]).append(piece)
    for is_expert, pieces in shared.items():
        axis = mesh.copies(is_expert)
        writers = assign_writers([prod(piece.box.sizes) * piece.view.element_size() for piece in pieces], axis.size)
        own += [piece for piece, writer in zip(pieces, writers, strict=True) if writer == axis.rank]
    return own


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
