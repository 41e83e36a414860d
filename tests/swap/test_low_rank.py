"""Adapters of peft on Hugging Face models: their own logits, losses and gradients, in every layout."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.adapter import ReplacedModel
from lightning_megatron.swap.low_rank import low_rank_maps
from lightning_megatron.swap.mapping import TensorsInMemory
from tests.oracles import assert_equal, gather_full
from tests.swap.encoders import CASES as ENCODERS
from tests.swap.families import CASES as DECODERS
from tests.swap.test_encoders import exact as exact_encoder
from tests.swap.test_encoders import inputs as encoder_inputs
from tests.swap.test_encoders import labelled, loss_of
from tests.swap.test_language_models import exact_twin, expected_of, inputs
from tests.world import run_world

peft = pytest.importorskip("peft")

LLAMA = "llama with one key head"


def adapted(model: nn.Module, **settings: Any) -> Any:
    """Return a model with an adapter of random numbers."""
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings})
    with warnings.catch_warnings():
        # Of Conv1D, which stores its weight input first.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def swapped(wrapped: nn.Module, mesh: ParallelMesh) -> Any:
    root = nn.ModuleDict({"model": wrapped})
    parallelize(root, mesh)
    assert root["model"] is wrapped
    assert isinstance(wrapped.get_base_model(), ReplacedModel)
    return wrapped


def check_gradients(wrapped: Any, twin: Any, mesh: ParallelMesh, what: str) -> None:
    """Compare the gradient of every factor with that of peft; what is frozen has none."""
    model: ReplacedModel = wrapped.get_base_model()
    theirs = {name.partition(".model.")[2]: one.grad for name, one in twin.named_parameters() if one.requires_grad}
    theirs = {name.replace(".default.", "."): gradient for name, gradient in theirs.items()}
    ranks = {name.removesuffix(".lora_A.weight"): len(one) for name, one in theirs.items() if "lora_A" in name}
    expected = {}
    for place in low_rank_maps(model.family.tensors(model.body.config), ranks):
        for factor in (place.a, place.b):
            full = torch.empty(factor.shape, dtype=torch.float64)
            factor.fill(full, [0, 0], factor.shape, TensorsInMemory(theirs))
            expected[factor.target] = full
    assert len(expected) == len(theirs)
    trained = {name: one for name, one in model.body.named_parameters() if one.requires_grad}
    assert trained.keys() == expected.keys()
    for name, parameter in trained.items():
        spec = shard_spec_of(parameter, mesh.tp.rank)
        assert parameter.grad is not None, name
        found = gather_full(parameter.grad, spec, mesh, sum_copies=spec.partial)
        assert_equal(found, expected[name], f"{what}: gradient of {name}", 1e-9)


def compare_decoders(case: str, mesh: ParallelMesh, **settings: Any) -> None:
    twin, wrapped = adapted(exact_twin(case), **settings), swapped(adapted(exact_twin(case), **settings), mesh)
    what = f"{case}, {settings}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    for kind, recompute in (("padded left", "none"), ("odd", "full")):
        call = inputs()[kind]
        logits, loss, _ = expected_of(twin, call)
        wrapped.get_base_model().gpt.recompute = recompute
        wrapped.zero_grad()
        output = wrapped(**call)
        seen = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        assert_equal(output.logits[seen], logits[seen], f"{what}: logits", 1e-9)
        assert_equal(output.loss, loss, f"{what}: loss", 1e-9)
        output.loss.backward()
        check_gradients(wrapped, twin, mesh, what)
    with wrapped.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        assert_equal(wrapped(**call).logits, twin(**call).logits, f"{what}: without adapter", 1e-9)
    assert_equal(wrapped(**call).logits, logits, f"{what}: with it again", 1e-9)


def compare_encoders(case: str, mesh: ParallelMesh) -> None:
    # Their classifiers are wrapped otherwise if peft knows the task.
    twin, wrapped = adapted(exact_encoder(case)), swapped(adapted(exact_encoder(case)), mesh)
    call = labelled(case, encoder_inputs(twin.get_base_model())["padded right"])
    what = f"{case}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
    expected, output = twin(**call), wrapped(**call)
    expected.loss = expected.get("loss")
    assert_equal(loss_of(output), loss_of(expected), f"{what}: loss", 1e-9)
    loss_of(expected).backward()
    loss_of(output).backward()
    check_gradients(wrapped, twin, mesh, what)


def test_one_process_computes_what_peft_does() -> None:
    for case in DECODERS:
        compare_decoders(case, ParallelMesh.single())
    for case in ENCODERS:
        compare_encoders(case, ParallelMesh.single())
    some = {"target_modules": ["v_proj", "q_proj", "up_proj"], "use_rslora": True, "layers_to_transform": [1, 2]}
    some |= {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"q_proj": 7}, "task_type": "CAUSAL_LM"}
    compare_decoders("llama", ParallelMesh.single(), **some)


def check_ranks(rank: int, size: int) -> None:
    for tp in (2, 4):
        for sequence_parallel in (False, True):
            mesh = ParallelMesh.create(ParallelLayout(size, tp=tp), sequence_parallel=sequence_parallel)
            for case in (LLAMA, "gpt2", "gpt_neox", "phi3") if tp == 2 else (LLAMA,):
                compare_decoders(case, mesh)
            if tp == 2:
                compare_decoders("llama", mesh, target_modules=["v_proj", "gate_proj"])
                for case in ("bert masked", "roberta classes"):
                    compare_encoders(case, mesh)
            mesh.destroy()


def test_ranks_compute_what_peft_does() -> None:
    run_world(check_ranks, 4)
