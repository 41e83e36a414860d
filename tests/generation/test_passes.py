"""Passes over new tokens after a cache have the logits of passes over full rows, and those that
cannot be captured say why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from lightning_megatron import GPT, GenerationSettings, GPTConfig, generate
from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.generation.token_pass import reason_against_capture, reason_against_replay
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.cached_attention import attend_with_cache
from lightning_megatron.layers.key_value_cache import CachedTokens, KeyValueCache
from tests.generation.models import NEXT, PROMPTS, check_passes, check_rows, full_logits, small_gpt
from tests.swap import families
from tests.sweeps import chosen

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


def test_tokens_beyond_the_size_of_the_cache_are_refused():
    tokens = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ParallelPlanError, match=r"their cache of 3 tokens: they would have 4"):
        KeyValueCache(3).extend(1, tokens, tokens, None)


def test_rows_of_a_cache_are_reordered():
    cache = KeyValueCache(2)
    keys = torch.arange(3.0).view(1, 3, 1, 1)
    cache.extend(1, keys, -keys, None)
    cache.advance(1)
    cache.reorder(torch.tensor([2, 2, 0]))
    stored = cache.extend(1, keys, keys, None)
    assert stored[0][:, 0, 0, 0].tolist() == [2, 2, 0]
    assert stored[1][:, 0, 0, 0].tolist() == [-2, -2, 0]


def test_each_token_is_held_by_one_rank_of_cp():
    """Two ranks hold the tokens of calls of 6, 1, 3 and 1 tokens."""
    cache, positions = KeyValueCache(11), []
    for rank in range(2):
        cache.clear()
        pieces = [2 * rank, 2 * rank + 1, 2 * (3 - rank), 2 * (3 - rank) + 1]
        held = cache.hold(torch.tensor([pieces]), 6, 2, rank)
        for first, count in ((0, 6), (6, 1), (7, 3), (10, 1)):
            key = torch.zeros(count if first else 4, 1, 2, 4)
            key = key[held.local_indices(first, count)] if first else key
            held.cache.extend(1, key, key, None)
            cache.advance(count)
        positions.append([place for place in held.places_with(11, 0)[0].tolist() if place >= 0])
        assert cache.num_bytes < 2 * 11 * 2 * 4 * 4
    assert sorted(place for of_rank in positions for place in of_rank) == list(range(11))
    assert {len(of_rank) for of_rank in positions} <= {5, 6}


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
    assert check_rows(gpt, PROMPTS).num_bytes == expected
    assert check_passes(gpt, PROMPTS)[0].num_bytes == expected


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


class Doubled(torch.nn.Module):
    """Parametrization that doubles a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_models_whose_passes_need_the_host_are_not_captured():
    for case, reason in {
        "bloom": "have a slopes",
        "gemma2": "have a soft cap",
        "phi3": "longrope",
    }.items():
        assert reason in str(reason_against_replay(small_gpt(case)))
    gpt = small_gpt("llama")
    parametrize.register_parametrization(gpt.layers["0"].mlp.down, "weight", Doubled())
    assert "a parametrization computes weights" in str(reason_against_replay(gpt))


class RefusingBackend(TapeBackend):
    """Backend whose captures fail."""

    def capture(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_is_reported_and_changes_nothing():
    with pytest.warns(SpeedWarning, match="not permitted when stream is capturing") as caught:
        _, token_pass = check_passes(small_gpt("llama"), PROMPTS, RefusingBackend())
    assert not token_pass.is_captured
    assert len([1 for warning in caught if warning.category is SpeedWarning]) == 1


def test_passes_of_a_model_on_the_cpu_are_not_captured(caplog):
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
