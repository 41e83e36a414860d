"""Trainings by CUDA graphs keep the bits of eager ones where gradients are summed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.graph_drift import lines_of
from tests.gpu.shared_gpu import is_shared, require_gpus


@pytest.mark.gpu2
@pytest.mark.parametrize(("model", "layout"), [("tiny_moe", "ep2"), ("tiny", "dp2")])
def test_graphs_between_which_gradients_are_summed_keep_the_bits_of_eager_steps(
    model: str, layout: str, tmp_path: Path
) -> None:
    require_gpus(2)
    line = ["--model", model, "--layout", layout, "--log", str(tmp_path / "log")]
    modes = ["segments"] if is_shared() else ["segments", "full"]
    lines, failure = lines_of([*line, "--settings", "eager again", *modes])
    assert failure == "", lines
    found = {text.partition(":")[0]: text for text in lines}
    if "equal to eager" not in found["eager again"]:
        pytest.skip(f"eager steps are not deterministic: {found['eager again']}")
    for mode in modes:
        assert "equal to eager" in found[mode], lines
