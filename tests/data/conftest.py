"""Fixtures of the tests of data modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.recorder import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", 400)
