"""Trainings by CUDA graphs keep the bits of eager ones where gradients are summed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.graph_drift import lines_of


@pytest.mark.gpu2
@pytest.mark.parametrize(("model", "layout"), [("tiny_moe", "ep2"), ("tiny", "dp2")])
def test_graphs_between_which_gradients_are_summed_keep_the_bits_of_eager_steps(
    model: str, layout: str, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    line = ["--model", model, "--layout", layout, "--log", str(tmp_path / "log")]
    lines, failure = lines_of([*line, "--settings", "eager again", "segments", "full"])
    assert failure == "", lines
    found = {text.partition(":")[0]: text for text in lines}
    if "equal to eager" not in found["eager again"]:
        pytest.skip(f"eager steps are not deterministic: {found['eager again']}")
    assert "equal to eager" in found["segments"], lines
    assert "equal to eager" in found["full"], lines
