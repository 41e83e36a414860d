"""One save of a checkpoint: all ranks write their pieces, then the checkpoint becomes visible."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from lightning_megatron.checkpoint.collective_steps import CaughtError, run_collectively
from lightning_megatron.checkpoint.directory import CheckpointPath, checkpoint_path_of
from lightning_megatron.checkpoint.entries import BoxToWrite
from lightning_megatron.checkpoint.header import METADATA, RANK_STATE, TENSOR_INDEX, Header
from lightning_megatron.checkpoint.storage import FileRecord, Folder, open_for_writing, read_record
from lightning_megatron.checkpoint.tensor_index import (
    StoredPiece,
    TensorIndex,
    write_metadata,
    write_object,
    write_piece,
)
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh

#: Size of the key of a piece, a digest of its tensor's name and its offsets (bytes).
KEY_BYTES = 16


@dataclass(frozen=True)
class RankSnapshot:
    """Data that one rank writes in a save.

    Args:
        metadata: Pickled values of the job; only those of the first rank are written.
        header: Header without files; only that of the first rank has a number, and is written.
        ready: Function that blocks until the pieces can be read.
    """

    pieces: Sequence[BoxToWrite]
    rank_state: bytes
    metadata: bytes
    header: Header
    ready: Callable[[], None]


@dataclass
class CollectiveSave:
    """Collective save of one checkpoint.

    The save can run in any thread, because no other code uses its process group.

    Args:
        content: Data of this rank, or the error that occurred while the data was collected, which
            the first collective reports to all ranks.
    """

    path: str | os.PathLike[str]
    mesh: ParallelMesh
    content: RankSnapshot | BaseException
    token: str | None = field(default=None, init=False)

    def run(self) -> None:
        """Write the files, verify them, and publish the checkpoint; remove the files on failure.

        Raises:
            CheckpointSaveError: On all ranks, with the reasons of the ranks that failed.

        Communication: gathers keys and places of pieces on the first rank of the world, and
            broadcasts the keys that several ranks have.
        """
        target = checkpoint_path_of(self.path)
        axis = self.mesh.checkpoint_cpu
        what = f"saving {os.fspath(self.path)}"
        try:
            content, pieces = self._begin(target, what)
            assert self.token is not None, "the first rank made the folder"
            folder = target.folder(self.token)
            # A large model has millions of pieces, which only the first rank lists.
            write = partial(self._write, folder, content, pieces)
            written = run_collectively(write, axis, what)
            publish = partial(self._publish, target, folder, content, written)
            run_collectively(partial(self._first, publish), axis, what)
        except CheckpointSaveError:
            # All ranks raise together, so no rank is still writing into the folder.
            self._discard(target)
            raise

    def _begin(self, target: CheckpointPath, what: str) -> tuple[RankSnapshot, list[BoxToWrite]]:
        """Create the folder on the first rank, and raise on all ranks if any lacks its data.

        Returns:
            Data of this rank, and the pieces that this rank writes: the lowest rank that has a
            piece writes it
        """
        snapshots: list[RankSnapshot] = []

        def start() -> bytes:
            if self.mesh.world.rank == 0:
                self.token = target.begin()
            if isinstance(self.content, BaseException):
                raise self.content
            snapshots.append(self.content)
            return b"".join(map(_key, self.content.pieces))

        axis = self.mesh.checkpoint_cpu
        keys_of_ranks = run_collectively(start, axis, what)
        # Few pieces are on several ranks, so that the first rank names only these.
        self.token, writers = broadcast_object((self.token, writers_of(keys_of_ranks)), axis)
        own = {_key(piece): piece for piece in snapshots[0].pieces}
        mine = [piece for key, piece in own.items() if writers.get(key, axis.rank) == axis.rank]
        return snapshots[0], mine

    def _write(
        self, folder: Folder, content: RankSnapshot, pieces: Sequence[BoxToWrite]
    ) -> tuple[list[StoredPiece], FileRecord]:
        """Write and verify the file of this rank."""
        content.ready()
        name = _file_of(self.mesh.world.rank)
        with open_for_writing(folder, name) as stream:
            stored = [write_piece(piece, name, stream) for piece in pieces]
            state = f"{RANK_STATE}{self.mesh.world.rank}"
            stored.append(write_object(state, content.rank_state, name, stream))
        _verify(folder, name, stream.record)
        return stored, stream.record

    def _publish(
        self,
        target: CheckpointPath,
        folder: Folder,
        content: RankSnapshot,
        written: Sequence[tuple[list[StoredPiece], FileRecord]],
    ) -> None:
        """Write the metadata and the tensor index, and make the checkpoint visible."""
        files = {_file_of(rank): record for rank, (_, record) in enumerate(written)}
        pieces = [piece for stored, _ in written for piece in stored]
        TensorIndex.of(pieces, files)
        files |= write_metadata(folder, content.metadata, pieces)
        for name in (METADATA, TENSOR_INDEX):
            _verify(folder, name, files[name])
        assert self.token is not None, "the first rank made the folder"
        target.publish(self.token, replace(content.header, files=files))

    def _first(self, action: Callable[[], None]) -> None:
        if self.mesh.world.rank == 0:
            action()

    def _discard(self, target: CheckpointPath) -> None:
        # Ignore errors here: they would hide the reason why this save failed, and the next save
        # removes leftovers.
        with CaughtError():
            self._first(partial(target.discard, self.token))
        run_collectively(lambda: None, self.mesh.checkpoint_cpu, "removing what was written")


def writers_of(keys_of_ranks: Sequence[bytes]) -> dict[bytes, int]:
    """Return the lowest rank of each key that several ranks have.

    Args:
        keys_of_ranks: Keys of every rank, joined; each has ``KEY_BYTES`` bytes.
    """
    first: dict[bytes, int] = {}
    writers: dict[bytes, int] = {}
    for rank, keys in enumerate(keys_of_ranks):
        for start in range(0, len(keys), KEY_BYTES):
            key = keys[start : start + KEY_BYTES]
            if first.setdefault(key, rank) != rank:
                writers[key] = first[key]
    return writers


def _key(piece: BoxToWrite) -> bytes:
    place = f"{piece.box.offsets} of {piece.name}"
    return blake2b(place.encode(), digest_size=KEY_BYTES).digest()


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _verify(folder: Folder, name: str, written: FileRecord) -> None:
    stored = read_record(folder, name)
    if stored != written:
        raise OSError(
            f"{folder.name}/{name} has {stored.size} bytes with checksum {stored.checksum}, but "
            f"{written.size} bytes with checksum {written.checksum} were written"
        )
