"""Hugging Face models without a table are cut by their own tensor-parallel plan, and keep their
results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_megatron import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import SwapRecord, parallelize
from lightning_megatron.swap.decide.model_plan import supported_plan
from tests.oracles import assert_equal, full_gradients
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

V = 61
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "attn_implementation": "sdpa",
    # No family computes this activation, so the model keeps its own code.
    "hidden_act": "tanh",
}
# The norms of heads of the last model are complete on every rank, and their gradients are parts of
# a sum.
MODELS = (
    "Starcoder2ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "CohereForCausalLM",
    "Exaone4ForCausalLM",
)


def model_of(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**SIZES, **changes})).double().eval()


def compare_with_twin(name: str, mesh: ParallelMesh) -> list[SwapRecord]:
    twin, root = model_of(name), nn.ModuleDict({"model": model_of(name)})
    records = parallelize(root, mesh)
    tokens = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = []
    for model in (twin, root["model"]):
        logits.append(model(input_ids=tokens).logits)
        F.cross_entropy(logits[-1][:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    # Norms of some models round to float32.
    assert_equal(logits[1], logits[0], f"{name}: logits", 1e-6)
    gradients = full_gradients(root["model"], mesh)
    for key, parameter in twin.named_parameters():
        assert parameter.grad is not None
        assert_equal(gradients[key], parameter.grad, f"{name}: gradient of {key}", 1e-6)
    return records


def check_all(rank: int, size: int) -> dict[str, list[SwapRecord]]:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    return {name: compare_with_twin(name, mesh) for name in MODELS}


def test_models_cut_by_their_own_plan_match_hugging_face_on_two_ranks() -> None:
    for records in run_world(check_all, 2):
        for name in MODELS:
            summary = records[name][-1]
            assert (summary.name, summary.kind, summary.source) == ("model", "its own plan", name)
            assert summary.local_elements < 0.6 * summary.full_elements
            assert "norm" in str(summary)
            assert {record.kind for record in records[name]} >= {"column", "vocab", "its own plan"}


def test_heads_that_do_not_divide_are_refused() -> None:
    root = nn.ModuleDict(
        {"model": model_of("GraniteForCausalLM", num_attention_heads=8, num_key_value_heads=2)}
    )
    with pytest.raises(
        ParallelPlanError,
        match=r"num_key_value_heads \(2\) of 'model' must be a multiple of tp \(4\)",
    ):
        parallelize(root, mesh_of(tp=4))


def test_plan_entries_that_are_not_understood_leave_their_module_uncut() -> None:
    model: Any = model_of("GraniteForCausalLM")
    assert supported_plan(model, 2).kinds["model.layers.0.mlp.gate_proj"] == "column"
    known = model.tp_plan
    # Layers of one module are cut together or not at all.
    for changes in (
        {"model.layers.*.mlp.up_proj": "packed_colwise"},
        {"model.layers.*.mlp.down_proj": "all_reduce"},
    ):
        model.tp_plan = {**known, **changes}
        plan = supported_plan(model, 2)
        assert not any(".mlp." in name for name in plan.kinds)
        assert plan.kinds["model.layers.1.self_attn.q_proj"] == "column"
        assert f"{next(iter(changes))!r} is {next(iter(changes.values()))!r}" in str(plan)
    for changes in (
        {"model.layers.*.input_layernorm": "colwise"},
        {"model.norm.weight": "replicate"},
    ):
        model.tp_plan = {**known, **changes}
        assert not any("norm" in name for name in supported_plan(model, 2).kinds)
        assert next(iter(changes)) in str(supported_plan(model, 2))
    model.tp_plan = dict.fromkeys(known, "packed_colwise")
    assert supported_plan(model, 2).kinds == {}
    root = nn.ModuleDict({"model": model})
    *_, record = parallelize(root, mesh_of(tp=2))
    assert root["model"] is model
    assert record.local_elements == record.full_elements
    assert "no known plan" in str(record)
    assert "Whole on every rank: " in str(record)
    assert "model.layers.*.mlp.up_proj" in str(record)
