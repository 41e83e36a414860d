"""Tests that graphs of single scopes of a mixture on GPUs have the bits of eager steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron import CudaGraphs
from tests.fits import Report
from tests.gpu.ranks import gpu_job, run_ranks
from tests.gpu.shared_gpu import is_shared
from tests.graphs.jobs import ROUTED, VARIED, differences, run_graphs

MIXTURE = replace(ROUTED, hidden_size=64, ffn_hidden_size=128)
#: ``preprocess`` needs ``router``. The ranks of all_to_all read sizes on the host, so that only
#: scopes without the transport can be captured.
SCOPES: list[tuple[Any, ...]] = [
    ("router",),
    ("router", "preprocess"),
    ("experts",),
    ("combine",),
    ("attention", "router", "preprocess"),
    ("router", "preprocess", "experts", "combine"),
]
BESIDE_TRANSPORT = [scopes for scopes in SCOPES if "experts" not in scopes]


def fit_on_gpu(graphs: CudaGraphs | None, size: int = 1, **layout: Any) -> Report:
    """Train eight steps of two microbatches or more in bfloat16."""
    job = gpu_job(MIXTURE, layout, "bf16-mixed", steps=8)
    return run_graphs(replace(job, data=VARIED), graphs, size)


def compare(scopes: list[tuple[Any, ...]], size: int = 1, **layout: Any) -> dict[str, str]:
    """Return what is wrong with the graphs of each set of scopes on this rank, by the scopes."""
    eager = fit_on_gpu(None, size, **layout)
    repeated = differences(fit_on_gpu(None, size, **layout), eager)
    assert len(set(eager.losses)) == len(eager.losses)
    wrong = {}
    for chosen in scopes:
        graphs = CudaGraphs("segments", chosen, warmup_steps=3, on_failure="error")
        actual = fit_on_gpu(graphs, size, **layout)
        name = " + ".join(chosen)
        # Some kernels sum in another order in every run.
        more = set(differences(actual, eager)) - set(repeated)
        if more:
            wrong[name] = f"differs in {sorted(more)}"
        elif actual.losses != pytest.approx(eager.losses, rel=2e-2):
            wrong[name] = f"losses {actual.losses} and {eager.losses}"
        elif not actual.outcomes["graphs"][-1] or not actual.outcomes["replays"]:
            wrong[name] = f"nothing is captured: {actual.outcomes['graphs']}"
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("scopes", SCOPES, ids=" + ".join)
def test_graphs_of_scopes_of_a_mixture_have_the_bits_of_eager_steps(scopes):
    assert compare([scopes]) == {}


@pytest.mark.gpu
def test_graphs_of_scopes_with_recomputed_experts_have_the_bits_of_eager_steps():
    assert compare([("router",), ("experts",)], recompute="experts") == {}


def compare_on_two_ranks(rank: int, size: int) -> dict[str, dict[str, str]]:
    results = {"one_sided": compare(SCOPES, size, **{"ep": 2, "experts.transport": "one_sided"})}
    results["all_to_all"] = compare(
        BESIDE_TRANSPORT, size, **{"ep": 2, "experts.transport": "all_to_all"}
    )
    # A captured all-gather needs a GPU for each rank.
    if not is_shared():
        results["all_gather"] = compare(
            SCOPES, size, **{"ep": 2, "experts.transport": "all_gather"}
        )
    return results


@pytest.mark.gpu2
def test_graphs_of_scopes_of_a_mixture_on_two_gpus_have_the_bits_of_eager_steps():
    for ranks in run_ranks(compare_on_two_ranks, 2):
        assert ranks == dict.fromkeys(ranks, {})
