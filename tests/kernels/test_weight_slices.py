"""Tests of casts of weight slices in Triton's interpreter against casts of full weights."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.program import interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton, which comes with the CUDA builds of torch",
)


def test_interpreted_casts_of_slices_equal_those_of_full_weights():
    results = interpreted("tests.kernels.interpreted_weight_slices")
    assert len(results) == 13
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
