"""Estimated memory of models with experts equals their measured memory."""

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
from tests.models.test_kept_activations import build_model
from tests.sweeps import chosen
from tests.training.runs import Run
from tests.world import run_world

BATCH, LENGTH = 2, 64


def make_config(experts: dict[str, Any], **settings: Any) -> GPTConfig:
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
    # LayerNorm, because torch computes RMSNorm on CPUs by smaller operations, which keep more.
    model_settings = {"ffn_hidden_size": 96, "norm": "layernorm", "experts": mixture}
    return GPTConfig.llama(**{**sizes, **model_settings, **settings})


CONFIGS = {
    "every second layer": make_config({}),
    "all layers": make_config({"layers": 1, "top_k": 3, "aux_loss": 0.01, "z_loss": 0.001}),
    "the first layer": make_config({"layers": (True, False, False), "normalize_top_k": False}),
    "sigmoid": make_config(
        {"scoring": "sigmoid", "aux_loss": 0.01, "num_experts": 64, "expert_bias": True}
    ),
    "many scores": make_config({"num_experts": 128, "z_loss": 0.001}),
    "jitter and capacity": make_config({"jitter": 0.1, "capacity_factor": 8.0}),
    "shared": make_config({"shared_ffn_hidden_size": 80, "jitter": 0.1}),
    "shared with a gate": make_config({"shared_ffn_hidden_size": 80, "shared_gate": True}),
    "relu": make_config({}, activation="relu"),
    "gelu": make_config({}, activation="gelu"),
    "biases": make_config({"linear_bias": True, "router_bias": True}, activation="clamped_swiglu"),
}


#: Cases of a forward pass: model, dtype and recomputation; cases of a step have a width of experts.
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


def draw_tokens(config: GPTConfig, batch: int = BATCH) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, LENGTH))


def track_memory(model: GPT) -> LiveMemory:
    """Give parameters gradient slots, and track all memory except parameters and gradients."""
    memory = LiveMemory()
    memory.leave_out(list(model.buffers()))
    for parameter in model.parameters():
        slot = GradientSlot(torch.zeros_like(parameter), lambda: None)
        set_slot(parameter, slot)
        memory.leave_out([parameter, slot.gradient])
    return memory


def measured_kept_bytes(model: GPT, config: GPTConfig, patience: float = 0.0) -> int:
    memory, tokens = track_memory(model), draw_tokens(config)
    with memory:
        loss = model(tokens, labels=tokens)
    # A thread of the communication library frees sent tensors a moment later.
    deadline, smallest = time.monotonic() + patience, memory.now
    while time.monotonic() < deadline:
        time.sleep(0.01)
        smallest = min(smallest, memory.now)
    return smallest - loss.nbytes


def estimated_kept_bytes(
    config: GPTConfig, dtype: torch.dtype, recompute: Recompute = "none", **options: Any
) -> int:
    shape = config.memory_shape()
    table = eager_activations(shape, dtype.itemsize)
    batch = MicrobatchShape(num_tokens=LENGTH * BATCH, activation_bytes=dtype.itemsize, **options)
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
def test_memory_kept_by_a_forward_pass_equals_the_estimate(
    kind: str, dtype: torch.dtype, recompute: Recompute
) -> None:
    config = CONFIGS[kind]
    model = build_model(config, dtype)
    model.recompute = recompute
    expected = estimated_kept_bytes(config, dtype, recompute)
    assert measured_kept_bytes(model, config) == pytest.approx(expected, rel=0.015)
    check_parameters(model, config, ParallelLayout(1))


def check_parameters(model: GPT, config: GPTConfig, layout: ParallelLayout) -> None:
    shape, num_mixtures = config.memory_shape(), sum(map(config.has_experts_in, range(3)))
    num_parameters = {True: 0, False: 0}
    for parameter in model.parameters():
        num_parameters[shard_spec_of(parameter).is_expert] += parameter.numel()
    assert num_parameters[True] == num_mixtures * shape.expert_parameters(layout)
    assert num_parameters[False] == shape.stage_parameters(layout, 0, 3, num_mixtures)


