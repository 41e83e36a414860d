"""Planners for torch.distributed.checkpoint, which write and read the boxes of placements."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from lightning_megatron.groups.shard_spec import Box, Placement


@dataclass(frozen=True)
class BoxToWrite:
    """Piece of a full tensor that this rank writes."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    view: Tensor
    changes_in_forward: bool = False


class ShardSavePlanner(DefaultSavePlanner):
    """Planner of a save of pieces of full tensors and of pickled objects.

    If several ranks list the same box, the lowest rank writes it.
    """

    def __init__(self, boxes: Iterable[BoxToWrite], objects: Mapping[str, bytes]) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        self._boxes = {(box.name, torch.Size(box.box.offsets)): box for box in boxes}
        self._objects = dict(objects)

    @override
    def create_local_plan(self) -> SavePlan:
        items = [_write_item(box) for box in self._boxes.values()]
        items += [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._objects
        ]
        self.plan = SavePlan(items)
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[index.fqn])
        assert index.offset is not None, f"the piece of {index.fqn} has no offset"
        return self._boxes[index.fqn, index.offset].view.detach()


@dataclass(frozen=True)
class TensorToRead:
    """Local tensor and the entry from which it is loaded."""

    source: str
    tensor: Tensor
    placement: Placement


class ShardLoadPlanner(LoadPlanner):
    """Planner of a load into local tensors, and of pickled objects.

    The boxes may differ from those of the save in any way.

    Args:
        objects: Names of entries to read as bytes; ``bytes_of`` has them afterwards.
    """

    def __init__(self, tensors: Mapping[str, TensorToRead], objects: Iterable[str] = ()) -> None:
        self._tensors = dict(tensors)
        self._objects = tuple(objects)
        self._views = {
            (name, torch.Size(box.offsets)): view
            for name, target in self._tensors.items()
            for box, view in target.placement.local_views(target.tensor.detach())
        }
        self._metadata: Metadata | None = None
        self.bytes_of: dict[str, io.BytesIO] = {}

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._metadata = metadata

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None, "the planner is set up before it plans"
        items = []
        for name, target in self._tensors.items():
            saved = self._metadata.state_dict_metadata[target.source]
            assert isinstance(saved, TensorStorageMetadata), f"{target.source} is not a tensor"
            boxes = target.placement.boxes()
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in boxes
            ]
            items += [
                # The storage index keeps the name of the entry. The destination index gets the
                # local name, which `resolve_tensor` looks up.
                replace(item, dest_index=replace(item.dest_index, fqn=name))
                for item in create_read_items_for_chunk_list(target.source, saved, chunks)
            ]
        empty = torch.Size((0,))
        for name in self._objects:
            index = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty))
        return LoadPlan(items)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        # Every rank reads independently.
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.bytes_of[read_item.dest_index.fqn] = value

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None, f"the piece of {index.fqn} has no offset"
        view = self._views[index.fqn, index.offset]
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, size)
        return view

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # the tensor is a view of the local tensor


def _write_item(box: BoxToWrite) -> WriteItem:
    offsets = torch.Size(box.box.offsets)
    return WriteItem(
        index=MetadataIndex(box.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(box.box.sizes)),
            properties=TensorProperties.create_from_tensor(box.view.detach()),
            size=torch.Size(box.full_shape),
        ),
    )
