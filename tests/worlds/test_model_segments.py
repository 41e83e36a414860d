"""Models run in pieces of segments compute the same bits as complete models on several ranks."""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.segments import split
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.pieces import PieceRunner
from tests.models.stages import run_pipeline
from tests.models.test_model_segments import (
    CONFIGS,
    SIZES,
    assert_same_bits,
    build_gpt,
    check_scopes,
    draw_tokens,
)
from tests.world import run_world

#: Layout, whether ranks share sequences, models and transports over ep.
JOBS: tuple[tuple[dict[str, int], bool, tuple[str, ...], tuple[str, ...]], ...] = (
    ({"tp": 2}, True, ("gpt2", "llama post", "experts"), ("auto",)),
    ({"ep": 2}, False, ("experts", "shared expert"), ("all_gather", "all_to_all", "one_sided")),
)
SCOPES = [("all",), ("router", "preprocess"), ("attention", "combine")]


def check_jobs(size: int) -> None:
    for sizes, shares, names, transports in JOBS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), seed=4, sequence_parallel=shares)
        for name in names:
            for transport in transports:
                scopes = SCOPES if transport == "all_to_all" else SCOPES[:2]
                num_pieces = check_scopes(CONFIGS[name], mesh, "none", scopes, transport)
                model = build_gpt(CONFIGS[name], mesh, "none", transport)
                eager = [
                    [segment.name.removeprefix("layers.1.mlp.") for segment in piece]
                    for piece in split(model.segments())
                    if not piece.is_static
                ]
                # Only exchanges, experts and the shared expert during an exchange are eager.
                shared = ["shared"] if name == "shared expert" else []
                expected = [["send", *shared, "receive", "experts", "send_back"]]
                has_exchange = transport == "all_to_all"
                assert num_pieces[0] == (5 if has_exchange else 1), (name, transport)
                assert eager[1:] == (expected if has_exchange else []), (name, transport)
        mesh.destroy()


def check_stages(rank: int, size: int) -> list[list[str]]:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2), seed=4)
    config = GPTConfig.gpt2(**SIZES | {"num_layers": 3})
    tokens = draw_tokens(0, mesh)
    grad = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(3))
    results: list[dict[str, Any]] = []
    for options in (None, {"scopes": ("attention",)}):
        model = GPT(config, mesh, seed=1)
        if options is not None:
            PieceRunner(model, **options)
        mesh.random.begin_microbatch(5, 0)
        losses = run_pipeline(model, tokens, tokens, grad)
        results.append({"losses": losses} | {n: p.grad for n, p in model.named_parameters()})
    assert_same_bits(results[1], results[0], f"stage {rank}")
    return [list(model.segments().inputs), [segment.name for segment in model.segments()]]


def check_all(rank: int, size: int) -> list[list[str]]:
    torch.set_default_dtype(torch.float64)
    check_jobs(size)
    return check_stages(rank, size)


def test_pieces_of_ranks_and_stages_compute_the_same_bits() -> None:
    first, second = run_world(check_all, 2)
    # A later stage begins with the received hidden state.
    assert first[0] == ["tokens", "positions", "vectors", "cut", "rotary", "rows"]
    assert second[0][:3] == ["hidden", "rotary", "rows"]
    assert [*first[1], *second[1]] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
