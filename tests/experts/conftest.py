"""What several tests of experts need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracles import float32_as_float64


@pytest.fixture
def float32_is_float64() -> Iterator[None]:
    """Let Hugging Face's routers compute in float64, although they round to float32 whatever they
    are given.
    """
    with float32_as_float64():
        yield
