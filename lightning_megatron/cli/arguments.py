"""Types of arguments that several subcommands take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.cli.draw_layout import PICTURE_SUFFIXES


def at_least_one(text: str) -> int:
    """Parse an argument as a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: it is {text!r}")
    return int(text)


def new_file(text: str, suffixes: Sequence[str]) -> Path:
    """Parse an argument as the path of a file to write.

    Args:
        suffixes: Legal extensions of the file, in lower case, such as ``.png``.
    """
    path = Path(text)
    if path.suffix.lower() not in suffixes:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"folder {str(path.parent)!r} does not exist")
    return path


def picture_file(text: str) -> Path:
    """Parse an argument as the path of a picture to write; see :func:`new_file`."""
    return new_file(text, PICTURE_SUFFIXES)
