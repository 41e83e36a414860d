"""Tensor files with checksums, in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import zlib
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
from typing_extensions import override

from lightning_megatron.checkpoint.directory import Checkpoint
from lightning_megatron.checkpoint.header import TENSOR_INDEX
from lightning_megatron.checkpoint.index_checks import PieceKey, SavedTensor, pieces_of
from lightning_megatron.checkpoint.storage import FileRecord, Folder, open_for_writing
from lightning_megatron.checkpoint.tensor_index import write_index
from lightning_megatron.errors import CorruptDataError


class TensorFileWriter(StorageWriter):
    """Writer of one file for each rank, and of the tensor index on the first rank.

    The attribute ``records`` has the size and checksum of each file that this rank has written.
    """

    def __init__(self, folder: Folder, rank: int, ready: Callable[[], None]) -> None:
        self._folder = folder
        self._rank = rank
        self._ready = ready
        self.records: dict[str, FileRecord] = {}

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        pass  # a writer serves one save

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # the folder was given to the constructor

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Each rank writes its own file.
        return plans

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._ready()
        results = []
        name = f"__{self._rank}_0.distcp"
        if plan.items:
            with open_for_writing(self._folder, name) as stream:
                for item in plan.items:
                    start = stream.tell()
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(data.getbuffer())  # type: ignore[union-attr]
                    else:
                        torch.save(_alone(data), stream)  # type: ignore[arg-type]
                    length = stream.tell() - start
                    results.append(
                        WriteResult(item.index, length, _StorageInfo(name, start, length))
                    )
            self.records[name] = stream.record
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        with open_for_writing(self._folder, TENSOR_INDEX) as stream:
            write_index(metadata, stream)
        self.records[TENSOR_INDEX] = stream.record

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        # torch must not select this writer for a path.
        return False


def read_tensors(checkpoint: Checkpoint, index: Metadata, planner: LoadPlanner) -> None:
    """Read the items that a planner requests; every stored piece is read once."""
    planner.set_up_planner({}, index)
    plan = planner.finish_plan(planner.create_local_plan())
    tensors = {item.storage_index.fqn for item in plan.items if item.type == LoadItemType.TENSOR}
    pieces = pieces_of(index, tensors)
    by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
    for item in plan.items:
        stored = index.storage_data.get(item.storage_index)
        if (
            not isinstance(stored, _StorageInfo)
            or stored.relative_path not in checkpoint.header.files
        ):
            raise CorruptDataError(
                f"every piece of a tensor must be in a file that {checkpoint.path} lists: "
                f"{item.storage_index.fqn} is in {getattr(stored, 'relative_path', None)!r}. Its "
                "list of tensors belongs to another checkpoint. Use another checkpoint."
            )
        by_file.setdefault(stored.relative_path, []).append((stored, item))
    for name, items in sorted(by_file.items()):
        _read_file(checkpoint, name, items, pieces, planner)


def check_size(checkpoint: Checkpoint, name: str) -> None:
    """Check that a file exists and has the size recorded in the header."""
    expected = checkpoint.header.files[name].size
    try:
        size = checkpoint.folder.size(name)
    except FileNotFoundError as error:
        raise damaged(checkpoint, name, "it is missing") from error
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    if size != expected:
        raise damaged(checkpoint, name, f"it has {size} bytes, but {expected} were written")


def damaged(checkpoint: Checkpoint, name: str, reason: str) -> CorruptDataError:
    """Return the error for a damaged file of a checkpoint."""
    return CorruptDataError(
        f"a file of a checkpoint must be as it was written: {checkpoint.file(name)} is not: "
        f"{reason}. Use another checkpoint."
    )


def _read_file(
    checkpoint: Checkpoint,
    name: str,
    items: list[tuple[_StorageInfo, ReadItem]],
    pieces: Mapping[PieceKey, SavedTensor],
    planner: LoadPlanner,
) -> None:
    check_size(checkpoint, name)
    try:
        file = checkpoint.folder.open(name)
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    with file:
        last: tuple[int, Tensor] | None = None
        for stored, item in sorted(items, key=lambda pair: pair[0].offset):
            if item.type == LoadItemType.BYTE_IO:
                file.seek(stored.offset)
                planner.load_bytes(item, io.BytesIO(file.read(stored.length)))
                continue
            if last is None or last[0] != stored.offset:
                piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                last = stored.offset, _stored_tensor(checkpoint, name, file, stored, piece)
            _copy(checkpoint, name, last[1], item, planner)


def _stored_tensor(
    checkpoint: Checkpoint, name: str, file: Any, stored: _StorageInfo, piece: SavedTensor
) -> Tensor:
    """Read one piece and check its shape and dtype against the tensor index."""
    file.seek(stored.offset)
    try:
        tensor = torch.load(
            io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True
        )
    except Exception as error:  # a manipulated pickle can raise anything
        raise damaged(checkpoint, name, f"no tensor can be read at byte {stored.offset}") from error
    if (
        type(tensor) is not Tensor
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        raise damaged(
            checkpoint,
            name,
            f"at byte {stored.offset} there is a {type(tensor).__name__} instead of a tensor",
        )
    if (tuple(tensor.shape), tensor.dtype) != (piece.shape, piece.dtype):
        raise damaged(
            checkpoint,
            name,
            f"the tensor at byte {stored.offset} has the shape {tuple(tensor.shape)} and the type "
            f"{tensor.dtype}, but the list of tensors says {piece.shape} and {piece.dtype}",
        )
    return tensor


def _copy(
    checkpoint: Checkpoint, name: str, stored: Tensor, item: ReadItem, planner: LoadPlanner
) -> None:
    """Copy the part of a stored piece that an item requests into the local tensor."""
    target = planner.resolve_tensor(item).detach()
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, size)
    try:
        target.copy_(stored)
    except NotImplementedError as error:
        raise damaged(
            checkpoint, name, f"{item.storage_index.fqn} has the type {stored.dtype}"
        ) from error


def run_alone(planner: SavePlanner, writer: TensorFileWriter) -> None:
    """Save from one process, without the collectives of ``torch.distributed.checkpoint.save``."""
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    writer.finish(metadata, [results])


def _alone(data: Tensor) -> Tensor:
    """Return a host tensor whose storage has no other data, since ``torch.save`` would write it."""
    host = data.detach().cpu()
    return host if host.untyped_storage().size() == host.nbytes else host.clone()


def content_of(checkpoint: Checkpoint, name: str) -> bytes:
    """Return the content of a small file after comparing it with its checksum."""
    expected = checkpoint.header.files.get(name)
    if expected is None:
        raise damaged(checkpoint, name, "the header does not list it")
    check_size(checkpoint, name)
    try:
        with checkpoint.folder.open(name) as file:
            content = file.read()
    except OSError as error:
        raise damaged(checkpoint, name, f"it cannot be read ({error})") from error
    actual = FileRecord(len(content), f"{zlib.crc32(content):08x}")
    if actual != expected:
        raise damaged(
            checkpoint,
            name,
            f"it has {actual.size} bytes and checksum {actual.checksum}, but {expected.size} bytes "
            f"with checksum {expected.checksum} were written",
        )
    return content
