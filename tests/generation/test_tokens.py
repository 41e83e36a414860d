"""Generated tokens and beams equal those of transformers, and unsupported calls are refused."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_megatron import GPT, GPTConfig, ParallelPlanError, UnsupportedError
from lightning_megatron.generation.decoding import generate, generated_tokens
from lightning_megatron.generation.settings import GenerationSettings
from tests.generation.models import NEW_TOKENS, PROMPTS, padded, replaced, twin_of
from tests.oracles import float32_as_float64
from tests.sweeps import chosen

CASES = ("llama", "qwen3", "mistral", "gpt2", "gemma2", "gemma3", "bloom", "phi3", "mixtral")
GREEDY = GenerationSettings(NEW_TOKENS)
SIZES: dict[str, Any] = {"vocab_size": 53, "max_seq_length": 32, "num_layers": 4}
SIZES |= {"hidden_size": 16, "num_heads": 2}


def by_transformers(case: str, **options: Any) -> list[list[int]]:
    """Return the tokens that transformers generates after left-padded prompts."""
    twin: Any = twin_of(case)
    with float32_as_float64():
        tokens: Tensor = twin.generate(**padded(), do_sample=False, **options)
    return tokens[:, max(map(len, PROMPTS)) :].tolist()


@pytest.mark.parametrize(
    "case", chosen(CASES, "llama", "gpt2", "gemma3", "phi3", "mixtral", "bloom")
)
def test_generated_tokens_equal_those_of_transformers(case):
    if case == "gemma2":
        pytest.skip("the soft cap of transformers rounds to float32")
    expected = by_transformers(case)
    assert generate(replaced(case), PROMPTS, GREEDY) == expected
    assert len(set(map(tuple, expected))) > 1


#: Beams, length penalty, and the number of stop tokens.
SEARCHES = ((2, 1.0, 0), (4, 1.0, 2), (3, 0.0, 1), (3, 2.5, 1), (5, -1.0, 3))


def stops_of(case: str, number: int) -> tuple[int, ...]:
    """Return tokens that a model often generates, so that beams end early."""
    tokens = [token for row in generate(replaced(case), PROMPTS, GREEDY) for token in row]
    common = sorted(set(tokens), key=lambda token: (-tokens.count(token), token))
    return tuple(common[1 : 1 + number])


@pytest.mark.parametrize("case", chosen(("llama", "mistral", "gpt2", "mixtral"), "gpt2"))
def test_beam_search_finds_the_sequences_of_transformers(case):
    model, fill, lengths, differs = replaced(case), 10**6, set(), False
    for beams, penalty, number in SEARCHES:
        stops = stops_of(case, number)
        options: dict[str, Any] = {"num_beams": beams, "length_penalty": penalty}
        options |= {"eos_token_id": list(stops) or None, "pad_token_id": fill}
        rows = by_transformers(case, **options)
        expected = [[token for token in row if token != fill] for row in rows]
        search = GenerationSettings(
            NEW_TOKENS, beams=beams, length_penalty=penalty, stop_tokens=stops
        )
        with float32_as_float64():
            assert generate(model, PROMPTS, search) == expected, (beams, penalty, stops)
        lengths |= set(map(len, expected))
        greedy = GenerationSettings(NEW_TOKENS, stop_tokens=stops)
        differs |= expected != generate(model, PROMPTS, greedy)
    assert differs
    assert len(lengths) > 1


@pytest.mark.parametrize("case", chosen(CASES, "bloom", "gemma2", "phi3", "mixtral"))
def test_replaced_models_generate_with_a_cache(case):
    """Each pass reads one new token, and the tokens equal the tokens of passes without a cache."""
    model = replaced(case)
    searches: list[dict[str, Any]] = [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 9},
        {"do_sample": False, "prefill_chunk_size": 4},
    ]
    for search in searches[:2] if case == "phi3" else searches:
        lengths: list[int] = []
        hook = model.gpt.register_forward_pre_hook(
            lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
        )
        with float32_as_float64():
            torch.manual_seed(3)
            actual = model.generate(**padded(), **search)
            hook.remove()
            torch.manual_seed(3)
            whole = {**search, "prefill_chunk_size": None}
            expected = model.generate(**padded(), **whole, use_cache=False)
        assert torch.equal(actual, expected), search
        reads_full_rows = case == "phi3"
        assert (lengths[-1] > 1) == reads_full_rows, lengths


def test_caches_of_transformers_and_assisted_generation_raise():
    model = replaced("llama")
    tokens = torch.tensor(PROMPTS[:1])
    # Transformers 5.24 renames the argument.
    arguments = signature(model.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in arguments else "past_key_values"
    with pytest.raises(UnsupportedError, match=f"takes no {name}: DynamicCache"):
        model.generate(tokens, **{name: DynamicCache()}, max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="'quantized', whose tokens may differ"):
        model.generate(tokens, cache_implementation="quantized", max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="assisted generation was asked for"):
        model.generate(tokens, prompt_lookup_num_tokens=2, max_new_tokens=2)
    for name in ("past_key_values", "cache"):
        with pytest.raises(UnsupportedError, match=name):
            model(tokens, **{name: DynamicCache()})


def test_generation_continues_input_embeddings():
    twin: Any = twin_of("llama")
    vectors = twin.get_input_embeddings()(torch.tensor(PROMPTS[:1])).detach()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with float32_as_float64():
        expected = twin.generate(inputs_embeds=vectors, **options)
        actual = replaced("llama").generate(inputs_embeds=vectors, **options)
    assert torch.equal(actual, expected)


def has_two_of(tokens: Sequence[int]) -> bool:
    return len(tokens) > 3 and tokens[-1] % 2 == 0


def test_rows_and_beams_end_with_a_stop_token_or_at_a_stop_function():
    model = replaced("llama")
    unstopped = generate(model, PROMPTS, GREEDY)
    stop = unstopped[0][3]
    settings = GenerationSettings(NEW_TOKENS, stop_tokens=(stop,))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in unstopped]
    assert generate(model, PROMPTS, settings) == expected
    steps = list(generated_tokens(model, PROMPTS[:1], settings))
    assert steps == [[token] for token in expected[0]]
    expected = [
        row[: next((n for n in range(1, NEW_TOKENS) if has_two_of(row[:n])), NEW_TOKENS)]
        for row in unstopped
    ]
    assert generate(model, PROMPTS, GREEDY, has_two_of) == expected != unstopped
    rows = generate(model, PROMPTS, GenerationSettings(NEW_TOKENS, beams=3), has_two_of)
    assert all(has_two_of(row) or len(row) == NEW_TOKENS for row in rows)
    assert not any(has_two_of(row[:n]) for row in rows for n in range(1, len(row)))
    assert min(map(len, rows)) < NEW_TOKENS


def test_invalid_prompts_lengths_and_settings_raise():
    model = GPT(GPTConfig.gpt2(**SIZES))
    for prompts, message in (
        ([], "at least one prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 53]], "prompt 0 has 53"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            generate(model, prompts)
    with pytest.raises(ParallelPlanError, match="at most 29 new tokens"):
        generate(model, [[1, 2, 3]], GenerationSettings(30))
    assert len(generate(model, [[1, 2, 3]], GenerationSettings(29))[0]) == 29
    with pytest.raises(ParallelPlanError, match="beams is 2 and sample is true"):
        GenerationSettings(beams=2, sample=True)
    for name, value in (("max_new_tokens", 0), ("temperature", 0.0), ("top_p", 1.5), ("seed", -1)):
        with pytest.raises(ParallelPlanError, match=name):
            GenerationSettings(**{name: value})
