"""Tests of Adam's kernel in Triton's interpreter against torch's AdamW and Adam in float64."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.program import interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which comes with the CUDA builds of torch",
)


def test_interpreted_adam_steps_equal_those_of_torch():
    results = interpreted("tests.kernels.interpreted_adam")
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
