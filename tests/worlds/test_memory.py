"""Estimated memory of ranks that share tensors or experts equals the memory that they hold."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.routing import in_turn
from lightning_megatron.experts.routing import scores
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPT
from lightning_megatron.optimizer import DistributedOptimizerConfig
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.memory import (
    CONFIGS,
    LENGTH,
    build_model,
    check_parameters,
    estimated_kept_bytes,
    kept_bytes,
    mixture,
    saved_bytes,
)
from tests.models.test_memory import EIGHT_BITS, SIXTEEN_BITS, TOLERANCE
from tests.optimizer.runs import Run
from tests.world import run_world

FULL = torch.float32
#: Dense models, whether ranks share sequences, and whether products are in 8 bits.
DENSE = (
    ("gpt2", False, False),
    ("llama", True, False),
    ("latent", True, False),
    ("gpt2", True, True),
)
#: Sizes, sequence parallelism, transport, limit on the rows of experts, recomputation and places for
#: clones of experts.
EXPERTS: dict[str, tuple[dict[str, int], bool, Any, float | None, Any, int]] = {
    "etp 2": ({"tp": 2}, True, "auto", None, "none", 0),
    "ep 2 inside tp 2": ({"tp": 2, "etp": 1, "ep": 2}, True, "all_gather", None, "expert_inputs", 0),
    "all-gather, limited": ({"ep": 2}, False, "auto", 1.0, "none", 0),
    "all-to-all": ({"ep": 2}, False, "all_to_all", None, "expert_inputs", 0),
    "puts, limited": ({"ep": 2}, False, "one_sided", 1.25, "none", 0),
    "puts, limited, with clones": ({"ep": 2}, False, "one_sided", 1.25, "none", 2),
}  # fmt: skip
SHARED = {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 64}
CONFIG = mixture(SHARED, num_kv_heads=2)
#: Measured and estimated bytes.
Pair = tuple[Any, Any]


def dense_pairs(size: int) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for name, shares, in_8_bits in DENSE:
        layout = ParallelLayout(size, tp=size)
        mesh = ParallelMesh.create(layout, seed=0, sequence_parallel=shares)
        options = {"tp": size, "sequence_parallel": shares}
        config = EIGHT_BITS[name] if in_8_bits else CONFIGS[name]
        model = build_model(config, FULL, mesh)
        if in_8_bits:
            fp8 = FP8("tensorwise", emulate=True)
            change = saved_bytes(build_model(config, FULL, mesh, fp8)) - saved_bytes(model)
            eight, sixteen = (
                estimated_kept_bytes(config, FULL, kind, **options) for kind in (fp8, SIXTEEN_BITS)
            )
            pairs["8 bits"] = change, eight - sixteen
        else:
            check_parameters(model, layout)
            pairs[name] = saved_bytes(model), estimated_kept_bytes(config, FULL, **options)
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


def select_in_turn(logits: Tensor, bias: Tensor | None, config: ExpertsConfig) -> Tensor:
    return in_turn(logits.shape[0], config.top_k, config.num_experts, logits.device)


def expert_pairs(size: int) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for name, (sizes, shares, transport, rows, recompute, places) in EXPERTS.items():
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=shares)
        limit = RowLimit(rows or 1.0, mesh)
        model = build_model(CONFIG, mesh=mesh, recompute=recompute)
        for number, layer in model.mixtures.items():
            layer.transport = transport
            layer.row_limit = LayerRows(limit, number, mesh.ep.size)
            layer.clones = ExpertClones(places) if places else None
        check_parameters(model, layout)
        estimate = estimated_kept_bytes(
            CONFIG, torch.bfloat16, recompute=recompute, sequence_parallel=shares, tp=layout.tp,
            ep=layout.ep, etp=layout.etp, expert_rows=rows, clone_places=places, transport=transport,
        )  # fmt: skip
        # The weights of clones have memory that no layer keeps.
        estimate += places * 3 * SHARED["ffn_hidden_size"] * CONFIG.hidden_size * 2
        even = patch.object(scores, "select_experts", select_in_turn)
        with even, nullcontext() if rows is None else limit.limit_rows():
            pairs[name] = kept_bytes(model, patience=0.5), estimate
        if rows is None:
            pairs[f"permanent, {name}"] = permanent_pair(model, layout)
        mesh.destroy()
    return pairs


def measure(rank: int, size: int) -> dict[str, Pair]:
    return dense_pairs(size) | expert_pairs(size)


def test_memory_of_ranks_that_share_tensors_or_experts_equals_the_estimate() -> None:
    for pairs in run_world(measure, 2):
        for name, (measured, estimate) in pairs.items():
            if name in EXPERTS:
                assert measured == pytest.approx(estimate, rel=0.025), name
            elif name == "8 bits":
                assert measured == pytest.approx(estimate, abs=TOLERANCE)
            else:
                tolerance = 0.02 if name.startswith("permanent") else 0.015
                assert estimate == pytest.approx(measured, rel=tolerance), name
