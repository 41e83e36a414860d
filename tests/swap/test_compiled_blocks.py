"""Replaced models whose blocks are compiled one by one give the same losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal
from tests.swap import expert_models
from tests.swap.families import twin_of
from tests.world import run_world

pytest.importorskip("transformers")


def blocks_of(model: Any) -> Any:
    return model.gpt_neox.layers if hasattr(model, "gpt_neox") else model.model.layers


def compare(case: str, mesh: ParallelMesh, num_calls: int = 2, num_layers: int = 2) -> None:
    if case in expert_models.CASES:
        twins = [expert_models.exact_twin_of(case, num_hidden_layers=num_layers) for _ in range(2)]
    else:
        twins = [twin_of(case, torch.float64, num_hidden_layers=num_layers) for _ in range(2)]
    roots = [nn.ModuleDict({"model": twin}) for twin in twins]
    for root in roots:
        parallelize(root, mesh)
    torch.compiler.reset()
    for block in blocks_of(roots[1]["model"]):
        block.compile(backend="aot_eager")
    tokens = torch.randint(
        roots[0]["model"].config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for call in ({}, {"attention_mask": mask})[:num_calls]:
        label = f"{case}, {sorted(call)}, tp={mesh.tp.size}"
        losses = [root["model"](input_ids=tokens, labels=tokens, **call).loss for root in roots]
        assert_equal(losses[1], losses[0], label)
        for root, loss in zip(roots, losses, strict=True):
            root.zero_grad()
            loss.backward()
        for (name, eager_parameter), compiled_parameter in zip(
            roots[0].named_parameters(), roots[1].parameters(), strict=True
        ):
            assert_equal(compiled_parameter.grad, eager_parameter.grad, f"{label}: {name}")


@pytest.mark.parametrize("compiled_part", ["whole", "block", "wrapped"])
def test_model_compiled_before_its_replacement_is_refused(compiled_part: str):
    model = twin_of("llama")
    if compiled_part == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if compiled_part == "whole" else model.model.layers[1]).compile(backend="eager")
    with pytest.raises(
        UnsupportedError, match=r"was compiled.*Compile the new modules in on_fit_start"
    ):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


def check_ranks(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=True)
    compare("gpt_neox", mesh, num_calls=1, num_layers=1)


def test_compiled_blocks_match_eager_blocks():
    compare("mistral", ParallelMesh.single())
    compare("mixtral", ParallelMesh.single(), num_calls=1)


def test_compiled_blocks_match_eager_blocks_on_two_ranks():
    run_world(check_ranks, 2)
