"""Types of arguments that several subcommands take."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """Return the number that an argument gives.

    Raises:
        ArgumentTypeError: If it is not a whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: it is {text!r}")
    return int(text)
