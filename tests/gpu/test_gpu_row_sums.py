"""Test that embedding gradients exchanged by rows over GPUs equal those of one GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.optimizer.row_exchanges import (
    DIVISIONS,
    EXPECTED,
    errors_of_sums,
    weights_after,
    weights_of_twin,
)

KINDS = ("unequal", "many", "replayed")


def _world(
    rank: int, size: int
) -> tuple[dict[str, float], dict[Any, tuple[dict[str, Tensor], Any]]]:
    mesh = ParallelMesh.create(ParallelLayout(size), device=torch.device("cuda", rank))
    cases = [(kind, name) for kind in KINDS for name in DIVISIONS]
    weights_of_cases = {case: weights_after(mesh, DIVISIONS[case[1]], case[0]) for case in cases}
    return errors_of_sums(mesh), weights_of_cases


@on_two_and_four_gpus
def test_rows_exchanged_over_gpus_give_the_gradients_of_full_tables(size):
    ranks = run_ranks(_world, size)
    # A GPU and a CPU draw different weights.
    twins = {kind: weights_of_twin(kind, size, "cuda") for kind in KINDS}
    limits = {"torch.float64": 1e-15, "torch.float32": 1e-6, "torch.bfloat16": 0.02}
    for errors, weights_of_cases in ranks:
        for name, error in errors.items():
            assert error <= limits.get(name, 0.0), name
        for (kind, _), (weights, exchanges) in weights_of_cases.items():
            assert exchanges == EXPECTED[kind](size), kind
            for key, weight in weights.items():
                torch.testing.assert_close(weight, twins[kind][key], rtol=0, atol=1e-11, msg=key)
