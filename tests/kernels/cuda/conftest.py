"""Fixtures for the tests of the CUDA extension."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda.fake import FakeKit


@pytest.fixture
def kit(tmp_path: Path) -> FakeKit:
    """Return a kit whose fake compiler works."""
    kit = FakeKit(tmp_path)
    kit.write_compiler()
    return kit
