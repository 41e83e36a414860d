"""Generated tokens, beams and logits of sampling equal those of transformers, streamed text ends before stops,
and unsupported calls are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from lightning_megatron import (
    GPT,
    GenerationSettings,
    GPTConfig,
)
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.generation.decoding import generate, generated_tokens
from lightning_megatron.generation.sampling import Sampler, argmax, sampling_logits
from lightning_megatron.generation.stop_text import StopStrings, TextStream
from tests.generation.models import NEW_TOKENS, PROMPTS, padded, replaced, twin_of
from tests.oracles import float32_as_float64
from tests.refusals import check_refusals
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
    given = {"inputs": tokens, "max_new_tokens": 2}
    options: tuple[tuple[dict[str, Any], str], ...] = (
        ({name: DynamicCache()}, f"takes no {name}: DynamicCache"),
        ({"cache_implementation": "quantized"}, "'quantized', whose tokens may differ"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation was asked for"),
    )
    check_refusals(model.generate, [({**given, **option}, phrase) for option, phrase in options])
    for name in ("past_key_values", "cache"):
        check_refusals(model, [({"input_ids": tokens, name: DynamicCache()}, name)])


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
    cases: list[tuple[Any, str]] = [
        ((model, []), "at least one prompt"),
        ((model, [[1], []]), "prompt 1 is empty"),
        ((model, [[1, 53]]), "prompt 0 has 53"),
        ((model, [[1, 2, 3]], GenerationSettings(30)), "at most 29 new tokens"),
    ]
    check_refusals(generate, [*cases, ((torch.nn.Linear(1, 1), [[1]]), "Linear has 0")])
    searches = [((model, [[1]], GenerationSettings(1, beams=2)), "knows its first token only")]
    check_refusals(lambda *given: next(generated_tokens(*given)), searches)
    assert len(generate(model, [[1, 2, 3]], GenerationSettings(29))[0]) == 29
    wrong = {"max_new_tokens": 0, "temperature": 0.0, "top_p": 1.5, "seed": -1}
    settings = [({name: value}, name) for name, value in wrong.items()]
    settings.append(({"beams": 2, "sample": True}, "beams is 2 and sample is true"))
    check_refusals(GenerationSettings, settings)


processors = pytest.importorskip("transformers.generation.logits_process")


def random_logits(scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 101, generator=generator) * scale
    # Some tokens have the same logit.
    logits[:, 50:60] = logits[:, 40:50]
    return logits


def test_sampling_logits_equal_those_of_transformers():
    settings = product((0.7, 1.0, 1.6), (None, 1, 7, 500), (1e-6, 0.3, 0.95, 1.0))
    for temperature, top_k, top_p in settings:
        steps: list[Any] = [processors.TemperatureLogitsWarper(temperature)]
        steps += [] if top_k is None else [processors.TopKLogitsWarper(top_k)]
        steps += [] if top_p == 1.0 else [processors.TopPLogitsWarper(top_p)]
        options = GenerationSettings(sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
        for scale in (0.1, 1.0, 8.0):
            expected = random_logits(scale)
            actual = sampling_logits(expected, options)
            for step in steps:
                expected = step(None, expected)
            assert torch.equal(actual, expected), f"{options}, scale {scale}"


def test_samples_have_the_probabilities_of_the_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20000, 4)
    options = GenerationSettings(sample=True, temperature=2.0, seed=1)
    drawn = Sampler(options, logits.device)(logits)
    actual = drawn.bincount(minlength=4) / len(drawn)
    expected = torch.tensor([0.0, 0.5, 1.0, -torch.inf]).softmax(0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.015)
    assert torch.equal(drawn, Sampler(options, logits.device)(logits))
    reseeded = GenerationSettings(sample=True, temperature=2.0, seed=2)
    assert not torch.equal(drawn, Sampler(reseeded, logits.device)(logits))


def test_argmax_in_groups_equals_that_of_torch():
    for width in (5, 256, 768, 1000):
        # Few different values, so that several logits are the largest.
        logits = torch.randint(0, 30, (7, width)).bfloat16()
        assert torch.equal(argmax(logits), logits.argmax(-1))
        logits[2, width // 2] = torch.nan
        assert torch.equal(argmax(logits), logits.argmax(-1))


BYTES = ByteTokenizer()


def pieces_of(data: bytes, strings: tuple[str, ...] = (), before: bytes = b"") -> list[str]:
    stream = TextStream(BYTES.decode, strings, list(before))
    return [*(stream.push(token) for token in data), stream.finish()]


def test_a_character_appears_when_its_bytes_are_complete():
    assert pieces_of("aé€b".encode()) == ["a", "", "é", "", "", "€", "b", ""]
    assert pieces_of(b"a\xe2\x82") == ["a", "", "", "\ufffd"]


@given(data=st.binary(max_size=40), before=st.text(max_size=5))
def test_pieces_of_any_bytes_join_to_the_full_text(data, before):
    assert "".join(pieces_of(data, before=before.encode())) == data.decode(errors="replace")


@given(
    data=st.text(alphabet="abé", max_size=30),
    strings=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_pieces_end_before_the_first_stop_string(data, strings):
    tokens = list(data.encode())
    stops = StopStrings(BYTES.decode, strings)
    ends = [n for n in range(1, len(tokens) + 1) if stops(tokens[:n])]
    tokens_read = tokens[: ends[0]] if ends else tokens
    text = "".join(pieces_of(bytes(tokens_read), tuple(strings)))
    assert text == StopStrings(BYTES.decode, strings).before(BYTES.decode(tokens_read))
    # The stream prints no text that it would have to take back.
    assert text == "".join(pieces_of(bytes(tokens), tuple(strings)))


def words(tokens: list[int]) -> str:
    """Decode words as SentencePiece does, which omits the blank before the first word."""
    return "".join([f" {token}" for token in tokens]).removeprefix(" ")


def test_the_blank_before_the_first_new_word_is_printed():
    stream = TextStream(words, before=[1, 2])
    assert [stream.push(3), stream.push(4), stream.finish()] == [" 3", " 4", ""]
