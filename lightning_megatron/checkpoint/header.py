"""The marker of a complete checkpoint: what is known of it without unpickling anything, and its list of files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_megatron.checkpoint.storage import FileRecord, Folder, writing
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout

FORMAT = 2
HEADER, METADATA = "checkpoint.json", "meta.pt"
#: The list of tensors and where they are, of torch.distributed.checkpoint.
TENSOR_INDEX = ".metadata"


@dataclass(frozen=True)
class Header:
    """Describe a complete checkpoint; its file is written last.

    Args:
        layout: The layout that saved it.
        torch: The version of torch that saved it.
        files: Size and checksum of every other file, by name.
        global_step: Optimizer steps that were taken; checkpoints are ordered by it.
        epoch: Epoch that it was saved in.
        saved_at: When it was saved (seconds since 1970).
        folder: Folder that the files are in; "." where it is that of the header.
        format: Number of the directory's format.
    """

    layout: ParallelLayout
    torch: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    global_step: int = 0
    epoch: int = 0
    saved_at: float = 0.0
    folder: str = "."
    format: int = FORMAT

    @property
    def age(self) -> tuple[int, int, float]:
        """Order checkpoints: the newest has the largest."""
        return self.global_step, self.epoch, self.saved_at

    def write(self, folder: Folder, name: str = HEADER) -> None:
        """Write the header into a folder, through to the disk."""
        fields = asdict(self)
        with writing(folder, name) as stream:
            stream.write((json.dumps({**fields, "checksum": _sum_of(fields)}, indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Folder) -> Header:
        """Read the header of a folder.

        Raises:
            CorruptDataError: If it is missing or damaged.
            UnsupportedError: If a version of this library with another format wrote it.
        """
        try:
            with folder.open(HEADER) as file:
                fields = json.loads(file.read())
            written = int(fields["format"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error
        if written != FORMAT:
            raise UnsupportedError(
                f"the checkpoint's format ({written}) must be this version's ({FORMAT}): {folder.name}. Its tensors "
                "may mean something else. "
                + ("Upgrade lightning-megatron." if written > FORMAT else "Load it with the version that saved it.")
            )
        try:
            checksum = fields.pop("checksum")
            if checksum != _sum_of(fields):
                raise ValueError("its checksum is not that of its content")
            files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
            if any(name in ("", ".", "..") or "/" in name or "\\" in name for name in files):
                raise ValueError("it lists what are not names of files")
            return cls(ParallelLayout(**fields.pop("layout")), files=files, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def _sum_of(fields: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _damaged(folder: Folder, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"a checkpoint must have a readable {HEADER}: {folder.name}/{HEADER} is not ({reason}). It names the layout "
        "that saved the checkpoint and the files that belong to it. Use another checkpoint."
    )
