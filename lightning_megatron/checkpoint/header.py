"""Header of a checkpoint: a JSON file with its layout, step and list of files.

The header is written last and marks a checkpoint as complete.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_megatron.checkpoint.storage import FileRecord, Folder, open_for_writing
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.plan.layout import ParallelLayout
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
_CHECKSUM = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True)
class Header:
    """Description of a complete checkpoint.

    Args:
        layout: Layout of the job that saved the checkpoint.
        torch: Version of torch that saved the checkpoint.
        files: Size and checksum of every other file, by name.
        global_step: Number of optimizer steps taken.
        epoch: Epoch in which the checkpoint was saved.
        saved_at: Time of the save (seconds since 1970).
        save_number: Number of the save, larger than those of all checkpoints beside it at that
            time; 0 if a version without these numbers saved it.
        folder: Folder of the files, relative to the header; "." is the header's own folder.
        format: Version of the directory's format.
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

    @property
    def age(self) -> tuple[int, float]:
        """Return the sort key of checkpoints: the one that was saved last has the largest key.

        Clocks of hosts may differ, so their times order only checkpoints without numbers.
        """
        return self.save_number, self.saved_at

    def write(self, folder: Folder, name: str = HEADER) -> None:
        """Write the header into a folder and flush it to disk."""
        fields = asdict(self)
        with open_for_writing(folder, name) as stream:
            stream.write(
                (json.dumps({**fields, "checksum": _sum_of(fields)}, indent=2) + "\n").encode()
            )

    @classmethod
    def read(cls, folder: Folder) -> Header:
        """Read the header of a folder.

        Raises:
            CorruptDataError: If the header is missing or damaged.
            UnsupportedError: If it has another format version.
        """
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
            files = {name: _record(name, record) for name, record in fields.pop("files").items()}
            fields["format"] = FORMAT
            header = cls(ParallelLayout(**fields.pop("layout")), files=files, **fields)
            header._check_values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder, f"{type(error).__name__}: {error}") from error
        return header

    def _check_values(self) -> None:
        for name in ("global_step", "epoch", "save_number"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number: it is {getattr(self, name)!r}")
        if type(self.saved_at) not in (int, float) or not abs(self.saved_at) <= _MAX_SECONDS:
            raise ValueError(f"saved_at must be seconds since 1970: it is {self.saved_at!r}")
        for name in ("torch", "folder"):
            if type(getattr(self, name)) is not str:
                raise ValueError(f"{name} must be text: it is {getattr(self, name)!r}")


def _record(name: str, record: Any) -> FileRecord:
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError("it lists values that are not names of files")
    parsed = FileRecord(**record)
    if type(parsed.size) is not int or parsed.size < 0:
        raise ValueError(f"the size of {name} must be a number of bytes: it is {parsed.size!r}")
    if type(parsed.checksum) is not str or not _CHECKSUM.fullmatch(parsed.checksum):
        raise ValueError(
            f"the checksum of {name} must be eight hexadecimal digits: it is {parsed.checksum!r}"
        )
    return parsed


def _sum_of(fields: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _damaged(folder: Folder, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"a checkpoint must have a readable {HEADER}: {folder.name}/{HEADER} is not ({reason}). "
        "This file lists the layout and the files of the checkpoint. Use another checkpoint."
    )
