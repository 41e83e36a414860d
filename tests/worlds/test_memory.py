"""Ranks that share tensors, experts or stages hold what a trace of a rank without the others needs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.routing import Workload
from lightning_megatron.experts.routing import scores
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.memory.measured import (
    CONFIGS,
    build_model,
    check_costs,
    held_costs,
    mixture,
    shape_of,
    traced_costs,
)
from tests.memory.own_modules import held_of, traced_of
from tests.memory.test_estimate import EIGHT_BITS
from tests.world import run_world

HALF, FULL = torch.bfloat16, torch.float32
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
CONFIG = mixture({"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 64}, num_kv_heads=2)
Costs = dict[str, int]
#: Modules of users over tensor ranks, and over stages.
OWN_CUT = ("nano", "torch", "llama", "adapters")
OWN_STAGED = ("recomputed", "torch", "own llama", "bert")


def dense_costs(size: int) -> dict[str, tuple[Costs, Costs]]:
    found = {}
    for name, shares, in_8_bits in DENSE:
        layout = ParallelLayout(size, tp=size)
        mesh = ParallelMesh.create(layout, seed=0, sequence_parallel=shares)
        config = EIGHT_BITS[name] if in_8_bits else CONFIGS[name]
        fp8 = FP8("tensorwise", emulate=True) if in_8_bits else None
        training = shape_of(HALF if in_8_bits else FULL, sequence_parallel=shares, fp8=fp8)
        model = build_model(config, HALF if in_8_bits else FULL, mesh, fp8)
        held = held_costs(model, training)
        found[f"{name} {in_8_bits}"] = held, traced_costs(config, training, layout)
        mesh.destroy()
    return found


def select_in_turn(logits: Tensor, bias: Tensor | None, config: ExpertsConfig) -> Tensor:
    sizes = logits.shape[0], config.top_k, config.num_experts
    return Workload("W0").choices(*sizes, seed=0, step=0, device=logits.device)


def expert_costs(size: int) -> dict[str, tuple[Costs, Costs]]:
    found = {}
    for name, (sizes, shares, transport, rows, recompute, places) in EXPERTS.items():
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=shares)
        limit = RowLimit(rows or 1.0, mesh)
        model = build_model(CONFIG, mesh=mesh, recompute=recompute)
        for number, layer in model.mixtures.items():
            layer.transport = transport
            layer.row_limit = LayerRows(limit, number, mesh.ep.size)
            layer.clones = ExpertClones(places) if places else None
        training = shape_of(
            HALF, sequence_parallel=shares, expert_transport=transport, expert_rows=rows,
            recompute=recompute, clone_places=places,
        )  # fmt: skip
        even = patch.object(scores, "select_experts", select_in_turn)
        with even, nullcontext() if rows is None else limit.limit_rows():
            held = held_costs(model, training)
        found[name] = held, traced_costs(CONFIG, training, layout)
        mesh.destroy()
    return found


def own_costs(size: int) -> dict[str, tuple[Costs, Costs]]:
    found = {}
    for sizes, names in (({"tp": size}, OWN_CUT), ({"pp": size}, OWN_STAGED)):
        for name in names:
            mesh = ParallelMesh.create(ParallelLayout(size, **sizes), seed=0)
            found[f"{name} {sizes}"] = held_of(name, mesh), traced_of(name, mesh)
            mesh.destroy()
    return found


def measure(rank: int, size: int) -> dict[str, tuple[Costs, Costs]]:
    return dense_costs(size) | expert_costs(size) | own_costs(size)


def test_ranks_that_share_tensors_or_experts_hold_what_a_lone_rank_needs() -> None:
    for found in run_world(measure, 2):
        for name, (held, traced) in found.items():
            # A thread of the communication library frees sent tensors a moment later.
            check_costs(held, traced, 0.05, name)
