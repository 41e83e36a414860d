"""One save: every piece of every full tensor once, by ranks that share the work, into a place that appears whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lightning_megatron.checkpoint.directory import Place, place_of
from lightning_megatron.checkpoint.entries import Entry, boxes_to_write
from lightning_megatron.checkpoint.header import METADATA, TENSOR_INDEX, Header
from lightning_megatron.checkpoint.planners import BoxToWrite, ShardSavePlanner
from lightning_megatron.checkpoint.storage import FileRecord, Folder, read_record, writing
from lightning_megatron.checkpoint.tensor_files import TensorFileWriter, run_alone
from lightning_megatron.checkpoint.together import Caught, describe, failure, together
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.mesh import ParallelMesh

RANK_STATE = "rank_state."


@dataclass(frozen=True)
class Content:
    """Hold what a rank writes, so that nothing that happens to the originals afterwards changes it.

    Args:
        pieces: Its pieces of tensors.
        rank_state: The bytes of its values.
        metadata: The bytes of the job's values; only those of the first rank are written.
        global_step: Optimizer steps that were taken.
        epoch: Epoch that the job is in.
        ready: Waits until the pieces may be read.
    """

    pieces: Sequence[BoxToWrite]
    rank_state: bytes
    metadata: bytes
    global_step: int
    epoch: int
    ready: Callable[[], None]


def gather_content(
    tensors: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    mesh: ParallelMesh,
    copy: Callable[[Sequence[BoxToWrite]], list[BoxToWrite]] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Content:
    """Collect what this rank writes, without communication.

    Args:
        tensors: This rank's tensors.
        metadata: Picklable values of the job; its ``global_step`` and ``epoch`` order checkpoints.
        rank_state: Picklable values of this rank.
        mesh: The groups of this rank.
        copy: Copies pieces; None leaves them where they are.
        ready: Waits until the copies may be read.
    """
    pieces = boxes_to_write(tensors, mesh)
    return Content(
        pieces if copy is None else copy(pieces),
        to_bytes(dict(rank_state)),
        to_bytes(dict(metadata)) if mesh.world.rank == 0 else b"",
        _number(metadata.get("global_step")),
        _number(metadata.get("epoch")),
        ready,
    )


@dataclass
class Save:
    """Write one checkpoint, together with all ranks; in any thread, over a group that nothing else uses meanwhile.

    Args:
        path: The directory or URL to create or replace.
        mesh: The groups of this rank.
        content: Returns what this rank writes, or raises what went wrong in collecting it.
        token: How all ranks find the folder, once it is made.
    """

    path: str | os.PathLike[str]
    mesh: ParallelMesh
    content: Callable[[], Content]
    token: str | None = field(default=None, init=False)

    def run(self) -> None:
        """Write, verify, and make visible; on failure remove what was written.

        Raises:
            CheckpointSaveError: On all ranks, with the reasons of those that failed.

        Communication: gathers plans and results over the world.
        """
        place, axis = place_of(self.path), self.mesh.checkpoint_cpu
        what = f"saving {os.fspath(self.path)}"
        try:
            content = self._begin(place, what)
            assert self.token is not None, "the first rank made the folder"
            folder = place.folder(self.token)
            writer = TensorFileWriter(folder, axis.rank, content.ready)
            self._write(content, writer, what)
            records = together(partial(self._finish, folder, content, writer.records), axis, what)
            header = self._header(content, {name: one for rank in records for name, one in rank.items()})
            together(partial(self._first, partial(place.publish, self.token, header)), axis, what)
        except CheckpointSaveError:
            # All ranks come here together, so that nobody is writing any more.
            self._discard(place)
            raise

    def _begin(self, place: Place, what: str) -> Content:
        """Let the first rank make the folder, if every rank has something to write into it."""
        contents: list[Content] = []

        def start() -> str | None:
            if self.mesh.world.rank == 0:
                self.token = place.begin()
            contents.append(self.content())
            return self.token

        self.token = together(start, self.mesh.checkpoint_cpu, what)[0]
        return contents[0]

    def _write(self, content: Content, writer: TensorFileWriter, what: str) -> None:
        axis = self.mesh.checkpoint_cpu
        planner = ShardSavePlanner(content.pieces, {f"{RANK_STATE}{self.mesh.world.rank}": content.rank_state})
        if axis.size == 1:
            together(partial(run_alone, planner, writer), axis, what)
            return
        try:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=axis.group)
        except CheckpointException as error:
            raise failure(what, {rank: describe(e[0]) for rank, e in error.failures.items()}, axis.size) from error

    def _finish(self, folder: Folder, content: Content, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """Write the job's values and compare what this rank's files hold with what was written to them."""
        if self.mesh.world.rank == 0:
            with writing(folder, METADATA) as stream:
                stream.write(content.metadata)
            records[METADATA] = stream.record
        for name, written in records.items():
            found = read_record(folder, name)
            if found != written:
                raise OSError(
                    f"{folder.name}/{name} holds {found.size} bytes with checksum {found.checksum}, written were "
                    f"{written.size} with {written.checksum}"
                )
        return records

    def _header(self, content: Content, records: dict[str, FileRecord]) -> Header:
        assert TENSOR_INDEX in records, "the first rank wrote the list of tensors"
        return Header(
            self.mesh.layout, torch.__version__, records, content.global_step, content.epoch, round(time.time(), 3)
        )

    def _first(self, action: Callable[[], None]) -> None:
        if self.mesh.world.rank == 0:
            action()

    def _discard(self, place: Place) -> None:
        # What cannot be removed is left to the next save; the reason for this one's failure matters more.
        with Caught():
            self._first(partial(place.discard, self.token))
        together(lambda: None, self.mesh.checkpoint_cpu, "removing what was written")


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    mesh: ParallelMesh,
) -> None:
    """Write a checkpoint that any layout can load, and return when it is complete.

    Every full tensor becomes one entry without padding. Copies and tied copies are left out, and the data-parallel
    ranks share the writing. The files become the checkpoint ``path`` only when all ranks are done and what they wrote
    is verified, so that an interrupted save is never seen; a checkpoint of that name stays until then.

    Args:
        path: The directory to create or replace, on a file system that all ranks see, or a URL for fsspec.
        tensors: This rank's tensors by names that do not depend on the layout. Ranks of tp and pp may have different
            ones; those that are not exclusive are the same, in the same order, on the data-parallel ranks of a place.
        metadata: Picklable values of the whole job; those of rank 0 are saved.
        rank_state: Picklable values of this rank, found again by the rank at the same place.
        mesh: The groups of this rank.

    Raises:
        CheckpointSaveError: On all ranks, if any rank cannot write.

    Communication: gathers plans and results over the world; call it on all ranks.
    """
    Save(path, mesh, partial(gather_content, tensors, metadata, rank_state, mesh)).run()


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
