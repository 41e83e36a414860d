"""Lines of the user's code on the call stack, which messages name."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import torch
from torch import nn

_TORCH_PATH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE_PATH = f"{Path(__file__).parent}{os.sep}"
#: Code that calls the ``forward`` of every module.
MODULE_CALL = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class Line:
    """Line of a source file.

    Args:
        file: Path of the file.
        number: Number of the line, from 1.
    """

    file: str
    number: int

    @classmethod
    def of(cls, frame: FrameType) -> Self:
        """Return the line that a frame runs."""
        return cls(frame.f_code.co_filename, frame.f_lineno)

    @property
    def place(self) -> str:
        """File and number."""
        return f"{self.file}:{self.number}"

    @property
    def text(self) -> str:
        """Code of the line; empty if there is no such file."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        """Return place and code."""
        return f"{self.place} ({self.text!r})"


def runs_torch(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch."""
    return frame.f_code.co_filename.startswith(_TORCH_PATH)


def runs_package(frame: FrameType) -> bool:
    """Return whether a frame runs code of this package."""
    return frame.f_code.co_filename.startswith(_PACKAGE_PATH)


def outside_torch(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside of torch, from a frame on; None without any."""
    while frame is not None and runs_torch(frame):
        frame = frame.f_back
    return frame


def line_of_user() -> str:
    """Return the innermost line of the call stack outside of lightning_megatron and torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        runs_torch(frame)
        or runs_package(frame)
        or Path(frame.f_code.co_filename).name == "contextlib.py"
    ):
        frame = frame.f_back
    if frame is None:
        return "in code without a file"
    line = Line.of(frame)
    return f"{line.place} in {frame.f_code.co_name}: {line.text}"


def refuses_graphs(module: nn.Module) -> bool:
    """Return whether a user says by ``is_capturable = False`` that no graph may hold a module."""
    return not getattr(module, "is_capturable", True)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run code of ``torch.compile``.

    Args:
        module: Any module.
    """
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
