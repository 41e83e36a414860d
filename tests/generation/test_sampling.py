"""Sampling uses the logits of transformers and their probabilities; replayed passes are launched before
the host reads the token of the previous one.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import GenerationSettings, ParallelPlanError
from lightning_megatron.generation import decoding
from lightning_megatron.generation.sampling import Sampler, argmax, sampling_logits

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


def test_without_sampling_the_most_probable_token_is_chosen():
    logits = random_logits(1.0)
    tokens = Sampler(GenerationSettings(), logits.device)(logits)
    assert torch.equal(tokens, logits.argmax(-1))


def test_errors_name_invalid_settings():
    for setting, value in (
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("stop_tokens", (-1,)),
        ("seed", -1),
        ("sample", "yes"),
    ):
        with pytest.raises(ParallelPlanError, match=setting):
            GenerationSettings(**{setting: value})


def test_argmax_in_groups_equals_that_of_torch():
    for width in (5, 256, 768, 1000):
        # Few different values, so that several logits are the largest.
        logits = torch.randint(0, 30, (7, width)).bfloat16()
        assert torch.equal(argmax(logits), logits.argmax(-1))
        logits[2, width // 2] = torch.nan
        assert torch.equal(argmax(logits), logits.argmax(-1))


class FakeSession:
    """Session of one row that counts upwards. Passes are captured from the second pass on."""

    num_prompts = 1
    max_new_tokens = 5

    def __init__(self, events: list[str], can_capture: bool) -> None:
        self.events = events
        self.can_capture = can_capture
        self.num_passes = 0

    @property
    def is_captured(self) -> bool:
        return self.can_capture and self.num_passes > 1

    def logits(self, tokens: Tensor | None) -> Tensor:
        self.num_passes += 1
        self.events.append(f"pass {self.num_passes}")
        return torch.zeros(1, 9) if tokens is None else tokens[:, None].float()

    def broadcast_tokens(self, tokens: Tensor) -> Tensor:
        return tokens


def next_token(logits: Tensor) -> Tensor:
    return logits[:, 0].long() + 1


def test_a_replay_is_launched_before_the_last_token_is_read(monkeypatch):
    # The copy is needed because the device holds later tokens when the host reads.
    monkeypatch.setattr(decoding, "_start_read", lambda tokens: tokens.clone().tolist)

    def chosen(events: list[str], can_capture: bool) -> Any:
        session: Any = FakeSession(events, can_capture)
        sampler: Any = next_token
        return decoding._chosen_tokens(session, sampler)

    for can_capture, expected in (
        (False, "pass 1, got 1, pass 2, got 2, pass 3, got 3, pass 4, got 4, pass 5, got 5"),
        # The pass of the second token is the first captured one.
        (True, "pass 1, got 1, pass 2, pass 3, got 2, pass 4, got 3, pass 5, got 4, got 5"),
    ):
        events: list[str] = []
        for tokens in chosen(events, can_capture):
            events.append(f"got {tokens[0]}")
        assert ", ".join(events) == expected
    # One pass is wasted when generation ends early.
    events = []
    ended = chosen(events, True)
    assert [next(ended), next(ended)] == [[1], [2]]
    ended.close()
    assert events == ["pass 1", "pass 2", "pass 3"]
