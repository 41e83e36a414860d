"""Header of a checkpoint: a JSON file with its layout, step and list of files.

The header is written last and marks a checkpoint as complete.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

from lightning_megatron.checkpoint.storage import FileRecord, Folder, open_for_writing
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.settings import Pattern, Range, coerced
from lightning_megatron.strict_json import parse_object

FORMAT = 3
#: Formats that can be read; headers of format 2 have no number of the save.
_READABLE = (2, FORMAT)
HEADER = "checkpoint.json"
METADATA = "meta.pt"
#: Index of tensors and their positions in files, written by torch.distributed.checkpoint.
TENSOR_INDEX = ".metadata"
#: Prefix of index entries that contain the values of one rank.
RANK_STATE = "rank_state."
#: Maximum size of the header, which suffices for half a million files (bytes).
_MAX_HEADER_BYTES = 1 << 26
#: Last second of the year 9999, the largest year of Python's dates (seconds since 1970).
_MAX_SECONDS = 253402300799
_FileName = Annotated[str, Pattern(r"(?!\.{0,2}$)[^/\\\0]+", "that is the name of a file")]


class _StoredFile(TypedDict):
    size: Annotated[int, Range(minimum=0)]
    checksum: Annotated[str, Pattern("[0-9a-f]{8}", "of eight hexadecimal digits")]


class _Stored(TypedDict):
    """Fields of the JSON object, after its format and checksum were checked."""

    layout: ParallelLayout
    torch: str
    files: dict[_FileName, _StoredFile]
    global_step: int
    epoch: int
    saved_at: Annotated[float, Range(minimum=-_MAX_SECONDS, maximum=_MAX_SECONDS)]
    save_number: NotRequired[int]
    folder: str


@dataclass(frozen=True)
class Header:
    """Description of a complete checkpoint.

    Args:
        saved_at: Time of the save (seconds since 1970).
        save_number: Number of the save, larger than those of all checkpoints beside it at that
            time; 0 if a version without these numbers saved it.
        folder: Folder of the files, relative to the header; "." is the header's own folder.
    """

    layout: ParallelLayout
    torch: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    global_step: int = 0
    epoch: int = 0
    saved_at: float = 0.0
    save_number: int = 0
    folder: str = "."
    format: int = FORMAT

    def write(self, folder: Folder, name: str = HEADER) -> None:
        """Write the header into a folder and flush it to disk."""
        fields = asdict(self)
        with open_for_writing(folder, name) as stream:
            stream.write(
                (json.dumps({**fields, "checksum": _sum_of(fields)}, indent=2) + "\n").encode()
            )

    @classmethod
    def read(cls, folder: Folder) -> Header:
        """Read the header of a folder."""
        try:
            with folder.open(HEADER) as file:
                content = file.read(_MAX_HEADER_BYTES + 1)
            if len(content) > _MAX_HEADER_BYTES:
                raise OSError(f"it has more than {_MAX_HEADER_BYTES} bytes")
            fields = parse_object(content, f"{folder.name}/{HEADER}", "Use another checkpoint.")
            written = fields["format"]
        except (OSError, KeyError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error
        if type(written) is not int:
            raise _damaged(folder, f"its format is {written!r}")
        if written not in _READABLE:
            raise UnsupportedError(
                f"the checkpoint's format ({written}) must be this version's ({FORMAT}): "
                f"{folder.name}. Its tensors may have another meaning. "
                + (
                    "Upgrade lightning-megatron."
                    if written > FORMAT
                    else "Load it with the version that saved it."
                )
            )
        try:
            checksum = fields.pop("checksum")
            if checksum != _sum_of(fields):
                raise ValueError("its checksum does not match its content")
            stored = coerced("the header", fields, _Stored)
            files = {name: FileRecord(**record) for name, record in stored.pop("files").items()}
            return cls(**{**stored, "files": files, "format": FORMAT})
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, str(error).rstrip(".")) from error


def _sum_of(fields: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _damaged(folder: Folder, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"a checkpoint must have a readable {HEADER}: {folder.name}/{HEADER} is not ({reason}). "
        "This file lists the layout and the files of the checkpoint. Use another checkpoint."
    )
