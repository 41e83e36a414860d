"""Passes over one token at a position on the device have the logits of passes over full rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from lightning_megatron import GPT, GenerationSettings, GPTConfig, generate
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import (
    TokenPass,
    reason_against_capture,
    reason_against_replay,
)
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.cached_attention import attend_with_cache
from lightning_megatron.layers.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.plan.layout import ParallelLayout
from tests.generation.test_cached_logits import NEXT, PROMPTS, gather_logits, ours
from tests.swap import expert_models, families
from tests.swap.test_language_models import exact_twin
from tests.world import run_world


@torch.no_grad()
def check_passes(
    gpt: GPT, prompts: list[list[int]], backend: CaptureBackend | None = None
) -> tuple[KeyValueCache, TokenPass]:
    """Compare the logits after each new token with the logits of a pass over the full row."""
    length = max(map(len, prompts))
    cache = KeyValueCache(length + NEXT.shape[1])
    rows = PromptRows.of(prompts, torch.device("cpu"), num_rows=len(prompts), length=length)
    gpt.logits_at(*_at(length - 1, *rows.prefill_inputs(cache)))
    cache.advance(length)
    token_pass = TokenPass(gpt, cache, rows.padding, len(prompts), backend)
    extended = [list(prompt) for prompt in prompts]
    for number in range(NEXT.shape[1]):
        tokens = NEXT[: len(extended), number]
        for row, token in zip(extended, tokens.tolist(), strict=True):
            row.append(token)
        actual = token_pass(tokens)
        cache.advance(1)
        for logits, row in zip(actual, extended, strict=True):
            torch.testing.assert_close(logits, gather_logits(gpt, row), rtol=0, atol=1e-10)
    return cache, token_pass


def _at(place: int, tokens: Tensor, span: AttentionSpan) -> tuple[Tensor, int, AttentionSpan]:
    return tokens, place, span


SUPPORTED = ("gpt2", "llama", "mistral", "gemma3", "qwen3", "phi", "gpt_neox", "cohere")


@pytest.mark.parametrize("case", [case for case in SUPPORTED if case in families.CASES])
def test_token_passes_of_a_family_match_full_passes(case: str) -> None:
    gpt = ours(exact_twin(case))
    assert reason_against_replay(gpt) is None
    check_passes(gpt, PROMPTS)
    check_passes(gpt, PROMPTS[:1])


def test_token_passes_with_latent_attention_match_full_passes() -> None:
    """The heads of keys and values have different sizes."""
    gpt = ours(expert_models.twin_of("deepseek_v3").double())
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.mul_(0.3)
    check_passes(gpt, PROMPTS)


def test_a_ring_cache_has_the_memory_of_its_window() -> None:
    cache, _ = check_passes(ours(exact_twin("gemma3")), PROMPTS)
    # Layers 0 and 2 have a window of 4 tokens, and layer 1 has none. Each has 6 key/value heads of
    # 8 elements.
    assert cache.num_bytes == 2 * 8 * 3 * 6 * 8 * (4 + 23 + 4)


def test_slots_without_tokens_do_not_change_attention() -> None:
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


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("bloom", "have a slopes"),
        ("gemma2", "have a soft cap"),
        ("phi3", "longrope"),
    ],
)
def test_models_whose_passes_need_the_host_are_not_captured(case: str, reason: str) -> None:
    assert reason in str(reason_against_replay(ours(exact_twin(case))))


class Doubled(torch.nn.Module):
    """Parametrization that doubles a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_models_with_computed_weights_are_not_captured() -> None:
    gpt = ours(exact_twin("llama"))
    parametrize.register_parametrization(gpt.layers["0"].mlp.down, "weight", Doubled())
    assert "a parametrization computes weights" in str(reason_against_replay(gpt))


def check_captured_passes(rank: int, size: int) -> list[bool]:
    """Replay the passes of models that tensor-parallel ranks share."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size))
    captured: list[bool] = []
    for case in ("gpt2", "llama", "gemma3"):
        gpt = ours(exact_twin(case), mesh)
        assert reason_against_replay(gpt) is None
        _, token_pass = check_passes(gpt, PROMPTS, TapeBackend(mesh.launcher))
        captured.append(token_pass.is_captured)
    mesh.destroy()
    return captured


@pytest.mark.parametrize("size", [1, 2])
def test_replayed_passes_have_the_logits_of_full_rows(size: int) -> None:
    assert run_world(check_captured_passes, size) == [[True] * 3] * size


def check_reasons(rank: int, size: int) -> list[str | None]:
    reasons: list[str | None] = []
    for layout, options in (
        (ParallelLayout(size, tp=size), {"sequence_parallel": True}),
        (ParallelLayout(size, cp=size), {}),
    ):
        mesh = ParallelMesh.create(layout, **options)
        reasons.append(reason_against_replay(ours(exact_twin("llama"), mesh)))
        mesh.destroy()
    return reasons


def test_ranks_that_share_positions_do_not_capture() -> None:
    for reasons in run_world(check_reasons, 2):
        assert "sequence parallelism pads" in str(reasons[0])
        assert "between ranks (cp=2)" in str(reasons[1])


class RefusingBackend(TapeBackend):
    """Backend whose captures fail."""

    def capture(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_is_reported_and_changes_nothing() -> None:
    with pytest.warns(SpeedWarning, match="not permitted when stream is capturing") as caught:
        _, token_pass = check_passes(ours(exact_twin("llama")), PROMPTS, RefusingBackend())
    assert not token_pass.is_captured
    assert len([1 for warning in caught if warning.category is SpeedWarning]) == 1


def test_passes_of_a_model_on_the_cpu_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
    gpt = GPT(GPTConfig.llama(vocab_size=257, max_seq_length=64, **sizes), seed=0)
    assert "need a GPU" in str(reason_against_capture(gpt, 64))
    with caplog.at_level("INFO", "lightning_megatron.generation"):
        generate(gpt, [[1, 2]], GenerationSettings(20))
        assert "not captured as a CUDA graph: CUDA graphs need a GPU" in caplog.text
        caplog.clear()
        generate(gpt, [[1, 2]], GenerationSettings(20, cuda_graph=False))
        assert not caplog.records
    gpt.final_norm.register_forward_hook(lambda *_: None)
    assert "a hook on" in str(reason_against_replay(gpt))
