"""Generation methods of Hugging Face for models whose layers are a GPT's."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.models.side_calls import run_side_call
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from lightning_megatron.swap.hugging_face.packed_rows import GenerationCache


class GeneratingLM(HuggingFaceLM):
    """Causal language model with the methods of Hugging Face's GenerationMixin.

    ``generate`` takes the arguments of GenerationMixin: searches, sampling, stopping rules. It
    stores keys and values in a cache of this package, regardless of ``cache_implementation``. With
    rotary angles that depend on the length of the row (longrope), or with ``use_cache=False``,
    every token needs a forward pass over all previous tokens.

    All tp, cp and pp ranks of a replica must call ``generate`` together with the same prompts.
    Other replicas need not call it, unless they share experts (ep). Replicas that share experts may
    use different prompts, and each continues until all have finished. Inside a step with pp, all
    stages generate before they run the step, so the arguments must not depend on values of the
    model's results.

    Communication: that of one forward pass for each token. Replicas that share experts also run an
    all-reduce on the CPU before each pass.
    """

    _is_stateful = False
    _is_generating = False
    _cache: GenerationCache | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Continue prompts; see transformers.GenerationMixin.generate."""
        return run_side_call(self.gpt, "generate", lambda: self._generated(*args, **kwargs))

    def _generated(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self._can_cache:
            kwargs |= {"use_cache": False}
        if self.gpt.has_shared_experts:
            # Ranks that have finished continue to run forward passes until all have finished.
            kwargs["synced_gpus"] = True
        self._is_generating = True
        inherited: Any = super()
        try:
            tokens: Tensor = inherited.generate(*args, **kwargs)
        finally:
            self._is_generating = False
            self._cache = None
        return tokens

    @property
    def _can_cache(self) -> bool:
        scaling = self.gpt.config.rotary_scaling
        # Longrope changes the angles of all cached keys when a row becomes long.
        return scaling is None or scaling.kind != "longrope"

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *others: Any,
    ) -> None:
        # Hugging Face's generation calls this before its first pass.
        if generation_config.use_cache is False:
            return
        self._check_cache(generation_config, model_kwargs, generation_mode)
        # Ranks that have finished before others repeat their last token.
        self._cache = GenerationCache(max_cache_length + 1)
        model_kwargs[self._cache_argument] = self._cache

    @property
    def _cache_argument(self) -> str:
        # Transformers 5.24 renamed the argument.
        inherited: Any = self
        arguments = signature(inherited.prepare_inputs_for_generation).parameters
        return "cache" if "cache" in arguments else "past_key_values"

    def _check_cache(self, config: Any, arguments: Mapping[str, Any], mode: Any) -> None:
        name = self._cache_argument
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"generate takes no {name}: {type(arguments[name]).__name__} was given. The keys "
                "and values lie in a cache of this rank's layers, which generate makes. Leave it "
                "out, and pass all tokens."
            )
        if config.cache_implementation == "quantized":
            raise UnsupportedError(
                "generate keeps keys and values in the dtype of the model: cache_implementation "
                "is 'quantized', whose tokens may differ. Leave cache_implementation out."
            )
        # Earlier versions of transformers pass the assistant in place of the mode.
        looks_up = config.prompt_lookup_num_tokens is not None
        if looks_up or isinstance(mode, nn.Module) or mode == "assisted_generation":
            raise UnsupportedError(
                "generate cannot remove tokens from its cache: assisted generation was asked for, "
                "which guesses tokens and drops wrong ones. Leave assistant_model and "
                "prompt_lookup_num_tokens out."
            )
        if not self._can_cache:
            raise UnsupportedError(
                "generate from inputs_embeds needs a cache: rotary_scaling is "
                f"{self.gpt.config.rotary_scaling}. With longrope there is none, and vectors of "
                "new tokens are not known without one. Pass input_ids."
            )

    def _padding(self, num_sequences: int, length: int, multiple: int) -> tuple[int, int]:
        rows, extra = super()._padding(num_sequences, length, multiple)
        if not (self._is_generating and self.gpt.has_shared_experts):
            return rows, extra
        # Prompts may differ in number and length, but experts need the same number of tokens from
        # every rank.
        largest = all_reduce_(
            torch.tensor([num_sequences, length + extra]), self.gpt.mesh.experts_cpu, "max"
        )
        return int(largest[0]) - num_sequences, int(largest[1]) - length

    def _has_unfinished_sequences(
        self, this_peer_finished: bool, synced_gpus: bool, device: Any
    ) -> bool:
        if self._cache is not None:
            self._cache.has_ended = this_peer_finished
        # Hugging Face's implementation asks all processes.
        unfinished = torch.tensor([int(not this_peer_finished)])
        if synced_gpus:
            all_reduce_(unfinished, self.gpt.mesh.experts_cpu, "max")
        return bool(unfinished)

    def is_remote_code(self) -> bool:
        """Return False, because the model is part of this package."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Return an empty mapping, because the model has no experts of Hugging Face."""
        return {}
