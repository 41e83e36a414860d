"""Test that graphs on two GPUs repeat steps that exceed a limit of rows, with eager bits."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron import CudaGraphs
from tests.gpu.shared_gpu import is_shared, require_gpus
from tests.strategy.limited_fits import EXPERTS, Excess
from tests.strategy.steered_fits import SteeredRecord, fit
from tests.world import run_world

#: The twelfth batch runs in a captured graph; the limit grows at the validation after it.
EXCESS: Excess = {
    ("train", 11, 0, 0): -1,
    ("val", 1, 1, 0): 2,
    ("train", 15, 1, 1): 120,
    ("train", 18, 1, 1): 150,
}


def modes() -> tuple[str, ...]:
    """Return the modes of graphs that can capture the steps of these ranks."""
    return ("segments",) if is_shared() else ("segments", "full")


def fit_in_all_modes(rank: int, size: int) -> dict[str, SteeredRecord]:
    options: dict[str, Any] = {
        "accelerator": "gpu",
        "precision": "bf16-mixed",
        "num_batches": 24,
        "val_check_interval": 12,
        "model": {"hidden_size": 64, "experts": {**EXPERTS, "ffn_hidden_size": 32}},
    }
    records = {
        "without": fit(None, EXCESS, **options),
        "repeated": fit(None, EXCESS, **options),
        "eager": fit(1.0, EXCESS, **options),
    }
    for mode in modes():
        graphs = CudaGraphs(mode, evaluation=True, on_failure="error")  # type: ignore[arg-type]
        records[mode] = fit(1.0, EXCESS, graphs, **options)
    return records


@pytest.mark.gpu2
def test_fits_with_limited_rows_have_the_bits_of_a_fit_without_a_limit() -> None:
    require_gpus(2)
    for ranks in run_world(fit_in_all_modes, 2, backend="nccl"):
        without = ranks["without"]
        repeated = set(ranks["repeated"].differences_from(without))
        for name in ("eager", *modes()):
            assert set(ranks[name].differences_from(without)) <= repeated, name
            assert ranks[name].num_failures == 3, name
            assert ranks[name].factor == 1.75, name
        for mode in modes():
            assert ranks[mode].num_graphs[10] > 0, mode
            assert ranks[mode].num_graphs[19] < ranks[mode].num_graphs[10], mode
            assert ranks[mode].num_graphs[-1] > 0, mode
