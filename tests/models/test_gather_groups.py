"""Modules that gather parameters before their call run before anything reads the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import GPT
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.stage import PipelinedModule
from tests.fits import GPT2, LLAMA_SIZES, MIXTURE, SEQUENCE, SIZES, VOCABULARY

LATENT = {"key_value_rank": 12, "query_rank": 20, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}
KINDS = {
    "gpt2": GPT2,
    "untied": GPTConfig.gpt2(**SIZES, tie_embeddings=False, norm_position="post"),
    "llama": GPTConfig.llama(**LLAMA_SIZES, tie_embeddings=True, attention_sinks=True),
    "latent": GPTConfig.llama(**SIZES, ffn_hidden_size=48, latent_attention=LATENT),
    "mixture": MIXTURE,
}
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "losses": lambda model, tokens: model(tokens, tokens),
    "sum": lambda model, tokens: model(tokens, tokens, sums=True),
    "logits": lambda model, tokens: model(tokens),
    "logits at a place": lambda model, tokens: model.logits_at(tokens, 3),
}


def delay_parameters(model: PipelinedModule) -> None:
    """Fill parameters with NaN until their module is called, as gathers do."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)

    def hook(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(values[names[id(parameter)]])

    for group in model.gather_groups():
        group.register_forward_pre_hook(hook)


@pytest.mark.parametrize("chunk", [None, 5, "forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_is_read_before_its_module_is_called(kind, chunk):
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    for name, call in CALLS.items():
        model = GPT(KINDS[kind], seed=1).eval()
        model.loss_chunk = chunk
        expected = call(model, tokens).detach()
        delay_parameters(model)
        assert torch.equal(call(model, tokens), expected), name
