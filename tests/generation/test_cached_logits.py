"""Logits of tokens that follow a cache equal the logits of a pass over the full rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.generation.decoding import gpt_of
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap import parallelize
from tests.swap import expert_models, families
from tests.swap.test_language_models import exact_twin

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34, 35]]
NEXT = torch.randint(1, families.V, (3, 14), generator=torch.Generator().manual_seed(0))


def ours(twin: nn.Module, mesh: ParallelMesh | None = None) -> GPT:
    root = nn.ModuleDict({"model": twin})
    parallelize(root, mesh or ParallelMesh.single())
    return gpt_of(root).eval()


def gather_logits(gpt: GPT, row: list[int]) -> Tensor:
    return gpt.logits_at(torch.tensor([row]), len(row) - 1)[0]


@torch.no_grad()
def check_rows(
    gpt: GPT, prompts: list[list[int]], multiple: int = 1, twin: GPT | None = None, later: int = 0
) -> KeyValueCache:
    """Compare a twin's logits of each full row alone with the logits of all rows with the cache.

    Lengths are multiples of ``multiple`` in the first call, and of ``later`` in later calls.
    """
    length = max(map(len, prompts))
    cache = KeyValueCache(length + NEXT.shape[1])
    rows = PromptRows.of(
        prompts,
        torch.device("cpu"),
        num_rows=len(prompts),
        length=length,
        multiple=multiple,
        later_multiple=later or multiple,
    )
    tokens, span = rows.prefill_inputs(cache)
    actual = gpt.logits_at(tokens, length - 1, span)
    cache.advance(length)
    extended = [list(prompt) for prompt in prompts]
    for number in range(NEXT.shape[1] + 1):
        for logits, row in zip(actual, extended, strict=True):
            expected = gather_logits(twin or gpt, row)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        if number == NEXT.shape[1]:
            return cache
        for row, token in zip(extended, NEXT[:, number].tolist(), strict=False):
            row.append(token)
        rows = rows.appended(NEXT[: len(extended), number])
        tokens, span = rows.decode_inputs(cache)
        actual = gpt.logits_at(tokens, 0, span)
        cache.advance(1)
    raise AssertionError("the loop returns")


# The angles of phi3 depend on the longest row: see test_generated_tokens.py.
@pytest.mark.parametrize("case", sorted(families.CASES.keys() - {"phi3"}))
def test_cached_logits_of_unequal_rows_match_full_passes(case: str) -> None:
    check_rows(ours(exact_twin(case)), PROMPTS)


@pytest.mark.parametrize("case", ["gpt2", "mistral", "gemma2", "bloom"])
def test_cached_logits_of_equal_and_padded_rows_match_full_passes(case: str) -> None:
    gpt = ours(exact_twin(case))
    check_rows(gpt, [PROMPTS[0]])
    check_rows(gpt, [PROMPTS[0]], multiple=4)
    check_rows(gpt, PROMPTS, multiple=2)


@pytest.mark.parametrize("case", expert_models.CASES)
def test_cached_logits_of_models_with_experts_match_full_passes(case: str) -> None:
    gpt = ours(expert_models.twin_of(case).double())
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.mul_(0.3)
    check_rows(gpt, PROMPTS)


@torch.no_grad()
def test_several_tokens_at_once_follow_a_ring_cache() -> None:
    gpt = ours(exact_twin("mistral"))
    row = PROMPTS[0] + NEXT[0].tolist()
    cache = KeyValueCache(len(row))
    num_cached = 0
    for count in (2, 6, 1, 9, 3, 2):
        tokens = torch.tensor([row[num_cached : num_cached + count]])
        positions = torch.arange(num_cached, num_cached + count)[None]
        span = AttentionSpan(positions=positions, past=CachedTokens(cache, count))
        actual = gpt.logits_at(tokens, count - 1, span)
        cache.advance(count)
        num_cached += count
        expected = gather_logits(gpt, row[:num_cached])
        torch.testing.assert_close(actual[0], expected, rtol=0, atol=1e-10)
    assert num_cached == len(row)


def test_a_ring_cache_has_the_memory_of_its_window() -> None:
    cache = check_rows(ours(exact_twin("gemma3")), PROMPTS)
    # Layers 0 and 2 have a window of 4 tokens, and layer 1 has none. Each has 6 key/value heads of
    # 8 elements.
    assert cache.num_bytes == 2 * 8 * 3 * 6 * 8 * (4 + 23 + 4)


def test_tokens_beyond_the_size_of_the_cache_are_refused() -> None:
    cache = KeyValueCache(3)
    tokens = torch.zeros(4, 1, 2, 8)
    with pytest.raises(ParallelPlanError, match=r"their cache of 3 tokens: they would have 4"):
        cache.extend(1, tokens, tokens, None)


def test_rows_of_a_cache_are_reordered() -> None:
    cache = KeyValueCache(2)
    keys = torch.arange(3.0).view(1, 3, 1, 1)
    cache.extend(1, keys, -keys, None)
    cache.advance(1)
    cache.reorder(torch.tensor([2, 2, 0]))
    stored = cache.extend(1, keys, keys, None)
    assert stored[0][:, 0, 0, 0].tolist() == [2, 2, 0]
    assert stored[1][:, 0, 0, 0].tolist() == [-2, -2, 0]
