"""Sampling uses the logits of transformers and their probabilities, and streamed text ends before stops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron import GenerationSettings
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.generation.sampling import Sampler, argmax, sampling_logits
from lightning_megatron.generation.stop_text import StopStrings, TextStream, before_stop

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
    assert text == before_stop(BYTES.decode(tokens_read), strings)
    # The stream prints no text that it would have to take back.
    assert text == "".join(pieces_of(bytes(tokens), tuple(strings)))


def words(tokens: list[int]) -> str:
    """Decode words as SentencePiece does, which omits the blank before the first word."""
    return "".join([f" {token}" for token in tokens]).removeprefix(" ")


def test_the_blank_before_the_first_new_word_is_printed():
    stream = TextStream(words, before=[1, 2])
    assert [stream.push(3), stream.push(4), stream.finish()] == [" 3", " 4", ""]
