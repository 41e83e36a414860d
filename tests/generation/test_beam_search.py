"""Beam search finds the sequences of transformers in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_megatron import ParallelPlanError, UnsupportedError
from lightning_megatron.generation.decoding import generate, generated_tokens
from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.generation.test_generated_tokens import LAYOUTS, NEW_TOKENS, PROMPTS, replaced, twin_of
from tests.oracles import float32_as_float64
from tests.world import run_world

#: Beams, length penalty, and the number of stop tokens.
SEARCHES = ((2, 1.0, 0), (4, 1.0, 2), (3, 0.0, 1), (3, 2.5, 1), (5, -1.0, 3))


def stops_of(case: str, number: int) -> tuple[int, ...]:
    """Return tokens that a model often generates, so that beams end early."""
    model = replaced(case, ParallelMesh.single())
    tokens = [
        token for row in generate(model, PROMPTS, GenerationSettings(NEW_TOKENS)) for token in row
    ]
    common = sorted(set(tokens), key=lambda token: (-tokens.count(token), token))
    return tuple(common[1 : 1 + number])


def beams_of_transformers(
    case: str, beams: int, penalty: float, stops: tuple[int, ...]
) -> list[list[int]]:
    twin: Any = twin_of(case)
    longest = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    fill = 10**6
    with float32_as_float64():
        sequences = twin.generate(
            input_ids=rows,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=beams,
            length_penalty=penalty,
            eos_token_id=list(stops) or None,
            pad_token_id=fill,
        )
    return [[token for token in row if token != fill] for row in sequences[:, longest:].tolist()]


@pytest.mark.parametrize("case", ["llama", "mistral", "gpt2", "mixtral"])
def test_beam_search_finds_the_sequences_of_transformers(case: str) -> None:
    model = replaced(case, ParallelMesh.single())
    lengths = set()
    differs = False
    for beams, penalty, number in SEARCHES:
        stops = stops_of(case, number)
        expected = beams_of_transformers(case, beams, penalty, stops)
        settings = GenerationSettings(
            NEW_TOKENS, beams=beams, length_penalty=penalty, stop_tokens=stops
        )
        with float32_as_float64():
            assert generate(model, PROMPTS, settings) == expected, (beams, penalty, stops)
        lengths |= set(map(len, expected))
        differs |= expected != generate(
            model, PROMPTS, GenerationSettings(NEW_TOKENS, stop_tokens=stops)
        )
    assert differs
    assert len(lengths) > 1


def has_two_of(tokens: Sequence[int]) -> bool:
    return len(tokens) > 3 and tokens[-1] % 2 == 0


def test_a_stop_function_ends_rows_and_beams() -> None:
    model = replaced("llama", ParallelMesh.single())
    unstopped = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS))
    expected = [
        row[: next((n for n in range(1, NEW_TOKENS) if has_two_of(row[:n])), NEW_TOKENS)]
        for row in unstopped
    ]
    assert generate(model, PROMPTS, GenerationSettings(NEW_TOKENS), has_two_of) == expected
    assert expected != unstopped
    beam_rows = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS, beams=3), has_two_of)
    assert all(has_two_of(row) or len(row) == NEW_TOKENS for row in beam_rows)
    assert not any(has_two_of(row[:n]) for row in beam_rows for n in range(1, len(row)))
    assert min(map(len, beam_rows)) < NEW_TOKENS


def test_invalid_settings_of_beams_raise() -> None:
    with pytest.raises(ParallelPlanError, match="beams is 2 and sample is true"):
        GenerationSettings(beams=2, sample=True)
    model = replaced("llama", ParallelMesh.single())
    with pytest.raises(UnsupportedError, match="knows its first token only at its end"):
        next(generated_tokens(model, PROMPTS, GenerationSettings(beams=2)))


def check_layouts(rank: int, size: int, expected: dict[str, Any], stops: dict[str, Any]) -> None:
    for sizes, shares_sequence in LAYOUTS:
        mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=shares_sequence)
        for case in ("mixtral",) if "ep" in sizes else ("mistral",):
            first = mesh.dp.rank % 2
            settings = GenerationSettings(NEW_TOKENS, beams=3 - first, stop_tokens=stops[case])
            actual = generate(replaced(case, mesh), PROMPTS[first:], settings)
            assert actual == expected[case][first], f"{case}, {sizes}, rank {rank}"
        mesh.destroy()


def test_every_layout_finds_the_beams_of_one_process() -> None:
    expected: dict[str, Any] = {}
    stops = {case: stops_of(case, 2) for case in ("mistral", "mixtral")}
    for case, case_stops in stops.items():
        model = replaced(case, ParallelMesh.single())
        # Replicas have other prompts and another number of beams.
        expected[case] = [
            generate(
                model,
                PROMPTS[first:],
                GenerationSettings(NEW_TOKENS, beams=3 - first, stop_tokens=case_stops),
            )
            for first in (0, 1)
        ]
    run_world(check_layouts, 4, expected, stops)
