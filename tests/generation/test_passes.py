"""Passes over new tokens after a cache have the logits of passes over full rows, and those that cannot be
captured or fused say why.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.generation import decoding, fused_pass
from lightning_megatron.generation.fused_pass import reason_against_fused_pass
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import TokenPass, reason_against_replay
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.cached_attention import attend_with_cache
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.norm import RMSNorm
from tests.generation.models import (
    NEXT,
    PROMPTS,
    bytes_of,
    check_passes,
    check_rows,
    full_logits,
    small_gpt,
)
from tests.kernels.models import KINDS, TINY
from tests.swap import families
from tests.sweeps import chosen
from tests.tape import TapeBackend

# The angles of phi3 depend on the longest row: see test_tokens.py.
CASES = [case for case in (*families.CASES, *families.EXPERTS) if case != "phi3"]


@pytest.mark.parametrize(
    "case",
    chosen(
        CASES, "gpt2", "mistral", "gemma2", "gemma3", "bloom", "mpt", "gpt_neox", "qwen3",
        "llama with one key head", "deepseek_v3", "gpt_oss", "mixtral",
    ),
)  # fmt: skip
def test_cached_logits_match_full_passes(case):
    gpt = small_gpt(case)
    check_rows(gpt, PROMPTS)
    if case in ("gpt2", "gemma2", "bloom"):
        check_rows(gpt, [PROMPTS[0]], multiple=4)
        check_rows(gpt, PROMPTS, multiple=2)


@torch.no_grad()
def test_several_tokens_at_once_follow_a_ring_cache():
    gpt = small_gpt("mistral")
    row = PROMPTS[0] + NEXT[0].tolist()
    expected = full_logits(gpt, PROMPTS[:1])[0]
    cache = KeyValueCache(len(row))
    num_cached = 0
    for count in (2, 6, 1, 4, 3, 1):
        tokens = torch.tensor([row[num_cached : num_cached + count]])
        positions = torch.arange(num_cached, num_cached + count)[None]
        span = AttentionSpan(positions=positions, past=CachedTokens(cache, count))
        actual = gpt.logits_at(tokens, count - 1, span)
        cache.advance(count)
        num_cached += count
        if num_cached >= len(PROMPTS[0]):
            after = expected[num_cached - len(PROMPTS[0])]
            torch.testing.assert_close(actual[0], after, rtol=0, atol=1e-10)
    assert num_cached == len(row)


@pytest.mark.parametrize("case", ["gpt2", "gemma3", "gpt_neox", "deepseek_v3"])
def test_passes_over_one_token_match_full_passes(case):
    # The heads of keys and values of deepseek_v3 have different sizes.
    gpt = small_gpt(case)
    if case != "deepseek_v3":
        assert reason_against_replay(gpt) is None
    check_passes(gpt, PROMPTS[:1])
    launcher = ParallelMesh.single().launcher
    _, token_pass = check_passes(gpt, PROMPTS, TapeBackend(launcher) if case == "gemma3" else None)
    assert token_pass.is_captured == (case == "gemma3")


def test_a_ring_cache_has_the_memory_of_its_window():
    gpt = small_gpt("gemma3")
    # Layers 0 and 2 have a window of 4 tokens, and layer 1 has none. Each has 6 key/value heads of
    # 8 elements.
    expected = 2 * 8 * 3 * 6 * 8 * (4 + 9 + NEXT.shape[1] + 4)
    assert bytes_of(check_rows(gpt, PROMPTS)) == expected
    assert bytes_of(check_passes(gpt, PROMPTS)[0]) == expected


def test_tokens_beyond_the_size_of_a_cache_are_refused():
    tokens = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ParallelPlanError, match=r"their cache of 3 tokens: they would have 4"):
        KeyValueCache(3).extend(1, tokens, tokens, None)


def test_slots_without_tokens_do_not_change_attention():
    """New memory may contain any values, even NaN."""
    torch.manual_seed(0)
    cache = KeyValueCache(7)
    query, key, value = (torch.randn(5, 2, heads, 8) for heads in (4, 2, 2))
    span = AttentionSpan(past=CachedTokens(cache, 4))
    attend_with_cache(query[:4], key[:4], value[:4], span, 1)
    cache.advance(4)
    with cache.at(torch.tensor([4])):
        for stored in cache.extend(1, key[4:], value[4:], None):
            stored[:, :, 5:] = torch.nan
        span = AttentionSpan(past=CachedTokens(cache, 1))
        actual = attend_with_cache(query[4:], key[4:], value[4:], span, 1)
    expected = attend(query, key, value, AttentionSpan())[4:]
    torch.testing.assert_close(actual, expected)


def test_models_whose_passes_need_the_host_are_not_captured():
    reasons = {"bloom": "have a slopes", "gemma2": "have a soft cap", "phi3": "longrope"}
    for case, reason in reasons.items():
        assert reason in str(reason_against_replay(small_gpt(case)))
    gpt = small_gpt("llama")
    parametrizations.weight_norm(gpt.layers["0"].mlp.down)
    assert "a parametrization computes weights" in str(reason_against_replay(gpt))
    gpt = small_gpt("llama")
    gpt.final_norm.register_forward_hook(lambda *_: None)
    assert "a hook on" in str(reason_against_replay(gpt))


class RefusingBackend(TapeBackend):
    def capture(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_is_reported_and_changes_nothing():
    with pytest.warns(SpeedWarning, match="not permitted when stream is capturing") as caught:
        _, token_pass = check_passes(small_gpt("llama"), PROMPTS, RefusingBackend())
    assert not token_pass.is_captured
    assert len([1 for warning in caught if warning.category is SpeedWarning]) == 1


class CountingSession:
    """Session of one row that counts upwards, in passes that are captured from the second on."""

    num_prompts, max_new_tokens = 1, 5

    def __init__(self) -> None:
        self.events: list[str] = []

    @property
    def is_captured(self) -> bool:
        return "pass 2" in self.events

    def logits(self, tokens: torch.Tensor | None) -> torch.Tensor:
        self.events.append(f"pass {sum('pass' in event for event in self.events) + 1}")
        return torch.zeros(1) if tokens is None else tokens

    def with_fillers(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def from_last_stage(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def test_a_replay_is_launched_before_the_last_token_is_read(monkeypatch):
    monkeypatch.setattr(decoding, "_start_read", lambda tokens: tokens.long().tolist)
    session: Any = CountingSession()
    sampler: Any = lambda logits: logits + 1  # noqa: E731
    for (token,) in decoding._chosen_tokens(session, sampler):
        session.events.append(f"got {token:.0f}")
    expected = "pass 1, got 1, pass 2, pass 3, got 2, pass 4, got 3, pass 5, got 4, got 5"
    assert ", ".join(session.events) == expected


LIMITS = SimpleNamespace(MAX_PAIRED_WIDTH=64, MAX_SUM_WIDTH=64)
LLAMA = KINDS["llama"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the fused kernels support every tensor."""
    monkeypatch.setattr(fused_pass, "fused_kernels", lambda tensor: LIMITS)


