"""Variants of the benchmark of the head and the loss compute the same values, one row for each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loss import Measured, main, operands, row, variants


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_variants_have_the_same_loss_and_gradients(smoothing: float) -> None:
    hidden, head, labels = operands(48, 16, 40, "cpu")
    losses, left_out = variants(10, smoothing)
    assert ("cut-cross-entropy" in " ".join(left_out)) == (
        smoothing > 0 or "cut" not in str(losses)
    )
    outcomes = {}
    for name in ("torch", "stored", "chunks of 10", "chunks of 10, forward"):
        loss = losses[name](hidden, head, labels, smoothing)
        outcomes[name] = loss, *torch.autograd.grad(loss, (hidden, head))
    for name, results in outcomes.items():
        for actual, expected in zip(results, outcomes["torch"], strict=True):
            torch.testing.assert_close(
                actual, expected, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert outcomes["torch"][0].item() > 1.0


def test_rows_have_figures_or_the_reason_why_not() -> None:
    assert row(8, "stored", 4e12, Measured(0.02, 3 * 2**30)) == "| 8 | stored | 20.0 | 200 | 3.00 |"
    assert row(8, "stored", 4e12, Measured(0.02, None)) == "| 8 | stored | 20.0 | 200 | n/a |"
    assert row(8, "stored", 4e12, None) == "| 8 | stored | out of memory | | |"


def test_the_program_writes_a_row_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table.md"
    sizes = {"features": 8, "vocabulary": 24, "chunk": 8, "rounds": 2, "smoothing": 0.1}
    options = ["--tokens", "16", "32", "--device", "cpu", "--out", str(out)]
    options += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", ["loss", *options])
    for name in ("liger_kernel", "cut_cross_entropy"):
        # Their kernels need a GPU.
        monkeypatch.setitem(sys.modules, name, None)
    main()
    lines = out.read_text().splitlines()
    rows = [line.split(" | ")[:2] for line in lines if line[2:3].isdigit()]
    names = ["torch", "stored", "chunks of 8", "chunks of 8, forward"]
    assert rows == [[f"| {tokens}", name] for tokens in (16, 32) for name in names]
    assert any(line.startswith("left out: liger-kernel") for line in lines)
