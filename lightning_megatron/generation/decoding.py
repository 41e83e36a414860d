"""Generation of the tokens that follow prompts, one token per row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.generation.beam_search import BeamSearch, Candidates
from lightning_megatron.generation.prompts import check_prompts
from lightning_megatron.generation.sampling import GenerationSettings, Sampler
from lightning_megatron.generation.session import GenerationSession
from lightning_megatron.generation.stop_text import StopFunction
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.side_calls import run_side_call
from lightning_megatron.models.stage import pipelined_modules


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    stop_function: StopFunction | None = None,
) -> list[list[int]]:
    """Generate a continuation of each prompt, and return its tokens.

    Equals ``generate`` of a Hugging Face model with the same weights, and generation without a
    key/value cache.

    Args:
        model: GPT, or module that contains one, such as a ``CausalLM`` or a replaced Hugging Face
            model.
        prompts: Token ids of each prompt; lengths may differ.
        settings: Settings of the generation; None means the defaults.
        stop_function: Function that takes the new tokens of a row and returns whether the row ends,
            such as ``StopStrings``. It must return the same result on all ranks. None means that
            only stop tokens and ``max_new_tokens`` end a row.

    Returns:
        New tokens of each prompt, a stop token included.

    Raises:
        UnsupportedError: If the module does not contain exactly one GPT, a prompt is empty or has a
            token outside the vocabulary, or a step with pipeline stages makes this call only after
            it has read a value that the model computes.
        ParallelPlanError: If a row could become longer than ``max_seq_length``.

    Communication: as for :func:`generated_tokens`. In a beam search with pp, the last stage
        broadcasts the candidates of each prompt instead of the tokens.
    """
    gpt = gpt_of(model)
    search = _search_beams if settings is not None and settings.beams > 1 else _decode
    return run_side_call(
        gpt,
        "generate",
        lambda: search(gpt, prompts, settings or GenerationSettings(), stop_function),
    )


def _decode(
    gpt: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    stop_function: StopFunction | None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, by greedy decoding or sampling."""
    continuations: list[list[int]] = [[] for _ in prompts]
    for tokens in generated_tokens(gpt, prompts, settings, stop_function):
        for row, token in zip(continuations, tokens, strict=True):
            if token is not None:
                row.append(token)
    return continuations


def generated_tokens(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    stop_function: StopFunction | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each row until all rows have ended; None for rows that have ended.

    Args:
        model: GPT, or module that contains one.
        prompts: Token ids of each prompt.
        settings: Settings of the generation; None means the defaults.
        stop_function: As for :func:`generate`.

    Raises:
        UnsupportedError: If the module does not contain exactly one GPT, the call is inside a step
            with pipeline stages, a prompt is empty or has a token outside the vocabulary, or the
            settings ask for a beam search, which knows its tokens only at its end.
        ParallelPlanError: As for :func:`generate`.

    Communication: for each token, the communication of the layers, and with pp a broadcast of the
        tokens from the last stage. All ranks of a replica must call this function together with the
        same prompts. Replicas that share experts (ep) must call it together, and may have different
        prompts.
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
    for number, chosen in enumerate(_chosen_tokens(session, sampler), 1):
        if not all(ended):
            yield [None if end else token for end, token in zip(ended, chosen, strict=True)]
        for row, token in enumerate(chosen):
            if ended[row]:
                continue
            rows[row].append(token)
            ended[row] = (
                number == settings.max_new_tokens
                or token in settings.stop_tokens
                or (stop_function is not None and stop_function(rows[row]))
            )
        if session.is_over(all(ended)):
            return


def _chosen_tokens(session: GenerationSession, sampler: Sampler) -> Iterator[list[int]]:
    """Yield the next token of each prompt, up to ``max_new_tokens`` times.

    If passes are replayed, the pass for the token after next is launched before the host waits for
    the next token, so that the device is never idle. If all rows have ended by then, that pass was
    in vain.
    """
    tokens: Tensor | None = None
    read: Callable[[], list[int]] | None = None
    for _ in range(session.max_new_tokens):
        with torch.no_grad():
            logits = session.logits(tokens)
            chosen = session.with_fillers(None if logits is None else sampler(logits))
            tokens = session.from_last_stage(chosen)
        if read is not None:
            yield read()
            read = None
        if session.is_captured:
            read = _start_read(tokens[: session.num_prompts])
        else:
            yield tokens[: session.num_prompts].tolist()
    if read is not None:
        yield read()


def _start_read(tokens: Tensor) -> Callable[[], list[int]]:
    """Start to copy tokens from a GPU to the host, and return a function that waits for them.

    The next pass does not wait for the copy, which runs on another stream.
    """
    on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_host.copy_(tokens, non_blocking=True)
    tokens.record_stream(stream)
    copied = stream.record_event()

    def read() -> list[int]:
        copied.synchronize()
        return on_host.tolist()

    return read


def _search_beams(
    gpt: GPT,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    stop_function: StopFunction | None,
) -> list[list[int]]:
    """Return the new tokens of each prompt that a beam search finds."""
    check_prompts(prompts, gpt.config.vocab_size)
    beams = settings.beams
    session = GenerationSession(gpt, [prompt for prompt in prompts for _ in range(beams)], settings)
    search = BeamSearch(
        settings, len(prompts), gpt.config.vocab_size, session.device, stop_function
    )
    tokens: Tensor | None = None
    for _ in range(session.max_new_tokens):
        with torch.no_grad():
            logits = session.logits(tokens)
            if search.is_over:
                # Replicas that share experts with this one are still searching.
                tokens = session.with_fillers(None)
            else:
                candidates = map(session.from_last_stage, search.candidates(logits))
                chosen, parents = search.advance(Candidates(*candidates))
                session.reorder(parents)
                tokens = session.with_fillers(chosen)
        if session.is_over(search.is_over):
            break
    return search.best()


def gpt_of(model: nn.Module) -> GPT:
    """Return the GPT that a module contains.

    Args:
        model: GPT, or module that contains one.

    Raises:
        UnsupportedError: If the module does not contain exactly one GPT.
    """
    gpts = [submodule for _, submodule in pipelined_modules(model) if isinstance(submodule, GPT)]
    if len(gpts) != 1:
        raise UnsupportedError(
            "generate needs a model with one GPT of lightning_megatron: "
            f"{type(model).__name__} has {len(gpts)}. Only the attention of a GPT fills the "
            "key/value cache. Pass a GPT, a configured CausalLM or a Hugging Face model whose "
            "layers the strategy has replaced. For another model, call the generate method of that "
            "model."
        )
    return gpts[0]
