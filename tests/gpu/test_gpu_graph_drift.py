"""Test that trainings by CUDA graphs keep eager bits while gradients are summed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.graph_drift import lines_of
from tests.gpu.shared_gpu import is_shared, require_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize(("model", "layout"), [("tiny_moe", "ep2"), ("tiny", "dp2")])
def test_graphs_keep_eager_bits_while_gradients_are_summed_between_them(
    model: str, layout: str, tmp_path: Path
) -> None:
    require_gpus(2)
    arguments = ["--model", model, "--layout", layout, "--log", str(tmp_path / "log")]
    modes = ["segments"] if is_shared() else ["segments", "full"]
    lines, failure = lines_of([*arguments, "--settings", "eager again", *modes])
    assert failure == "", lines
    line_of = {line.partition(":")[0]: line for line in lines}
    if "equal to eager" not in line_of["eager again"]:
        pytest.skip(f"eager steps are not deterministic: {line_of['eager again']}")
    for mode in modes:
        assert "equal to eager" in line_of[mode], lines
