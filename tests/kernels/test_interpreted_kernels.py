"""The kernels in Triton's interpreter on the CPU equal float64, torch's operators and optimizers, and
clones by one-sided puts do not change results.
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
GROUPS = (
    "float32",
    "bfloat16",
    "float16",
    "models",
    "shards",
    "hand-over",
    "fused passes",
    "one shot",
    "token sums",
    "experts",
    "adam",
    "weight slices",
)


@pytest.mark.parametrize("group", [*GROUPS, "clones"])
def test_interpreted_kernels_equal_torch(group):
    if group == "clones":
        results = interpreted("tests.experts.interpreted_clones")
    else:
        results = interpreted("tests.kernels.interpreted", group)
    assert results, f"nothing is checked by the name {group}"
    failed = [f"{name}:\n{report}" for name, report in results.items() if report]
    assert not failed, "\n".join(failed)
