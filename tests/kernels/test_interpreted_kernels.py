"""Tests of the fused kernels in Triton's interpreter on the CPU against float64 and against torch's
operators.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.program import interpreted

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs triton, which comes with the CUDA builds of torch",
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize(
    "group",
    [
        "float32",
        "bfloat16",
        "float16",
        "models",
        "shards",
        "hand-over",
        "fused passes",
        "one shot",
        "token sums",
    ],
)
def test_interpreted_kernels_equal_float64_and_torch_operators(group: str):
    results = interpreted("tests.kernels.interpreted", group)
    assert results, f"nothing is checked by the name {group}"
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
