"""A block for tests of named sets of weights."""

from __future__ import annotations

from tests.worlds.test_logs import Block

__all__ = ["Block"]
