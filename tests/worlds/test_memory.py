"""Estimated memory of ranks that share tensors or experts equals the memory that they hold."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.training import DistributedOptimizerConfig
from tests.models.memory import (
    BATCH,
    CONFIGS,
    LENGTH,
    build_model,
    check_parameters,
    estimated_kept_bytes,
    estimated_peak_bytes,
    kept_bytes,
    mixture,
    peak_bytes,
    saved_bytes,
)
from tests.models.test_memory import EIGHT_BITS, SIXTEEN_BITS, TOLERANCE
from tests.training.runs import Run
from tests.world import run_world

FULL = torch.float32
#: Dense models and whether ranks share sequences; the first value is of a model in 8 bits.
DENSE = ((False, "gpt2", False), (False, "llama", True), (False, "latent", True))
DENSE += ((True, "gpt2", True), (True, "latent", False))
#: Sizes, sequence parallelism, transport, limit on the rows of experts, recomputation and places for
#: clones of experts.
EXPERTS: dict[str, tuple[dict[str, int], bool, Any, float | None, Any, int]] = {
    "etp 2": ({"tp": 2}, True, "auto", None, "none", 0),
    "etp 2 without shared sequences": ({"tp": 2}, False, "auto", None, "none", 0),
    "ep 2 inside tp 2": ({"tp": 2, "etp": 1, "ep": 2}, True, "all_gather", None, "expert_inputs", 0),
    "all-gather": ({"ep": 2}, False, "auto", None, "none", 0),
    "all-gather, limited": ({"ep": 2}, False, "auto", 1.0, "none", 0),
    "all-to-all": ({"ep": 2}, False, "all_to_all", None, "expert_inputs", 0),
    "puts, limited": ({"ep": 2}, False, "one_sided", 1.25, "none", 0),
    "puts inside tp 2": ({"tp": 2, "etp": 1, "ep": 2}, True, "one_sided", None, "none", 0),
    # Between CPUs, collectives send clones, which need other buffers than puts.
    "puts, limited, with clones": ({"ep": 2}, False, "one_sided", 1.25, "none", 2),
    "puts, with clones": ({"ep": 2}, False, "one_sided", None, "expert_inputs", 2),
}  # fmt: skip
SHARED = {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 64}
KEPT, STEP = (
    mixture(SHARED, num_kv_heads=2),
    mixture({**SHARED, "ffn_hidden_size": 256}, hidden_size=128),
)
#: Measured and estimated bytes.
Pair = tuple[Any, Any]


def dense_pairs(size: int) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for in_8_bits, name, shares in DENSE:
        layout = ParallelLayout(size, tp=size)
        mesh = ParallelMesh.create(layout, seed=0, sequence_parallel=shares)
        options = {"tp": size, "sequence_parallel": shares}
        config = EIGHT_BITS[name] if in_8_bits else CONFIGS[name]
        model = build_model(config, FULL, mesh)
        if not in_8_bits:
            check_parameters(model, layout)
            pairs[name] = saved_bytes(model), estimated_kept_bytes(config, FULL, **options)
        for recipe in ("tensorwise", "rowwise") if in_8_bits else ():
            fp8: Any = FP8(recipe, emulate=True)  # type: ignore[arg-type]
            change = saved_bytes(build_model(config, FULL, mesh, fp8)) - saved_bytes(model)
            eight, sixteen = (
                estimated_kept_bytes(config, FULL, f, **options) for f in (fp8, SIXTEEN_BITS)
            )
            pairs[f"8 bits, {name}, {recipe}"] = change, eight - sixteen
        mesh.destroy()
    return pairs


def permanent_pair(model: GPT, layout: ParallelLayout) -> Pair:
    """Return the memory of parameters, gradients and states after a step, by part."""
    named = dict(model.named_parameters())
    division = DistributedOptimizerConfig(main_dtype=FULL)
    run = Run(named, model.mesh, division, torch.optim.AdamW)
    run.backward({name: torch.ones_like(parameter) for name, parameter in named.items()})
    run.finish()
    run.step()
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    held = {**run.main.memory(), "optimizer": sum(value.nbytes for value in states)}
    shape = model.config.memory_shape()
    (estimate,) = estimate_memory(shape, layout, TrainingShape(seq_length=LENGTH))
    return held, {part: getattr(estimate, part) for part in held}


def expert_pairs(size: int) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for name, (sizes, shares, transport, rows, recompute, places) in EXPERTS.items():
        layout = ParallelLayout(size, **sizes)
        for config in (KEPT,) if places else (KEPT, STEP):
            # Each mesh has its own shared memory.
            mesh = ParallelMesh.create(layout, sequence_parallel=shares)
            limit = RowLimit(rows or 1.0, mesh)
            is_kept = config is KEPT
            model = build_model(config, mesh=mesh, recompute=recompute if is_kept else "none")
            for number, layer in model.mixtures().items():
                layer.transport, layer.router.forced_balance = transport, True
                layer.row_limit = LayerRows(limit, number, mesh.ep.size)
                layer.clones = CloneSettings(places) if places else None
            check_parameters(model, layout)
            options: dict[str, Any] = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
            options |= {"expert_rows": rows, "clone_places": places, "transport": transport}
            training = {"expert_transport": transport, "expert_rows": rows}
            with nullcontext() if rows is None else limit.limit_rows():
                if is_kept:
                    kept = estimated_kept_bytes(
                        config,
                        torch.bfloat16,
                        recompute=recompute,
                        sequence_parallel=shares,
                        **options,
                    )
                    pairs[name] = kept_bytes(model, patience=0.5), kept
                else:
                    training |= {"microbatch_size": BATCH, "sequence_parallel": shares}
                    estimate = estimated_peak_bytes(config, layout, **training)
                    pairs[f"peak, {name}"] = peak_bytes(model, BATCH), estimate
            if is_kept and rows is None:
                pairs[f"permanent, {name}"] = permanent_pair(model, layout)
            mesh.destroy()
    return pairs


def measure(rank: int, size: int) -> dict[str, Pair]:
    return dense_pairs(size) | expert_pairs(size)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Pair]]:
    return run_world(measure, 2)


def test_memory_of_tensor_parallel_ranks_equals_the_estimate(ranks: list[dict[str, Pair]]) -> None:
    for pairs in ranks:
        for name in ("gpt2", "llama", "latent"):
            assert pairs[name][0] == pytest.approx(pairs[name][1], rel=0.015), name
        for name, (change, expected) in pairs.items():
            assert "8 bits" not in name or change == pytest.approx(expected, abs=TOLERANCE), name


def test_memory_of_expert_parallel_ranks_equals_the_estimate(ranks: list[dict[str, Pair]]) -> None:
    for pairs in ranks:
        for name in EXPERTS:
            assert pairs[name][0] == pytest.approx(pairs[name][1], rel=0.025), name
        for name, (measured, estimate) in pairs.items():
            tolerance = 0.02 if name.startswith("permanent") else 0.08
            if name.startswith(("permanent", "peak")):
                assert estimate == pytest.approx(measured, rel=tolerance), name
