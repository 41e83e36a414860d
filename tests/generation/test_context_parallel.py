"""Generation with a cache that cp divides equals generation of one process and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.generation.decoding import generate
from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.key_value_cache import KeyValueCache
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.generation.test_cached_logits import NEXT, check_rows, ours
from tests.generation.test_generated_tokens import (
    NEW_TOKENS,
    PROMPTS,
    replaced,
    sampled,
    tokens_of_transformers,
)
from tests.oracles import float32_as_float64
from tests.swap import expert_models
from tests.swap.test_language_models import exact_twin
from tests.sweeps import chosen
from tests.world import run_world

#: Layouts of four ranks, and models with a window, learned positions, ALiBi, and soft caps with
#: windows.
LAYOUTS: tuple[tuple[dict[str, int], Any, bool, tuple[str, ...]], ...] = (
    ({"cp": 4}, "ring", False, chosen(("mistral", "bloom"), "bloom")),
    # The angles of phi3 change in long rows.
    ({"cp": 4}, "hierarchical", False, chosen(("llama", "phi3"), "phi3")),
    ({"cp": 2, "tp": 2}, "auto", True, chosen(("mistral", "gpt2"), "gpt2")),
    ({"cp": 2, "tp": 2}, "all_gather", True, ("gemma2",)),
    ({"cp": 2, "pp": 2}, "ring", False, chosen(("mistral", "llama"), "mistral")),
    ({"cp": 2, "ep": 2}, "ring", False, ("mixtral",)),
)
CASES = sorted({case for *_, cases in LAYOUTS for case in cases})

#: Arguments of generate of transformers. With the last ones, several calls read the prompt.
SEARCHES: tuple[dict[str, Any], ...] = chosen(
    (
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 9},
        {"do_sample": False, "prefill_chunk_size": 4},
    ),
    {"num_beams": 3, "do_sample": False},
    {"do_sample": False, "prefill_chunk_size": 4},
)


def padded_prompts() -> dict[str, Any]:
    longest = max(map(len, PROMPTS))
    padding = [longest - len(prompt) for prompt in PROMPTS]
    rows = [[0] * num_padded + prompt for num_padded, prompt in zip(padding, PROMPTS, strict=True)]
    mask = [[0] * num_padded + [1] * (longest - num_padded) for num_padded in padding]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(mask),
        "max_new_tokens": NEW_TOKENS,
    }


def generated_by(model: Any, search: dict[str, Any]) -> Tensor:
    with float32_as_float64():
        torch.manual_seed(3)
        tokens: Tensor = model.generate(**padded_prompts(), **search)
    return tokens


def check_layouts(rank: int, size: int, references: dict[str, Any]) -> None:
    for sizes, transport, shares_sequence, cases in LAYOUTS:
        layout = ParallelLayout(size, **sizes)
        links = ContextLinks.of(transport, layout, size)
        mesh = ParallelMesh.create(layout, sequence_parallel=shares_sequence, context=links)
        for case in cases:
            model = replaced(case, mesh).eval()
            greedy, drawn, searched = references[case]
            label = f"{case}, {sizes}, {transport}, rank {rank}"
            assert generate(model, PROMPTS, GenerationSettings(NEW_TOKENS)) == greedy, label
            assert generate(model, PROMPTS[:1], GenerationSettings(NEW_TOKENS)) == greedy[:1], label
            assert sampled(model, PROMPTS) == drawn, label
            lengths: list[int] = []
            model.gpt.register_forward_pre_hook(
                lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
            )
            for search, expected in searched:
                assert torch.equal(generated_by(model, search), expected), f"{label}, {search}"
            if case != "phi3":
                # With a cache, the last pass reads only the last token, padded for tp.
                assert lengths[-1] == (sizes.get("tp", 1) if shares_sequence else 1), label
        mesh.destroy()


@pytest.mark.slow
def test_ranks_that_share_rows_generate_the_tokens_of_one_process() -> None:
    references: dict[str, Any] = {}
    for case in CASES:
        model = replaced(case, ParallelMesh.single()).eval()
        greedy = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS))
        if case != "gemma2":
            assert greedy == tokens_of_transformers(case)
        searches = SEARCHES[:-1] if case == "phi3" else SEARCHES
        searched = [(search, generated_by(model, search)) for search in searches]
        references[case] = greedy, sampled(model, PROMPTS), searched
        assert len(set(map(tuple, greedy))) > 1
    run_world(check_layouts, 4, references)


def held_by(cache: KeyValueCache, ranks: int) -> list[list[int]]:
    """Return the positions of tokens that each rank holds after calls of 6, 1, 3 and 1 tokens."""
    positions = []
    for rank in range(ranks):
        cache.clear()
        pieces = [
            2 * rank,
            2 * rank + 1,
            2 * (2 * ranks - 1 - rank),
            2 * (2 * ranks - 1 - rank) + 1,
        ]
        held = cache.hold(torch.tensor([pieces]), 6, ranks, rank)
        for first, count in ((0, 6), (6, 1), (7, 3), (10, 1)):
            if first:
                key = torch.zeros(count, 1, 2, 4)[held.local_indices(first, count)]
            else:
                key = torch.zeros(4, 1, 2, 4)
            held.cache.extend(1, key, key, None)
            cache.advance(count)
        positions.append([place for place in held.places_with(11, 0)[0].tolist() if place >= 0])
        assert cache.num_bytes < 2 * 11 * 2 * 4 * 4
    return positions


def test_each_token_is_held_by_one_rank() -> None:
    positions = held_by(KeyValueCache(11), 2)
    assert sorted(place for positions_of_rank in positions for place in positions_of_rank) == list(
        range(11)
    )
    assert {len(positions_of_rank) for positions_of_rank in positions} <= {5, 6}


#: Families of each transport, and the number of which the lengths of prompts are multiples.
LOGITS: tuple[tuple[str, dict[str, int], int, tuple[str, ...]], ...] = (
    ("ring", {"cp": 2}, 4, chosen(("gemma3", "bloom", "olmo2"), "gemma3")),
    ("all_to_all", {"cp": 2}, 4, chosen(("llama", "mistral", "gpt2", "mpt"), "mistral", "mpt")),
    (
        "all_gather",
        {"cp": 2},
        8,
        chosen(("gemma2", "gpt_neox", "llama with one key head"), "llama with one key head"),
    ),
)
EXPERTS = chosen(expert_models.CASES, "deepseek_v3", "gpt_oss")


def check_logits(rank: int, size: int) -> None:
    for transport, sizes, multiple, cases in LOGITS:
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, context=ContextLinks.of(transport, layout, size))
        makers: list[tuple[str, Any]] = [(case, exact_twin) for case in cases]
        if transport == "ring":
            makers += [(case, experts_of) for case in EXPERTS]
        for case, make in makers:
            model = ours(make(case), mesh)
            cache = check_rows(model, PROMPTS, multiple, ours(make(case)), later=1)
            held = cache.held
            assert held is not None
            # Each rank has its part of the first tokens, and every second later token.
            most = -(-9 // multiple) * multiple // 2 + NEXT.shape[1] // 2 + 1
            assert NEXT.shape[1] // 2 < held.cache.length <= most
        mesh.destroy()


def experts_of(case: str) -> nn.Module:
    twin = expert_models.twin_of(case).double()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.3)
    return twin


def test_cached_logits_equal_those_of_full_rows() -> None:
    run_world(check_logits, 2)
