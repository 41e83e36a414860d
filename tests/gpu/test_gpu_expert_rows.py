"""Test that graphs on two GPUs repeat steps that exceed a limit of rows, with eager bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron import CudaGraphs
from tests.fits import Report
from tests.gpu.ranks import run_ranks
from tests.gpu.shared_gpu import is_shared
from tests.strategy.steered import EXPERTS, MIXTURE, Excess, differences, run_steered

#: The twelfth batch runs in a captured graph; the limit grows at the validation after it, and is
#: then enough for all rows.
EXCESS: Excess = {("train", 11, 0, 0): -1, ("val", 0, 1, 0): 2, ("train", 15, 1, 1): 120}


def modes() -> tuple[str, ...]:
    """Return the modes of graphs that can capture the steps of these ranks."""
    return ("segments",) if is_shared() else ("segments", "full")


def fit_in_all_modes(rank: int, size: int) -> dict[str, Report]:
    experts: Any = {**EXPERTS, "ffn_hidden_size": 32}
    options: dict[str, Any] = {
        "precision": "bf16-mixed",
        "num_batches": 24,
        "trainer": {"accelerator": "gpu", "val_check_interval": 12},
        "config": replace(MIXTURE, hidden_size=64, experts=experts),
    }
    reports = {
        "without": run_steered(None, EXCESS, **options),
        "repeated": run_steered(None, EXCESS, **options),
        "eager": run_steered(1.0, EXCESS, **options),
    }
    for mode in modes():
        graphs = CudaGraphs(mode, evaluation=True, on_failure="error")  # type: ignore[arg-type]
        reports[mode] = run_steered(1.0, EXCESS, graphs, **options)
    return reports


@pytest.mark.gpu2
def test_fits_with_limited_rows_have_the_bits_of_a_fit_without_a_limit():
    for ranks in run_ranks(fit_in_all_modes, 2):
        without = ranks["without"]
        repeated = set(differences(ranks["repeated"], without))
        for name in ("eager", *modes()):
            assert set(differences(ranks[name], without)) <= repeated, name
            assert ranks[name].outcomes["failures"] == 2, name
            assert 1.1 < ranks[name].outcomes["factor"] < 1.2, name
        for mode in modes():
            graphs = ranks[mode].outcomes["graphs"]
            assert graphs[10] > 0, mode
            # The eager batch after the validation, before the captures with more rows.
            assert graphs[12] < graphs[10], mode
            assert graphs[-1] > 0, mode
