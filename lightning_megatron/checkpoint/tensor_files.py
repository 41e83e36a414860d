"""The files of tensors, written and read as torch.distributed.checkpoint does, in any folder, with checksums."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lightning_megatron.checkpoint.directory import Checkpoint
from lightning_megatron.checkpoint.header import TENSOR_INDEX
from lightning_megatron.checkpoint.index_checks import Piece, PieceKey, pieces_of
from lightning_megatron.checkpoint.storage import FileRecord, Folder, writing
from lightning_megatron.checkpoint.tensor_index import write_index
from lightning_megatron.errors import CorruptDataError


class TensorFileWriter(StorageWriter):
    """Write one file for each rank, and the list of tensors on the first.

    The records of the files that this rank wrote are in ``records`` afterwards.

    Args:
        folder: Where to write.
        rank: Position of this rank among those that save.
        ready: Waits until the tensors may be read.
    """

    def __init__(self, folder: Folder, rank: int, ready: Callable[[], None]) -> None:
        self._folder, self._rank, self._ready = folder, rank, ready
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are: each rank has a file of its own."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan lists, one after the other."""
        self._ready()
        results = []
        name = f"__{self._rank}_0.distcp"
        if plan.items:
            with writing(self._folder, name) as stream:
                for item in plan.items:
                    start, data = stream.tell(), planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(data.getbuffer())  # type: ignore[union-attr]
                    else:
                        torch.save(_alone(data), stream)  # type: ignore[arg-type]
                    length = stream.tell() - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            self.records[name] = stream.record
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list of tensors."""
        metadata.storage_data = {one.index: one.storage_data for rank in results for one in rank}
        with writing(self._folder, TENSOR_INDEX) as stream:
            write_index(metadata, stream)
        self.records[TENSOR_INDEX] = stream.record

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Refuse to be chosen by a path."""
        return False


def read_tensors(checkpoint: Checkpoint, index: Metadata, planner: LoadPlanner) -> None:
    """Read what a planner asks for; every stored piece is read once.

    Raises:
        CorruptDataError: Naming the file, if one is missing, cut off or damaged where it is read.
    """
    planner.set_up_planner({}, index)
    plan = planner.finish_plan(planner.create_local_plan())
    tensors = {item.storage_index.fqn for item in plan.items if item.type == LoadItemType.TENSOR}
    pieces = pieces_of(index, tensors)
    by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
    for item in plan.items:
        where = index.storage_data.get(item.storage_index)
        if not isinstance(where, _StorageInfo) or where.relative_path not in checkpoint.header.files:
            raise CorruptDataError(
                f"every piece of a tensor must be in a file that {checkpoint.path} lists: {item.storage_index.fqn} "
                f"is in {getattr(where, 'relative_path', None)!r}. Its list of tensors is of another checkpoint. Use "
                "another one."
            )
        by_file.setdefault(where.relative_path, []).append((where, item))
    for name, items in sorted(by_file.items()):
        _read_file(checkpoint, name, items, pieces, planner)


def check_size(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a file that is missing or has another size than when it was written.

    Raises:
        CorruptDataError: Naming the file.
    """
    wanted = checkpoint.header.files[name].size
    try:
        found = checkpoint.folder.size(name)
    except FileNotFoundError as error:
        raise damaged(checkpoint, name, "it is missing") from error
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    if found != wanted:
        raise damaged(checkpoint, name, f"it has {found} bytes, {wanted} were written")


def damaged(checkpoint: Checkpoint, name: str, reason: str) -> CorruptDataError:
    """Say which file of a checkpoint is damaged."""
    return CorruptDataError(
        f"a file of a checkpoint must be as it was written: {checkpoint.file(name)} is not: {reason}. What is loaded "
        "from it would be wrong. Use another checkpoint."
    )


def _read_file(
    checkpoint: Checkpoint,
    name: str,
    items: list[tuple[_StorageInfo, ReadItem]],
    pieces: Mapping[PieceKey, Piece],
    planner: LoadPlanner,
) -> None:
    check_size(checkpoint, name)
    try:
        file = checkpoint.folder.open(name)
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    with file:
        last: tuple[int, Tensor] | None = None
        for where, item in sorted(items, key=lambda pair: pair[0].offset):
            if item.type == LoadItemType.BYTE_IO:
                file.seek(where.offset)
                planner.load_bytes(item, io.BytesIO(file.read(where.length)))
                continue
            if last is None or last[0] != where.offset:
                piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                last = where.offset, _stored_tensor(checkpoint, name, file, where, piece)
            _copy(checkpoint, name, last[1], item, planner)


def _stored_tensor(checkpoint: Checkpoint, name: str, file: Any, where: _StorageInfo, piece: Piece) -> Tensor:
    """Read one piece, which must have the shape and the dtype that the list of tensors gives it."""
    file.seek(where.offset)
    try:
        tensor = torch.load(io.BytesIO(file.read(where.length)), map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that was edited fails in whatever way
        raise damaged(checkpoint, name, f"no tensor can be read at byte {where.offset}") from error
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise damaged(checkpoint, name, f"there is a {type(tensor).__name__} and no tensor at byte {where.offset}")
    if (tuple(tensor.shape), tensor.dtype) != (piece.shape, piece.dtype):
        raise damaged(
            checkpoint,
            name,
            f"the tensor at byte {where.offset} has the shape {tuple(tensor.shape)} and the type {tensor.dtype}, its "
            f"list says {piece.shape} and {piece.dtype}",
        )
    return tensor


def _copy(checkpoint: Checkpoint, name: str, stored: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy the part of a stored piece that an item asks for."""
    target = planner.resolve_tensor(item).detach()
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, size)
    try:
        target.copy_(stored)
    except NotImplementedError as error:
        raise damaged(checkpoint, name, f"{item.storage_index.fqn} has the type {stored.dtype}") from error


def run_alone(planner: SavePlanner, writer: TensorFileWriter) -> None:
    """Save from one process, by the steps that ``torch.distributed.checkpoint.save`` takes with several."""
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    writer.finish(metadata, [results])


def _alone(data: Tensor) -> Tensor:
    """Return a tensor on the host whose storage holds nothing else, which would be written too."""
    host = data.detach().cpu()
    return host if host.untyped_storage().size() == host.nbytes else host.clone()
