"""Tests of the kernels of experts in Triton's interpreter on the CPU against torch in float64."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.program import interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which comes with the CUDA builds of torch",
)


def test_interpreted_expert_kernels_equal_torch_in_float64() -> None:
    results = interpreted("tests.kernels.interpreted_experts")
    assert results, "nothing is checked"
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
