"""Estimate of the memory of text generation on each pipeline stage: weights and key/value cache."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.plan.context import context_multiple
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.partition import partition_of
from lightning_megatron.plan.settings import require_positive


@dataclass(frozen=True, kw_only=True)
class GenerationShape:
    """Prompts that a model continues at the same time on a data-parallel rank.

    Args:
        prompt_length: Tokens of the longest prompt (tokens).
        new_tokens: Largest number of tokens after a prompt (tokens).
        rows: Prompts of a batch, times the number of beams (sequences).
        element_bytes: Size of an element of weights, keys and values (bytes).

    Raises:
        ParallelPlanError: If a value is not positive.
    """

    prompt_length: int
    new_tokens: int
    rows: int = 1
    sequence_parallel: bool = False
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("prompt_length", "new_tokens", "rows", "element_bytes"):
            require_positive(f"generation.{name}", getattr(self, name))

    def padded_prompt(self, layout: ParallelLayout) -> int:
        """Return the length of the prompts with the padding that the ranks need (tokens)."""
        multiple = context_multiple(layout.cp, layout.tp if self.sequence_parallel else 1)
        return -(-self.prompt_length // multiple) * multiple

    def tokens_in_cache(self, window: int | None, layout: ParallelLayout) -> int:
        """Return the tokens of a row for which a layer has room on one rank (tokens).

        The last new token is never read again. Ranks of cp divide the prompt and the new tokens,
        and keep all of them also in layers with a window.

        Args:
            window: Sliding window of the layer; None means none (tokens).
        """
        later = self.new_tokens - 1
        if layout.cp > 1:
            return self.padded_prompt(layout) // layout.cp + -(-later // layout.cp)
        longest = self.prompt_length + later
        return longest if window is None else min(window, longest)


@dataclass(frozen=True, kw_only=True)
class GenerationMemory:
    """Memory of text generation on one rank of a stage (bytes).

    Args:
        parameters: Weights.
        cache: Keys and values of all tokens.
    """

    stage: int
    parameters: int
    cache: int


def estimate_generation_memory(
    model: ModelShape, layout: ParallelLayout, generation: GenerationShape
) -> tuple[GenerationMemory, ...]:
    """Estimate the weights and the key/value cache of every stage while a model generates text.

    Activations of the pass over the prompts are not included; they are freed before the second
    token.

    Args:
        generation: Prompts and new tokens.

    Returns:
        One estimate for each stage, for the rank of tp with the most key/value heads.

    Raises:
        ParallelPlanError: For sizes that do not fit together.
    """
    stages = partition_of(model.costs(tp=layout.tp), layout).by_stage(layout.placement)
    features = model.cached_features(layout.tp)
    estimates = []
    for stage, chunks in enumerate(stages):
        layers = [layer for chunk in chunks for layer in chunk]
        mixtures = sum(map(model.has_experts_in, layers))
        parameters = model.stage_parameters(layout, stage, len(layers), mixtures)
        parameters += mixtures * model.expert_parameters(layout)
        tokens = sum(generation.tokens_in_cache(model.window_of(layer), layout) for layer in layers)
        estimates.append(
            GenerationMemory(
                stage=stage,
                parameters=parameters * generation.element_bytes,
                cache=generation.rows * tokens * features * generation.element_bytes,
            )
        )
    return tuple(estimates)
