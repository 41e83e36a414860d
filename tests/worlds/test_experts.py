"""Mixtures of experts train as one process in every expert grid, by every transport of rows, with
clones of experts, expert biases and latent attention: same losses, norms and final weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.transport import peer_clones
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.fits import (
    EXPERTS,
    LLAMA_SIZES,
    MIXTURE,
    SEQUENCE,
    SIZES,
    Job,
    Report,
    check_equal,
    run_job,
)
from tests.sweeps import chosen
from tests.world import run_world

BIAS = {"scoring": "sigmoid", "expert_bias": True, "expert_bias_rate": 0.01}
KINDS = {
    "plain": MIXTURE,
    "some layers": GPTConfig.llama(
        **LLAMA_SIZES,
        experts={**EXPERTS, "layers": [False, True, False, True], "shared_ffn_hidden_size": 16}
        | {"shared_gate": True, "capacity_factor": 8.0},
    ),
    "whole step": GPTConfig.llama(
        **LLAMA_SIZES, tie_embeddings=True,
        experts={**EXPERTS, **BIAS, "aux_loss_scope": "global", "num_groups": 2, "top_k_groups": 1},
    ),
    "biases": GPTConfig.llama(
        **LLAMA_SIZES, activation="clamped_swiglu", attention_sinks=True, qkv_bias=True, output_bias=True,
        sliding_window=5, window_layers=[True, False, True, False],
        experts={**EXPERTS, "linear_bias": True, "router_bias": True},
    ),
    "latent": GPTConfig.llama(
        **SIZES, ffn_hidden_size=48, latent_attention={
            "key_value_rank": 12, "query_rank": 20, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8,
        },
        experts={**EXPERTS, **BIAS, "layers": [False, True, True, True], "num_groups": 4, "top_k_groups": 2}
        | {"score_scale": 2.5, "shared_ffn_hidden_size": 16},
    ),
}  # fmt: skip
#: "etp1" has whole experts on every rank of tp, and sequence parallelism; without it, ranks of tp
#: divide the features of experts.
ETP1 = {"etp": 1}
PLAIN_TP = {"sequence_parallel": False}
ONE_SIDED = {"experts.transport": "one_sided"}
ALL_TO_ALL = {"experts.transport": "all_to_all"}
GRIDS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "ep4, one-sided": {"ep": 4, **ONE_SIDED},
    "ep2 edp2, zero 0": {"ep": 2, "optimizer.zero": 0},
    "tp2 etp1 ep2, experts again": {"tp": 2, "ep": 2, **ETP1, "recompute": "experts"},
    "tp2 etp1 ep2, all again": {"tp": 2, "ep": 2, **ETP1, "recompute": "full"},
    "tp2 etp2 ep2": {"tp": 2, "ep": 2, **PLAIN_TP},
    "tp2 etp2 ep2, one-sided": {"tp": 2, "ep": 2, **PLAIN_TP, **ONE_SIDED},
    "tp4 etp1 ep4, all-to-all": {"tp": 4, "ep": 4, **ETP1, **ALL_TO_ALL},
    # Only experts have replicas.
    "tp4 etp1 ep2 edp2": {"tp": 4, "ep": 2, **ETP1},
    "tp4 etp4": {"tp": 4, **PLAIN_TP},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "pp2 ep2, one-sided zb-h1, inputs again": {"pp": 2, "ep": 2, **ONE_SIDED}
    | {"recompute": "expert_inputs", "schedule": "zb-h1"},
    "pp2 vpp2 edp2": {"pp": 2, "vpp": 2},
    "zb-v tp2": {"pp": 2, "vpp": 2, "schedule": "zb-v", "tp": 2},
    "cp2 ep2, all-to-all": {"cp": 2, "ep": 2, "context.transport": "all_to_all"},
    "cp2 tp2, ring": {"cp": 2, "tp": 2, "context.transport": "ring"},
}
#: Gradients before and after an update.
two_steps = partial(Job, steps=2)
JOBS: dict[tuple[str, str], Job] = chosen(
    {(kind, name): two_steps(KINDS[kind], grid) for kind in KINDS for name, grid in GRIDS.items()},
    ("plain", "tp4 etp1 ep4, all-to-all"),
    ("plain", "tp4 etp1 ep2 edp2"),
    ("plain", "tp2 etp2 ep2, one-sided"),
    ("plain", "tp2 etp1 ep2, experts again"),
    ("plain", "ep2 edp2, zero 0"),
    ("plain", "pp2 ep2, one-sided zb-h1, inputs again"),
    ("some layers", "ep4"),
    ("some layers", "pp2 vpp2 edp2"),
    ("whole step", "pp2 ep2"),
    ("biases", "tp2 etp1 ep2, all again"),
    ("biases", "cp2 tp2, ring"),
    ("latent", "tp2 etp1 ep2, all again"),
    ("latent", "cp2 ep2, all-to-all"),
    ("latent", "cp2 tp2, ring"),
)
#: A clone needs more rows than there are.
NEVER = {"places": 2, "min_rows": 10**6}
#: Buckets of few parameters start during the backward pass.
EDP2 = {"ep": 2, "optimizer.bucket_size": 2000}
#: Fits with clones.
CLONES: dict[str, Job] = {
    name: two_steps(KINDS[kind], {"experts.clones": clones, **layout})
    for name, (kind, clones, layout) in {
        "ep4, inputs again": ("plain", 2, {"ep": 4, "recompute": "expert_inputs"}),
        "ep2 edp2, zero 0": ("plain", 2, EDP2 | {"optimizer.zero": 0}),
        "tp2 etp1 ep2, all again": ("plain", 2, GRIDS["tp2 etp1 ep2, all again"]),
        "tp2 etp2 ep2": ("whole step", 1, GRIDS["tp2 etp2 ep2"]),
        "zb-h1 ep2": ("plain", 2, {"pp": 2, "ep": 2, "schedule": "zb-h1"}),
        "nothing moves": ("plain", NEVER, EDP2),
    }.items()
}
# Two batches are one step.
CLONES["accumulated"] = two_steps(
    MIXTURE, {"experts.clones": 1, **EDP2, "microbatch_size": 1}, batch=4,
    trainer={"accumulate_grad_batches": 2},
)  # fmt: skip


def run_all(rank: int, size: int) -> tuple[dict[Any, Report], dict[str, int], str]:
    """Return the reports, how many rows took clones, and the error about unequal sequences."""
    reports: dict[Any, Report] = {name: run_job(job, size) for name, job in JOBS.items()}
    place_clones, moved = peer_clones.place_clones, dict.fromkeys(CLONES, 0)
    with pytest.MonkeyPatch.context() as patch:
        for name, job in CLONES.items():

            def counted(*sizes: Any, name: str = name) -> Any:
                clones = place_clones(*sizes)
                moved[name] += int(clones.amounts.sum())
                return clones

            patch.setattr(peer_clones, "place_clones", counted)
            reports[f"clones: {name}"] = run_job(job, size)
    return reports, moved, error_of_unequal_sequences(rank, size)


def error_of_unequal_sequences(rank: int, size: int) -> str:
    mesh = ParallelMesh.create(ParallelLayout(size, ep=2))
    try:
        GPT(MIXTURE, mesh)(torch.zeros(1, SEQUENCE - 4 * (rank % 2), dtype=torch.long))
    except RankMismatchError as error:
        return str(error)
    finally:
        mesh.destroy()
    return ""


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_world(run_all, 4)


@cache
def twin(kind: str, accumulate: int = 1) -> Report:
    """Train in this process; only the strategy changes the router's bias, and divides losses of
    routers by the number of batches.
    """
    under_strategy = kind in ("whole step", "latent") or accumulate > 1
    job = two_steps(KINDS[kind], {} if under_strategy else None)
    if accumulate > 1:
        job = replace(job, trainer={"accumulate_grad_batches": accumulate}, batch=4)
    return run_job(job)


@pytest.mark.parametrize("name", JOBS, ids=", ".join)
def test_every_expert_grid_trains_as_one_process(name: tuple[str, str], ranks: Any) -> None:
    check_equal([reports[name] for reports, *_ in ranks], twin(name[0]))


@pytest.mark.parametrize("name", CLONES)
def test_every_fit_with_clones_trains_as_one_process(name: str, ranks: Any) -> None:
    assert all((moved[name] > 0) == (name != "nothing moves") for _, moved, _ in ranks)
    (kind,) = (kind for kind, config in KINDS.items() if config == CLONES[name].model)
    found = [reports[f"clones: {name}"] for reports, *_ in ranks]
    check_equal(found, twin(kind, accumulate=2 if name == "accumulated" else 1))


def test_microbatches_of_unequal_sizes_are_refused_on_all_ranks(ranks: Any) -> None:
    for rank, (*_, error) in enumerate(ranks):
        own = SEQUENCE - 4 * (rank % 2)
        assert f"this rank has {own}, the others have {SEQUENCE - 4} to {SEQUENCE}" in error


def test_one_process_under_the_strategy_trains_as_ordinary_lightning() -> None:
    for kind in ("plain", "some layers", "biases"):
        check_equal([run_job(two_steps(KINDS[kind], {}))], twin(kind))
