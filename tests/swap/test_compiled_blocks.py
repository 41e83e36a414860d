"""Replaced models whose blocks are compiled one by one give the same losses and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal
from tests.swap.families import exact_twin, twin_of

pytest.importorskip("transformers")


def compare(case: str, num_calls: int) -> None:
    twins = [exact_twin(case, num_hidden_layers=2) for _ in range(2)]
    roots = [nn.ModuleDict({"model": twin}) for twin in twins]
    for root in roots:
        parallelize(root, ParallelMesh.single())
    torch.compiler.reset()
    for block in roots[1]["model"].model.layers:
        block.compile(backend="aot_eager")
    tokens = torch.randint(
        roots[0]["model"].config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for call in ({}, {"attention_mask": mask})[:num_calls]:
        label = f"{case}, {sorted(call)}"
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
def test_model_compiled_before_its_replacement_is_refused(compiled_part):
    model = twin_of("llama")
    if compiled_part == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if compiled_part == "whole" else model.model.layers[1]).compile(backend="eager")
    with pytest.raises(
        UnsupportedError, match=r"was compiled.*Compile the new modules in on_fit_start"
    ):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


def test_compiled_blocks_match_eager_blocks():
    compare("mistral", 2)
    compare("mixtral", 1)
