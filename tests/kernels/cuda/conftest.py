"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda.fake import FakeKit


@pytest.fixture
def kit(tmp_path: Path) -> FakeKit:
    """A compiler that works."""
    kit = FakeKit(tmp_path)
    kit.write_compiler()
    return kit