@pytest.mark.parametrize(
    ("model_case", "expert_width", "recompute"),
    chosen(STEPS, *(STEPS[8 * number + 5 * number % 8] for number in range(5))),
)
def test_the_peak_memory_of_a_step_equals_the_estimate(
    model_case: tuple[str, torch.dtype], expert_width: int, recompute: Recompute
) -> None:
    kind, dtype = model_case
    config = replace(
        CONFIGS[kind],
        hidden_size=128,
        experts=replace(CONFIGS[kind].experts, ffn_hidden_size=expert_width),
    )
    model = build_model(config, dtype)
    model.recompute = recompute
    training = TrainingShape(
        seq_length=LENGTH, microbatch_size=4, recompute=recompute, activation_bytes=dtype.itemsize
    )
    (estimate,) = estimate_memory(config.memory_shape(), ParallelLayout(1), training)
    assert estimate.peak - estimate.static == pytest.approx(
        measured_peak_bytes(model, config, 4), rel=0.06
    )


def measured_peak_bytes(model: GPT, config: GPTConfig, batch: int = BATCH) -> int:
    memory, tokens = track_memory(model), draw_tokens(config, batch)
    with memory:
        model(tokens, labels=tokens).mean().backward()
    return memory.peak


# Two ranks.

#: Places of a rank in layouts with clones of experts.
CLONE_PLACES = {"ep 2 by puts, limited, with clones": 2, "ep 2 by puts, with clones": 2}
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


#: Settings of recomputation, and pairs of layout and recomputation whose memory is compared.
RECOMPUTE_SETTINGS: tuple[Recompute, ...] = ("none", "expert_inputs")
MEASURED_CASES = chosen(
    list(product(LAYOUTS, RECOMPUTE_SETTINGS)),
    ("etp 2", "none"),
    ("ep 2 inside tp 2", "expert_inputs"),
    ("ep 2 by an all-gather, limited", "none"),
    ("ep 2 by an all-to-all", "expert_inputs"),
    ("ep 2 by puts, limited, with clones", "none"),
    ("ep 2 by puts, with clones", "expert_inputs"),
)
#: Layouts of training. Between CPUs, collectives send clones, which need other buffers than puts.
TRAINED_LAYOUTS = chosen(
    {name: layout for name, layout in LAYOUTS.items() if name not in CLONE_PLACES},
    "etp 2 without sequence parallelism",
    "ep 2 inside tp 2 by puts",
    "ep 2 by an all-gather",
    "ep 2 by an all-to-all",
    "ep 2 by puts, limited",
)


def build_balanced_model(
    config: GPTConfig, mesh: ParallelMesh, transport: Transport, limit: RowLimit
) -> GPT:
    model = build_model(config, torch.bfloat16, mesh)
    for number, layer in model.mixtures().items():
        layer.transport, layer.router.forced_balance = transport, True
        layer.row_limit = LayerRows(limit, number, mesh.ep.size)
    return model


def set_places(model: GPT, places: int) -> None:
    for layer in model.mixtures().values():
        layer.clones = CloneSettings(places) if places else None


def limit_rows(limit: RowLimit, rows: float | None) -> AbstractContextManager[None]:
    return nullcontext() if rows is None else limit.limit_rows()


def measure_memory(
    rank: int, size: int
) -> dict[tuple[str, Recompute], tuple[int, int, dict[str, int], dict[str, int]]]:
    """Return memory that a forward pass keeps and memory that a rank always holds, with estimates."""
    config = make_config(
        {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 64}, num_kv_heads=2
    )
    results = {}
    for name, recompute in MEASURED_CASES:
        sizes, sequence_parallel, transport, rows = LAYOUTS[name]
        layout = ParallelLayout(size, **sizes)
        # Each mesh has its own shared memory.
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        limit = RowLimit(rows or 1.0, mesh)
        model = build_balanced_model(config, mesh, transport, limit)
        model.recompute = recompute
        check_parameters(model, config, layout)
        options: dict[str, Any] = {
            "tp": layout.tp,
            "sequence_parallel": sequence_parallel,
            "transport": transport,
        }
        places = CLONE_PLACES.get(name, 0)
        set_places(model, places)
        options |= {"ep": layout.ep, "etp": layout.etp, "expert_rows": rows, "clone_places": places}
        expected = estimated_kept_bytes(config, torch.bfloat16, recompute, **options)
        with limit_rows(limit, rows):
            kept_bytes = measured_kept_bytes(model, config, patience=0.5)
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
        permanent_bytes = {**run.main.memory(), "optimizer": sum(value.nbytes for value in states)}
        (estimate,) = estimate_memory(
            config.memory_shape(), layout, TrainingShape(seq_length=LENGTH)
        )
        results[name, recompute] = (
            kept_bytes,
            expected,
            permanent_bytes,
            {part: getattr(estimate, part) for part in permanent_bytes},
        )
        mesh.destroy()
    return results


