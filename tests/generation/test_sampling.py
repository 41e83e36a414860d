"""Sampling uses the logits of transformers and their probabilities; invalid settings raise."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lightning_megatron import GenerationSettings, ParallelPlanError
from lightning_megatron.generation.sampling import Sampler, argmax, sampling_logits

processors = pytest.importorskip("transformers.generation.logits_process")


def random_logits(scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 101, generator=generator) * scale
    # Some tokens have the same logit.
    logits[:, 50:60] = logits[:, 40:50]
    return logits


def test_sampling_logits_equal_those_of_transformers() -> None:
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


def test_samples_have_the_probabilities_of_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20000, 4)
    options = GenerationSettings(sample=True, temperature=2.0, seed=1)
    drawn = Sampler(options, logits.device)(logits)
    actual = drawn.bincount(minlength=4) / len(drawn)
    expected = torch.tensor([0.0, 0.5, 1.0, -torch.inf]).softmax(0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.015)
    assert torch.equal(drawn, Sampler(options, logits.device)(logits))
    reseeded = GenerationSettings(sample=True, temperature=2.0, seed=2)
    assert not torch.equal(drawn, Sampler(reseeded, logits.device)(logits))


def test_without_sampling_the_most_probable_token_is_chosen() -> None:
    logits = random_logits(1.0)
    tokens = Sampler(GenerationSettings(), logits.device)(logits)
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("stop_tokens", (-1,)),
        ("seed", -1),
        ("sample", "yes"),
    ],
)
def test_errors_name_invalid_settings(setting: str, value: Any) -> None:
    with pytest.raises(ParallelPlanError, match=setting):
        GenerationSettings(**{setting: value})


@pytest.mark.parametrize("width", [5, 256, 768, 1000])
def test_argmax_in_groups_equals_that_of_torch(width: int) -> None:
    torch.manual_seed(0)
    # Few different values, so that several logits are the largest.
    logits = torch.randint(0, 30, (7, width)).bfloat16()
    assert torch.equal(argmax(logits), logits.argmax(-1))
    logits[2, width // 2] = torch.nan
    assert torch.equal(argmax(logits), logits.argmax(-1))
