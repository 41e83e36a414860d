"""Models whose passes over one token cannot run on the fused kernels are named with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.generation import fused_pass
from lightning_megatron.generation.fused_pass import reason_against_fused_pass
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import TokenPass
from lightning_megatron.layers.key_value_cache import KeyValueCache
from lightning_megatron.layers.norm import RMSNorm
from tests.kernels.models import KINDS, TINY

LIMITS = SimpleNamespace(MAX_PAIRED_WIDTH=64, MAX_SUM_WIDTH=64)
LLAMA = KINDS["llama"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the fused kernels support every tensor."""
    monkeypatch.setattr(fused_pass, "fused_kernels", lambda tensor: LIMITS)


def half_model(config: GPTConfig) -> GPT:
    return GPT(config, seed=0).to(torch.bfloat16)


def test_only_models_like_llama_are_fused():
    for kind in ("llama", "window", "qwen"):
        assert reason_against_fused_pass(half_model(KINDS[kind]), 1, None) is None
    for config, reason in (
        (KINDS["gpt2"], "the last norm is not a plain RMSNorm"),
        (KINDS["gemma"], "the last norm is not a plain RMSNorm"),
        (KINDS["glm"], "the outputs of a layer are scaled or normalised"),
        (dataclasses.replace(LLAMA, activation="geglu"), "the MLP of a layer is not one with"),
        (dataclasses.replace(LLAMA, position="learned"), "not all layers have a rotary embedding"),
        (dataclasses.replace(LLAMA, parallel_residual=True), "a layer is not a sequence of norm"),
        (dataclasses.replace(LLAMA, residual_scale=0.5), "the outputs of a layer are scaled"),
        (dataclasses.replace(LLAMA, mlp_bias=True), "a linear layer other than that of queries"),
        (dataclasses.replace(LLAMA, ffn_hidden_size=72), "vectors have 72 elements"),
    ):
        assert reason in str(reason_against_fused_pass(half_model(config), 1, None))


def test_only_one_row_without_padding_is_fused():
    gpt = half_model(LLAMA)
    assert "one row, and there are 2" in str(reason_against_fused_pass(gpt, 2, None))
    padding = torch.zeros(1, dtype=torch.long)
    assert "without padding" in str(reason_against_fused_pass(gpt, 1, padding))


def test_parameters_of_other_types_are_not_fused(monkeypatch):
    assert "torch.float32" in str(reason_against_fused_pass(GPT(LLAMA, seed=0), 1, None))
    gpt = half_model(LLAMA)
    gpt.layers["0"].mlp.down.float()
    assert "torch.bfloat16, torch.float32" in str(reason_against_fused_pass(gpt, 1, None))
    monkeypatch.setattr(fused_pass, "fused_kernels", lambda tensor: None)
    assert "do not support" in str(reason_against_fused_pass(half_model(LLAMA), 1, None))


class Replaced(RMSNorm):
    """Norm of a user."""


def test_changed_models_are_not_fused():
    width, half = TINY["hidden_size"], torch.bfloat16
    linear = nn.Linear(48, width, bias=False, dtype=half)
    changes: list[tuple[Callable[[GPT], None], str]] = [
        (
            lambda gpt: setattr(gpt.layers["1"], "mlp_norm", Replaced(width, gpt.mesh).to(half)),
            "a norm of a layer is not a plain RMSNorm",
        ),
        (lambda gpt: setattr(gpt.layers["1"].mlp, "down", linear), "a linear layer was replaced"),
        (
            lambda gpt: setattr(gpt.layers["1"].attention.qkv, "low_rank", nn.Identity()),
            "a linear layer has a low-rank update",
        ),
        (lambda gpt: setattr(gpt, "hidden_states", []), "the call collects hidden states"),
    ]
    for change, reason in changes:
        gpt = half_model(LLAMA)
        change(gpt)
        assert reason in str(reason_against_fused_pass(gpt, 1, None))


def test_a_pass_that_is_not_fused_logs_the_reason(caplog):
    rows = PromptRows.of([[1, 2], [3, 4]], torch.device("cpu"), num_rows=2, length=2)
    with caplog.at_level("INFO", "lightning_megatron.generation"):
        token_pass = TokenPass(half_model(LLAMA), KeyValueCache(8), rows.padding, 2)
    assert not token_pass.is_fused
    assert "not run on fused layers: it computes one row, and there are 2" in caplog.text