def half_model(config: GPTConfig) -> GPT:
    return GPT(config, seed=0).to(torch.bfloat16)


def test_only_models_like_llama_are_fused(kernels):
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


def test_only_one_row_without_padding_is_fused(kernels, caplog):
    gpt = half_model(LLAMA)
    padding = torch.zeros(1, dtype=torch.long)
    assert "without padding" in str(reason_against_fused_pass(gpt, 1, padding))
    rows = PromptRows.of([[1, 2], [3, 4]], torch.device("cpu"), num_rows=2, length=2)
    with caplog.at_level("INFO", "lightning_megatron.generation"):
        assert not TokenPass(gpt, KeyValueCache(8), rows.padding, 2).is_fused
    assert "not run on fused layers: it computes one row, and there are 2" in caplog.text


def test_parameters_of_other_types_are_not_fused(kernels, monkeypatch):
    assert "torch.float32" in str(reason_against_fused_pass(GPT(LLAMA, seed=0), 1, None))
    gpt = half_model(LLAMA)
    gpt.layers["0"].mlp.down.float()
    assert "torch.bfloat16, torch.float32" in str(reason_against_fused_pass(gpt, 1, None))
    monkeypatch.setattr(fused_pass, "fused_kernels", lambda tensor: None)
    assert "do not support" in str(reason_against_fused_pass(half_model(LLAMA), 1, None))


def test_changed_models_are_not_fused(kernels):
    class OwnNorm(RMSNorm):
        pass

    width, half = TINY["hidden_size"], torch.bfloat16
    for change, reason in (
        (lambda gpt: setattr(gpt.layers["1"], "mlp_norm", OwnNorm(width, gpt.mesh).to(half)), "a norm of a layer is not a plain RMSNorm"),
        (lambda gpt: setattr(gpt.layers["1"].mlp, "down", nn.Linear(48, width, bias=False, dtype=half)), "a linear layer was replaced"),
        (lambda gpt: setattr(gpt.layers["1"].attention.qkv, "low_rank", nn.Identity()), "a linear layer has a low-rank update"),
        (lambda gpt: setattr(gpt, "hidden_states", []), "the call collects hidden states"),
    ):  # fmt: skip
        gpt = half_model(LLAMA)
        change(gpt)
        assert reason in str(reason_against_fused_pass(gpt, 1, None))
