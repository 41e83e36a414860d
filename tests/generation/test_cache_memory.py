"""The estimated memory of the key/value cache equals the memory that generation allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import GPT, GenerationSettings, GPTConfig
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.generation.session import GenerationSession
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.generation_memory import (
    GenerationShape,
    estimate_generation_memory,
)
from lightning_megatron.plan.layout import ParallelLayout
from tests.world import run_world

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_length": 64,
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
}
LATENT = {
    **{"key_value_rank": 12, "query_rank": 20},
    **{"plain_dim": 6, "rotary_dim": 4, "value_dim": 8},
}
CONFIGS = {
    "tied": GPTConfig.gpt2(**SIZES),
    "grouped, a window in some layers": GPTConfig.llama(
        **SIZES,
        num_kv_heads=2,
        ffn_hidden_size=48,
        sliding_window=5,
        window_layers=[True, False, True, True],
    ),
    "latent": GPTConfig.llama(**SIZES, ffn_hidden_size=48, latent_attention=LATENT),
}
LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 2}, {"pp": 2}, {"cp": 2}, {})
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
NEW = 4


def measured(config: GPTConfig, mesh: ParallelMesh) -> tuple[int, int]:
    """Return the sizes of this rank's parameters and of its cache after all tokens (bytes)."""
    model = GPT(config, mesh, seed=1).double().eval()
    model._owns_mesh = False
    with torch.no_grad():
        session = GenerationSession(model, PROMPTS, GenerationSettings(NEW))
        session.logits(None)
        for _ in range(NEW - 1):
            session.logits(torch.ones(len(PROMPTS), dtype=torch.long))
    weights = sum(parameter.numel() * 8 for parameter in model.parameters())
    return weights, session._cache.num_bytes


def estimated(config: GPTConfig, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    shape = GenerationShape(prompt_length=7, new_tokens=NEW, rows=2, element_bytes=8)
    estimate = estimate_generation_memory(config.memory_shape(), layout, shape)[stage]
    assert estimate.stage == stage
    return estimate.parameters, estimate.cache


def _on_two(rank: int, size: int) -> list[str]:
    wrong = []
    for sizes in LAYOUTS:
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout)
        for name, config in CONFIGS.items():
            both = measured(config, mesh), estimated(config, layout, mesh.pp.rank)
            if both[0] != both[1]:
                wrong.append(f"{name}, {sizes}: {both[0]}, estimated {both[1]}")
        mesh.destroy()
    return wrong


@pytest.mark.parametrize("name", list(CONFIGS))
def test_one_process_allocates_the_estimated_memory(name: str) -> None:
    config = CONFIGS[name]
    assert measured(config, ParallelMesh.single()) == estimated(config, ParallelLayout(1), 0)


def test_two_ranks_allocate_the_estimated_memory() -> None:
    assert run_world(_on_two, 2) == [[], []]


def test_a_number_of_new_tokens_below_one_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match=r"generation\.new_tokens must be a whole number"):
        GenerationShape(prompt_length=4, new_tokens=0)
