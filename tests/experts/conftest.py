"""Fixtures of several tests of experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracles import float32_as_float64


@pytest.fixture
def float32_is_float64() -> Iterator[None]:
    """Let routers of Hugging Face, which round every input to float32, compute in float64."""
    with float32_as_float64():
        yield
