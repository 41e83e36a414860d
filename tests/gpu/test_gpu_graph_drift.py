"""Test that trainings by CUDA graphs keep eager bits while gradients are summed.

Only deterministic algorithms run: the order of sums in cuDNN's backward pass of attention depends on
the multiprocessors that other kernels leave free, so that one weight of hundreds may differ by 4e-13.
"""

from __future__ import annotations

import pytest

from benchmarks.graph_drift import lines_of
from tests.gpu.shared_gpu import is_shared, require_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize(("model", "layout"), [("tiny_moe", "ep2"), ("tiny", "dp2")])
def test_graphs_keep_eager_bits_while_gradients_are_summed_between_them(model, layout, tmp_path):
    require_gpus(2)
    arguments = ["--model", model, "--layout", layout, "--log", str(tmp_path / "log")]
    modes = ["deterministic"] if is_shared() else ["deterministic", "deterministic full"]
    lines, failure = lines_of([*arguments, "--settings", *modes])
    assert failure == "", lines
    line_of = {line.partition(":")[0]: line for line in lines}
    for mode in modes:
        assert f"equal to {mode}, eager in all bits" in line_of[mode], lines