def train_step(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the memory of a rank at the peak of a step beyond its permanent memory, and the estimate
    (bytes).
    """
    config = make_config(
        {"layers": 1, "shared_ffn_hidden_size": 64, "ffn_hidden_size": 256}, hidden_size=128
    )
    peaks = {}
    for name, (sizes, sequence_parallel, transport, rows) in TRAINED_LAYOUTS.items():
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
        limit = RowLimit(rows or 1.0, mesh)
        model = build_balanced_model(config, mesh, transport, limit)
        training = TrainingShape(
            seq_length=LENGTH,
            microbatch_size=BATCH,
            sequence_parallel=sequence_parallel,
            expert_transport=transport,
            expert_rows=rows,
        )
        (estimate,) = estimate_memory(config.memory_shape(), layout, training)
        with limit_rows(limit, rows):
            peaks[name] = measured_peak_bytes(model, config), estimate.peak - estimate.static
        mesh.destroy()
    return peaks


def test_kept_and_permanent_memory_of_expert_parallel_ranks_equals_the_estimate() -> None:
    for results in run_world(measure_memory, 2):
        assert list(results) == MEASURED_CASES
        for name, (kept_bytes, expected, permanent_bytes, estimate) in results.items():
            assert kept_bytes == pytest.approx(expected, rel=0.025), name
            assert permanent_bytes == pytest.approx(estimate, rel=0.02), name


def test_the_peak_memory_of_expert_parallel_ranks_equals_the_estimate() -> None:
    for peaks in run_world(train_step, 2):
        assert list(peaks) == list(TRAINED_LAYOUTS)
        for name, (peak, estimate) in peaks.items():
            assert estimate == pytest.approx(peak, rel=0.08), name


def test_all_layers_share_the_memory_of_places_for_clones() -> None:
    config = CONFIGS["all layers"]
    shape = config.memory_shape()
    layout = ParallelLayout(4, ep=4)
    training = TrainingShape(seq_length=LENGTH, expert_transport="one_sided", expert_rows=1.0)
    (without_places,) = estimate_memory(shape, layout, training)
    (with_places,) = estimate_memory(shape, layout, replace(training, clone_places=2))
    experts = config.experts
    assert experts is not None
    weights = 3 * config.hidden_size * experts.ffn_hidden_size
    assert clone_bytes(shape, layout, replace(training, clone_places=2)) == 2 * weights * (2 + 4)
    assert with_places.peak - without_places.peak == 2 * weights * (2 + 4)
    (single_rank,) = estimate_memory(shape, ParallelLayout(1), replace(training, clone_places=2))
    assert single_rank == estimate_memory(shape, ParallelLayout(1), training)[0]


def test_the_estimate_and_the_layer_choose_the_same_transport() -> None:
    transport_of_dispatcher = {
        LocalDispatcher: "none",
        GatherDispatcher: "all_gather",
        AllToAllDispatcher: "all_to_all",
    }
    transport_of_dispatcher[OneSidedDispatcher] = "one_sided"
    transports: tuple[Transport, ...] = ("auto", "all_gather", "all_to_all", "one_sided")
    for ep, top_k, transport in product((1, 2, 4), (1, 2, 4), transports):
        mesh = replace(ParallelMesh.single(), ep=MeshAxis("ep", tuple(range(ep))))
        for is_limited in (False, True) if ep > 1 and transport != "all_to_all" else (False,):
            limit = LayerRows(RowLimit(1.5, mesh), 0, ep) if is_limited else None
            dispatcher = choose_transport(8, top_k, mesh, transport, limit=limit).dispatcher
            chosen_transport = transport_over_ep(top_k, ep, transport, is_limited=is_limited)
            assert chosen_transport == transport_of_dispatcher[type(dispatcher)]
            assert chosen_transport != "all_to_all" or not is_limited
