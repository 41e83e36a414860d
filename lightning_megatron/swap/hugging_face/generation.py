"""Hugging Face's generation with the layers of a GPT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM


class GeneratingLM(HuggingFaceLM):
    """Causal language model with the methods of Hugging Face's GenerationMixin.

    ``generate`` takes the arguments of GenerationMixin: searches, sampling, stopping rules. There
    is no cache, so every token needs a forward pass over all previous tokens. The tensor-parallel
    ranks and the stages of one replica must call it together with the same prompts. Other replicas
    need not call it, unless they share experts (ep). Replicas that share experts may use different
    prompts, and each continues until all have finished. With pp, call it in hooks between steps,
    such as on_validation_epoch_end.

    Communication: that of one forward pass for each token. Replicas that share experts also run an
    all-reduce on the CPU before each pass.
    """

    _is_stateful = False
    _is_generating = False

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Continue prompts; see transformers.GenerationMixin.generate.

        Raises:
            UnsupportedError: Inside a step, with pipeline stages.
        """
        if self.gpt.cursor is not None:
            raise UnsupportedError(
                f"generate cannot run inside a step with pp ({self.gpt.mesh.pp.size}) above 1, "
                "because the stages are busy with other microbatches. Call it between steps, such "
                "as in on_validation_epoch_end, or use pp=1."
            )
        kwargs |= {"use_cache": False}
        if self.gpt.has_shared_experts:
            # Ranks that have finished continue to run forward passes until all have finished.
            kwargs["synced_gpus"] = True
        self._is_generating = True
        inherited: Any = super()
        try:
            found: Tensor = inherited.generate(*args, **kwargs)
        finally:
            self._is_generating = False
        return found

    def _padding(self, num_sequences: int, length: int) -> tuple[int, int]:
        rows, extra = super()._padding(num_sequences, length)
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
        # Hugging Face's implementation asks all processes.
        unfinished = torch.tensor([int(not this_peer_finished)])
        if synced_gpus:
            all_reduce_(unfinished, self.gpt.mesh.experts_cpu, "max")
        return bool(unfinished)

    def is_remote_code(self) -> bool:
        """Return False, because the model is part of this package."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Return an empty mapping, because no part selects Hugging Face's experts."""
        return {}
