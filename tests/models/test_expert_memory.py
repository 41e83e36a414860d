"""Estimated memory of models with experts equals the memory that they use."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.transport.choose_transport import choose_transport
from lightning_megatron.experts.transport.dispatchers import (
    AllToAllDispatcher,
    GatherDispatcher,
    LocalDispatcher,
)
from lightning_megatron.experts.transport.one_sided import OneSidedDispatcher
from lightning_megatron.experts.transport.row_limit import LayerRows, RowLimit
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.activations import activation_costs
from lightning_megatron.plan.budget import TrainingShape, clone_bytes, estimate_memory
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.experts import ExpertsConfig, Transport, transport_over_ep
from lightning_megatron.plan.kept_activations import eager_activations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.network_activations import MicrobatchShape
from lightning_megatron.plan.recomputation import Recomputation, Recompute
from lightning_megatron.training import DistributedOptimizerConfig
from tests.live_memory import LiveMemory
from tests.models.test_kept_activations import built
from tests.sweeps import chosen
from tests.training.runs import Run
from tests.world import run_world

BATCH, LENGTH = 2, 64


def config_of(experts: dict[str, Any], **settings: Any) -> GPTConfig:
    sizes = {
        "vocab_size": 256,
        "max_seq_length": LENGTH,
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
    }
    mixture = ExpertsConfig(
        **{"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48, "layers": 2, **experts}
    )
    # Not RMSNorm: on CPU torch computes it from smaller operations, which keep more.
    kind = {"ffn_hidden_size": 96, "norm": "layernorm", "experts": mixture}
    return GPTConfig.llama(**{**sizes, **kind, **settings})


CONFIGS = {
    "every second layer": config_of({}),
    "all layers": config_of({"layers": 1, "top_k": 3, "aux_loss": 0.01, "z_loss": 0.001}),
    "the first layer": config_of({"layers": (True, False, False), "normalize_top_k": False}),
    "sigmoid": config_of(
        {"scoring": "sigmoid", "aux_loss": 0.01, "num_experts": 64, "expert_bias": True}
    ),
    "many scores": config_of({"num_experts": 128, "z_loss": 0.001}),
    "jitter and capacity": config_of({"jitter": 0.1, "capacity_factor": 8.0}),
    "shared": config_of({"shared_ffn_hidden_size": 80, "jitter": 0.1}),
    "shared with a gate": config_of({"shared_ffn_hidden_size": 80, "shared_gate": True}),
    "relu": config_of({}, activation="relu"),
    "gelu": config_of({}, activation="gelu"),
    "biases": config_of({"linear_bias": True, "router_bias": True}, activation="clamped_swiglu"),
}


#: Models, dtypes and recomputation of a forward pass; and, of a step, with the width of experts.
PASSES = list(product(CONFIGS, [torch.float32, torch.bfloat16], ["none", "expert_inputs"]))
STEPS = list(
    product(
        [
            ("every second layer", torch.float32),
            ("all layers", torch.bfloat16),
            ("shared", torch.bfloat16),
            ("gelu", torch.float32),
            ("biases", torch.float32),
        ],
        [48, 384],
        ["none", "experts", "expert_inputs", "full"],
    )
)


def tokens_of(config: GPTConfig, batch: int = BATCH) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, LENGTH))


def follow(model: GPT) -> LiveMemory:
    """Give parameters their gradient slots, and track all other memory."""
    memory = LiveMemory()
    memory.leave_out(list(model.buffers()))
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])
    return memory


def kept_bytes(model: GPT, config: GPTConfig, patience: float = 0.0) -> int:
    memory, tokens = follow(model), tokens_of(config)
    with memory:
        loss = model(tokens, labels=tokens)
    # A thread of the communication library lets go of what it sent a moment later.
    until, least = time.monotonic() + patience, memory.now
    while time.monotonic() < until:
        time.sleep(0.01)
        least = min(least, memory.now)
    return least - loss.nbytes


def estimated_bytes(
    config: GPTConfig, dtype: torch.dtype, recompute: Recompute = "none", **how: Any
) -> int:
    shape = config.memory_shape()
    table = eager_activations(shape, dtype.itemsize)
    batch = MicrobatchShape(num_tokens=LENGTH * BATCH, activation_bytes=dtype.itemsize, **how)
    blocks = [
        activation_costs(
            shape,
            table,
            batch,
            seq_length=LENGTH,
            recompute=Recomputation.of(recompute).parts_of(0, 1),
            has_experts=config.has_experts_in(layer),
        )
        for layer in range(config.num_layers)
    ]
    slots = max(block.slots for block in blocks)
    return sum(block.kept for block in blocks) + blocks[0].head + blocks[0].loss_kept + slots


@pytest.mark.parametrize(
    ("kind", "dtype", "recompute"),
    chosen(PASSES, *(PASSES[4 * number + number % 4] for number in range(len(CONFIGS)))),
)
def test_a_forward_pass_keeps_what_the_estimate_says(
    kind: str, dtype: torch.dtype, recompute: Recompute
) -> None:
    config = CONFIGS[kind]
    model = built(config, dtype)
    model.recompute = recompute
    expected = estimated_bytes(config, dtype, recompute)
    assert kept_bytes(model, config) == pytest.approx(expected, rel=0.015)
    check_parameters(model, config, ParallelLayout(1))


def check_parameters(model: GPT, config: GPTConfig, layout: ParallelLayout) -> None:
    shape, num_mixtures = config.memory_shape(), sum(map(config.has_experts_in, range(3)))
    found = {True: 0, False: 0}
    for parameter in model.parameters():
        found[shard_spec_of(parameter).is_expert] += parameter.numel()
    assert found[True] == num_mixtures * shape.expert_parameters(layout)
    assert found[False] == shape.stage_parameters(layout, 0, 3, num_mixtures)


@pytest.mark.parametrize(
    ("model_of", "inner", "recompute"),
    chosen(STEPS, *(STEPS[8 * number + 5 * number % 8] for number in range(5))),
)
def test_the_peak_of_a_step_is_what_the_estimate_says(
    model_of: tuple[str, torch.dtype], inner: int, recompute: Recompute
) -> None:
    kind, dtype = model_of
    config = replace(
        CONFIGS[kind],
        hidden_size=128,
        experts=replace(CONFIGS[kind].experts, ffn_hidden_size=inner),
    )
    model = built(config, dtype)
    model.recompute = recompute
    training = TrainingShape(
        seq_length=LENGTH, microbatch_size=4, recompute=recompute, activation_bytes=dtype.itemsize
    )
    (estimate,) = estimate_memory(config.memory_shape(), ParallelLayout(1), training)
    assert estimate.peak - estimate.static == pytest.approx(peak_bytes(model, config, 4), rel=0.06)


def peak_bytes(model: GPT, config: GPTConfig, batch: int = BATCH) -> int:
    memory, tokens = follow(model), tokens_of(config, batch)
    with memory:
        model(tokens, labels=tokens).mean().backward()
    return memory.peak


# Two ranks.

#: Places of a rank in layouts with clones of experts.
PLACES = {"ep 2 by puts, limited, with clones": 2, "ep 2 by puts, with clones": 2}
#: Sizes, sequence parallelism, transport, and limit on the rows of experts.
LAYOUTS: dict[str, tuple[dict[str, int], bool, Transport, float | None]] = {
    "etp 2": ({"tp": 2}, True, "auto", None),
    "etp 2 without sequence parallelism": ({"tp": 2}, False, "auto", None),
    "etp 1 inside tp 2": ({"tp": 2, "etp": 1}, True, "auto", None),
    "ep 2 inside tp 2": ({"tp": 2, "etp": 1, "ep": 2}, True, "all_gather", None),
    "ep 2 by an all-gather": ({"ep": 2}, False, "auto", None),
    "ep 2 by an all-gather, limited": ({"ep": 2}, False, "auto", 1.0),
    "ep 2 by an all-to-all": ({"ep": 2}, False, "all_to_all", None),
    "ep 2 by puts": ({"ep": 2}, False, "one_sided", None),
    "ep 2 by puts, limited": ({"ep": 2}, False, "one_sided", 1.25),
    "ep 2 by puts, with clones": ({"ep": 2}, False, "one_sided", None),
    "ep 2 by puts, limited, with clones": ({"ep": 2}, False, "one_sided", 1.25),
    "ep 2 inside tp 2 by puts": ({"tp": 2, "etp": 1, "ep": 2}, True, "one_sided", None),
}


#: Layouts whose memory is compared, with inputs of experts that are kept and sent again.
RECOMPUTED: tuple[Recompute, ...] = ("none", "expert_inputs")
HELD = chosen(
    list(product(LAYOUTS, RECOMPUTED)),
    ("etp 2", "none"),
    ("ep 2 inside tp 2", "expert_inputs"),
    ("ep 2 by an all-gather, limited", "none"),
    ("ep 2 by an all-to-all", "expert_inputs"),
    ("ep 2 by puts, limited, with clones", "none"),
    ("ep 2 by puts, with clones", "expert_inputs"),
)
#: Between CPUs clones come by collectives, which need other buffers than puts.
TRAINED = chosen(
    {name: one for name, one in LAYOUTS.items() if name not in PLACES},
    "etp 2 without sequence parallelism",
    "ep 2 inside tp 2 by puts",
    "ep 2 by an all-gather",
    "ep 2 by an all-to-all",
    "ep 2 by puts, limited",
)


def balanced(config: GPTConfig, mesh: ParallelMesh, transport: Transport, limit: RowLimit) -> GPT:
    model = built(config, torch.bfloat16, mesh)
    for number, layer in model.mixtures().items():
        layer.transport, layer.router.forced_balance = transport, True
        layer.row_limit = LayerRows(limit, number, mesh.ep.size)
    return model


def set_places(model: GPT, places: int) -> None:
    for layer in model.mixtures().values():
        layer.clones = CloneSettings(places) if places else None


def limiting(limit: RowLimit, rows: float | None) -> AbstractContextManager[None]:
    return nullcontext() if rows is None else limit.limit_rows()


def hold(
    rank: int, size: int
) -> dict[tuple[str, Recompute], tuple[int, int, dict[str, int], dict[str, int]]]:
    """Return what a rank keeps in a forward pass and always, each with its estimate (bytes)."""
    config = config_of(
        {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 64}, num_kv_heads=2
    )
    found = {}
    for name, recompute in HELD:
        sizes, sequence_parallel, transport, rows = LAYOUTS[name]
        layout = ParallelLayout(size, **sizes)
        # Memory that ranks share is that of this mesh alone.
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        limit = RowLimit(rows or 1.0, mesh)
        model = balanced(config, mesh, transport, limit)
        model.recompute = recompute
        check_parameters(model, config, layout)
        how: dict[str, Any] = {
            "tp": layout.tp,
            "sequence_parallel": sequence_parallel,
            "transport": transport,
        }
        places = PLACES.get(name, 0)
        set_places(model, places)
        how |= {"ep": layout.ep, "etp": layout.etp, "expert_rows": rows, "clone_places": places}
        expected = estimated_bytes(config, torch.bfloat16, recompute, **how)
        with limiting(limit, rows):
            kept = kept_bytes(model, config, patience=0.5)
        run = Run(
            dict(model.named_parameters()),
            mesh,
            DistributedOptimizerConfig(main_dtype=torch.float32),
            torch.optim.AdamW,
        )
        run.backward(
            {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        )
        run.finish()
        run.step()
        states = [value for state in run.optimizer.state.values() for value in state.values()]
        held = {**run.main.memory(), "optimizer": sum(value.nbytes for value in states)}
        (estimate,) = estimate_memory(
            config.memory_shape(), layout, TrainingShape(seq_length=LENGTH)
        )
        found[name, recompute] = (
            kept,
            expected,
            held,
            {part: getattr(estimate, part) for part in held},
        )
        mesh.destroy()
    return found


def train_step(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Return what a rank needs at the peak of a step beside what it holds all the time, and the
    estimate (bytes).
    """
    config = config_of(
        {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 256}, hidden_size=128
    )
    found = {}
    for name, (sizes, sequence_parallel, transport, rows) in TRAINED.items():
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        limit = RowLimit(rows or 1.0, mesh)
        model = balanced(config, mesh, transport, limit)
        training = TrainingShape(
            seq_length=LENGTH,
            microbatch_size=BATCH,
            sequence_parallel=sequence_parallel,
            expert_transport=transport,
            expert_rows=rows,
        )
        (estimate,) = estimate_memory(config.memory_shape(), layout, training)
        with limiting(limit, rows):
            found[name] = peak_bytes(model, config), estimate.peak - estimate.static
        mesh.destroy()
    return found


