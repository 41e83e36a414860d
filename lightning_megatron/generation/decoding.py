"""Continuation of prompts, one token of every row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.generation.beam_search import BeamSearch
from lightning_megatron.generation.prompts import check_prompts
from lightning_megatron.generation.sampling import Sampler
from lightning_megatron.generation.session import GenerationSession
from lightning_megatron.generation.settings import GenerationSettings
from lightning_megatron.generation.stop_text import StopFunction
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import pipelined_modules


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    stops: StopFunction | None = None,
) -> list[list[int]]:
    """Continue prompts, and return the tokens that follow each of them.

    Equal to ``generate`` of Hugging Face's models with the same weights, and without a cache.

    Args:
        model: GPT, or module with one, such as ``CausalLM`` and replaced Hugging Face models.
        prompts: Tokens of each prompt, which may have unequal lengths.
        settings: Choice of the tokens, and when to stop; None means the defaults.
        stops: Function of the new tokens of a row that says whether they are its last ones, equal
            on all ranks, such as ``StopStrings``; None means that no further ones are.

    Returns:
        Tokens after each prompt, a stop token included.

    Raises:
        UnsupportedError: If the module has no GPT, inside a step with pipeline stages, or for
            prompts that the model cannot read.
        ParallelPlanError: If a row could become longer than the model's longest one.

    Communication: see :func:`generated_tokens`. With pp and beams, the last stage broadcasts the
        candidates of each prompt instead.
    """
    if settings is not None and settings.beams > 1:
        return _searched(model, prompts, settings, stops)
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in generated_tokens(model, prompts, settings, stops):
        for row, token in zip(found, tokens, strict=True):
            if token is not None:
                row.append(token)
    return found


def generated_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    stops: StopFunction | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt until all have ended; None for those that have.

    Args:
        model: GPT, or module with one.
        prompts: Tokens of each prompt.
        settings: Choice of the tokens, and when to stop; None means the defaults.
        stops: As for :func:`generate`.

    Raises:
        UnsupportedError: As for :func:`generate`, and with beams, whose words are known at the end.
        ParallelPlanError: As for :func:`generate`.

    Communication: that of the layers for each token; with pp a broadcast of the tokens from the
        last stage. All ranks of one replica must call this together with the same prompts. Replicas
        that share experts (ep) must call it together, and may have different prompts.
    """
    settings = settings or GenerationSettings()
    if settings.beams > 1:
        raise UnsupportedError(
            f"a search with {settings.beams} beams knows its first token only at its end. Call "
            "generate instead of generated_tokens, or use beams=1."
        )
    gpt = gpt_of(model)
    check_prompts(prompts, gpt.config.vocab_size)
    session = GenerationSession(gpt, prompts, settings)
    sampler = Sampler(settings, session.device)
    rows: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    tokens: Tensor | None = None
    for number in range(1, session.most + 1):
        with torch.no_grad():
            logits = session.logits(tokens)
            tokens = session.shared_tokens(None if logits is None else sampler(logits))
        chosen = tokens[: len(prompts)].tolist()
        if not all(ended):
            yield [None if end else token for end, token in zip(ended, chosen, strict=True)]
        for place, token in enumerate(chosen):
            if ended[place]:
                continue
            rows[place].append(token)
            ended[place] = (
                number == settings.max_new_tokens
                or token in settings.stop_tokens
                or (stops is not None and stops(rows[place]))
            )
        if session.is_over(all(ended)):
            return


def _searched(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    stops: StopFunction | None,
) -> list[list[int]]:
    """Return the best words of a beam search after each prompt."""
    gpt = gpt_of(model)
    check_prompts(prompts, gpt.config.vocab_size)
    beams = settings.beams
    session = GenerationSession(gpt, [prompt for prompt in prompts for _ in range(beams)], settings)
    search = BeamSearch(settings, len(prompts), gpt.config.vocab_size, session.device, stops)
    tokens: Tensor | None = None
    for _ in range(session.most):
        with torch.no_grad():
            logits = session.logits(tokens)
            own = None if logits is None or search.is_over else search.candidates(logits)
            if search.is_over:
                # Other replicas go on, with which this one shares experts.
                tokens = session.filled(None)
            else:
                found = session.shared_candidates(own, search.num_candidates, beams)
                chosen, parents = search.advance(found)
                session.reorder(parents)
                tokens = session.filled(chosen)
        if session.is_over(search.is_over):
            break
    return search.best()


def gpt_of(model: nn.Module) -> GPT:
    """Return the GPT with which a module computes.

    Args:
        model: GPT, or module with one.

    Raises:
        UnsupportedError: If there is none, or more than one.
    """
    found = [one for _, one in pipelined_modules(model) if isinstance(one, GPT)]
    if len(found) != 1:
        raise UnsupportedError(
            f"generate needs a model with one GPT of this package: {type(model).__name__} has "
            f"{len(found)}. Only its attention fills a cache. Pass the GPT itself, a configured "
            "CausalLM or a replaced Hugging Face model; other models have their own generate."
        )
    return found[0]
