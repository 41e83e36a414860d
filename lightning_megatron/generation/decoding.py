"""Generation of the tokens after prompts, one token of every row at a time."""

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
from lightning_megatron.models.side_calls import run_aside
from lightning_megatron.models.stage import pipelined_modules


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    stops: StopFunction | None = None,
) -> list[list[int]]:
    """Generate a continuation of each prompt, and return its tokens.

    The tokens equal those of ``generate`` of a Hugging Face model with the same weights, and those
    of passes without a cache.

    Args:
        model: GPT, or module that contains one, such as a ``CausalLM`` or a replaced Hugging Face
            model.
        prompts: Token ids of each prompt; lengths may differ.
        settings: Settings of the generation; None means the defaults.
        stops: Function of the new tokens of a row that returns whether they end the row, such as
            ``StopStrings``; its results must be equal on all ranks. None means no further
            condition.

    Returns:
        New tokens of each prompt, a stop token included.

    Raises:
        UnsupportedError: If the module has no GPT, the model cannot read a prompt, or the call is
            inside a step with pipeline stages and depends on values of its results.
        ParallelPlanError: If a row could become longer than ``max_seq_length``.

    Communication: see :func:`generated_tokens`. With pp and beams, the last stage broadcasts the
        candidates of each prompt instead.
    """
    gpt = gpt_of(model)
    search = _beam_searched if settings is not None and settings.beams > 1 else _continued
    return run_aside(
        gpt, "generate", lambda: search(gpt, prompts, settings or GenerationSettings(), stops)
    )


def _continued(
    gpt: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    stops: StopFunction | None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, chosen one after the other."""
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in generated_tokens(gpt, prompts, settings, stops):
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
    """Yield the next token of each row until all rows have ended; None for rows that have ended.

    Args:
        model: GPT, or module that contains one.
        prompts: Token ids of each prompt.
        settings: Settings of the generation; None means the defaults.
        stops: As for :func:`generate`.

    Raises:
        UnsupportedError: If the module has no GPT, the call is inside a step with pipeline stages,
            the model cannot read a prompt, or there are several beams, whose tokens are known only
            at the end of the search.
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


def _beam_searched(
    gpt: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    stops: StopFunction | None,
) -> list[list[int]]:
    """Return the new tokens of each prompt that a beam search finds."""
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
                # Replicas that share experts with this one are still searching.
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
    """Return the GPT that a module contains.

    Args:
        model: GPT, or module that contains one.

    Raises:
        UnsupportedError: If the module has no GPT or more than one.
    """
    found = [one for _, one in pipelined_modules(model) if isinstance(one, GPT)]
    if len(found) != 1:
        raise UnsupportedError(
            f"generate needs a model with one GPT of this package: {type(model).__name__} has "
            f"{len(found)}. Only the attention of a GPT fills the key/value cache. Pass the GPT "
            "itself, a configured CausalLM or a replaced Hugging Face model; other models have "
            "their own generate."
        )
    return found[0]
