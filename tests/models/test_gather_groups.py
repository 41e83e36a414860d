"""Modules that wait for their parameters are called before the parameters are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import GPT
from lightning_megatron.models.stage import PipelinedModule
from tests.proof.training import KINDS, SEQUENCE, VOCABULARY

CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "losses": lambda model, tokens: model(tokens, tokens),
    "sum": lambda model, tokens: model(tokens, tokens, sums=True),
    "logits": lambda model, tokens: model(tokens),
    "logits at a place": lambda model, tokens: model.logits_at(tokens, 3),
}


def arrive_late(model: PipelinedModule) -> None:
    """Give parameters their values when the module is called that waits for them, as gathers do."""
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    names = {id(one): name for name, one in model.named_parameters()}
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(torch.nan)

    def hook(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for one in module.parameters():
                one.copy_(values[names[id(one)]])

    for group in model.gather_groups():
        group.register_forward_pre_hook(hook)


@pytest.mark.parametrize("chunk", [None, 5, "forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_is_read_before_its_module_is_called(kind: str, chunk: Any) -> None:
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    for name, call in CALLS.items():
        model = GPT(KINDS[kind], seed=1).eval()
        model.loss_chunk = chunk
        expected = call(model, tokens).detach()
        arrive_late(model)
        assert torch.equal(call(model, tokens), expected), name