def test_ranks_that_share_experts_hold_and_keep_what_the_estimate_says() -> None:
    for found in run_world(hold, 2):
        assert list(found) == HELD
        for name, (kept, expected, held, estimate) in found.items():
            assert kept == pytest.approx(expected, rel=0.025), name
            assert held == pytest.approx(estimate, rel=0.02), name


def test_ranks_that_share_experts_need_what_the_estimate_says() -> None:
    for found in run_world(train_step, 2):
        assert list(found) == list(TRAINED)
        for name, (peak, estimate) in found.items():
            assert estimate == pytest.approx(peak, rel=0.08), name


def test_places_for_clones_need_memory_once_for_all_layers() -> None:
    config = CONFIGS["all layers"]
    shape = config.memory_shape()
    layout = ParallelLayout(4, ep=4)
    training = TrainingShape(seq_length=LENGTH, expert_transport="one_sided", expert_rows=1.0)
    (without,) = estimate_memory(shape, layout, training)
    (with_places,) = estimate_memory(shape, layout, replace(training, clone_places=2))
    experts = config.experts
    assert experts is not None
    weights = 3 * config.hidden_size * experts.ffn_hidden_size
    assert clone_bytes(shape, layout, replace(training, clone_places=2)) == 2 * weights * (2 + 4)
    assert with_places.peak - without.peak == 2 * weights * (2 + 4)
    (alone,) = estimate_memory(shape, ParallelLayout(1), replace(training, clone_places=2))
    assert alone == estimate_memory(shape, ParallelLayout(1), training)[0]


def test_the_estimate_and_the_layer_choose_the_same_way_for_tokens() -> None:
    kinds = {
        LocalDispatcher: "none",
        GatherDispatcher: "all_gather",
        AllToAllDispatcher: "all_to_all",
    }
    kinds[OneSidedDispatcher] = "one_sided"
    asked: tuple[Transport, ...] = ("auto", "all_gather", "all_to_all", "one_sided")
    for ep, top_k, transport in product((1, 2, 4), (1, 2, 4), asked):
        mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", tuple(range(ep))))
        for is_limited in (False, True) if ep > 1 and transport != "all_to_all" else (False,):
            limit = LayerRows(RowLimit(1.5, mesh), 0, ep) if is_limited else None
            dispatcher = choose_transport(8, top_k, mesh, transport, limit=limit).dispatcher
            found = transport_over_ep(top_k, ep, transport, is_limited=is_limited)
            assert found == kinds[type(dispatcher)]
            assert found != "all_to_all" or not is_limited
