"""What several tests of experts need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def float32_is_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's routers compute in float64, although they round to float32 whatever they are given."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
