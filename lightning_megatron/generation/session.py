"""State of a text generation: rows of prompts, their key/value cache, and the next-token logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.generation.token_pass import (
    TokenPass,
    evaluation_mode,
    reason_against_capture,
)
from lightning_megatron.groups.collectives import all_reduce_, broadcast_
from lightning_megatron.layers.attention.key_value_cache import KeyValueCache
from lightning_megatron.layers.context_parallel.sequence_order import length_multiple
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.side_calls import run_stage_by_stage
from lightning_megatron.shapes import Int, Shaped

_log = logging.getLogger(__name__)


class GenerationSession:
    """Rows and key/value cache of a group of prompts."""

    def __init__(
        self, gpt: GPT, prompts: Sequence[Sequence[int]], settings: GenerationSettings
    ) -> None:
        self._gpt = gpt
        if gpt.cursor is not None:
            raise UnsupportedError(
                f"generated_tokens cannot run inside a step with pp ({gpt.mesh.pp.size}) above 1, "
                "because the stages are busy with other microbatches. Call generate there, or call "
                "it between steps, such as in on_validation_epoch_end, or use pp=1."
            )
        sizes = torch.tensor([len(prompts), max(map(len, prompts)), settings.max_new_tokens])
        self._shares_experts = gpt.has_shared_experts
        if self._shares_experts:
            # Experts need the same number of tokens from every rank.
            all_reduce_(sizes, gpt.mesh.experts_cpu, "max")
        num_rows, length, max_new_tokens = sizes.tolist()
        _check_length(length, max_new_tokens, gpt.config.max_seq_length)
        #: Maximum number of new tokens of a row, over all ranks that share experts (tokens).
        self.max_new_tokens: int = max_new_tokens
        #: Number of prompts of this rank.
        self.num_prompts = len(prompts)
        #: Device of the model.
        self.device = gpt.mesh.device
        self._rows = PromptRows.of(prompts, self.device, num_rows=num_rows, length=length)
        # The model never reads the last new token.
        self._cache = KeyValueCache(length + max_new_tokens - 1)
        self._longest_short_row = _longest_short_row(gpt)
        self._num_rows = num_rows
        self._pass = self._token_pass(num_rows) if settings.cuda_graph else None
        gpt.wait_for_parameters()

    @property
    def is_captured(self) -> bool:
        """Return whether later passes replay a CUDA graph."""
        return self._pass is not None and self._pass.is_captured

    def logits(self, tokens: Int[Tensor, " batch"] | None) -> Tensor | None:
        """Return the next-token logits of the prompts of this rank.

        The logits of a replayed CUDA graph are valid until the next call.

        Args:
            tokens: Latest token of each row; None returns the logits after the prompts.

        Returns:
            Logits on the pipeline stage of the last layers; None on other stages.
        """
        if tokens is not None and self._pass is not None:
            computed: Tensor | None = self._pass(tokens)
            self._cache.advance(1)
        else:
            computed = self._computed_logits(tokens)
        return None if computed is None else computed[: self.num_prompts]

    def from_last_stage(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return a tensor of the last stage, which has the same shape on all stages.

        Communication: a broadcast from the last stage over pp.
        """
        mesh = self._gpt.mesh
        return broadcast_(tensor.contiguous(), mesh.pp, mesh.layout.loss_stage)

    def with_fillers(self, tokens: Int[Tensor, " rows"] | None) -> Int[Tensor, " batch"]:
        """Return a token for each row, where those of filler rows are 0.

        Args:
            tokens: Tokens of the prompts of this rank; None means 0.
        """
        if tokens is not None and len(tokens) == self._num_rows:
            return tokens
        # Filler rows come after the prompts of this rank. Nothing is sampled for them, so samples
        # depend on the prompts of this rank only.
        filled = torch.zeros(self._num_rows, dtype=torch.long, device=self.device)
        if tokens is not None:
            filled[: self.num_prompts] = tokens
        return filled

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Copy tokens, cached keys and cached values between the rows of this rank."""
        self._cache.reorder(rows)
        self._rows = self._rows.reordered(rows)

    def _computed_logits(self, tokens: Tensor | None) -> Tensor | None:
        """Compute the next-token logits without a CUDA graph, and cache keys and values."""
        if tokens is not None:
            self._rows = self._rows.appended(tokens)
        if self._cache.length == self._longest_short_row:
            # The cached keys were rotated by the angles of short rows; compute them again.
            self._cache.clear()
        gpt = self._gpt
        is_first = self._cache.length == 0
        multiple = length_multiple(gpt.mesh, is_cut=is_first)
        inputs_of = self._rows.prefill_inputs if is_first else self._rows.decode_inputs
        rows, span = inputs_of(self._cache, multiple)
        assert span.past is not None, "rows of prompts have a cache"
        count = span.past.count
        with evaluation_mode(gpt):
            if gpt.mesh.pp.size == 1:
                logits: Tensor | None = gpt.logits_at(rows, count - 1, span)
            else:
                logits = run_stage_by_stage(gpt, lambda: gpt.logits_at(rows, count - 1, span))
        self._cache.advance(count)
        return logits

    def is_over(self, have_ended: bool) -> bool:
        """Return whether the rows of all ranks that share experts have ended.

        Args:
            have_ended: Whether the rows of this rank have ended.

        Communication: an all-reduce over the ranks that share experts, if there are any.
        """
        if not self._shares_experts:
            return have_ended
        unfinished = torch.tensor(int(not have_ended))
        return not all_reduce_(unfinished, self._gpt.mesh.experts_cpu, "max")

    def _token_pass(self, num_rows: int) -> TokenPass | None:
        """Return the forward pass over one token per row; None if it is not captured."""
        reason = reason_against_capture(self._gpt, self.max_new_tokens)
        if reason is not None:
            _log.info("passes over single tokens are not captured as a CUDA graph: %s", reason)
            return None
        return TokenPass(self._gpt, self._cache, self._rows.padding, num_rows)


def _longest_short_row(gpt: GPT) -> int | None:
    """Return the length up to which longrope uses the angles of short rows; None without it."""
    scaling = gpt.config.rotary_scaling
    if gpt.config.position != "rotary" or scaling is None or scaling.kind != "longrope":
        return None
    return scaling.original_length


def _check_length(length: int, max_new_tokens: int, limit: int) -> None:
    if length + max_new_tokens > limit:
        raise ParallelPlanError(
            f"a prompt and its new tokens together must not exceed max_seq_length ({limit}): the "
            f"longest prompt has {length} tokens, and max_new_tokens is {max_new_tokens}. The "
            f"model has no later positions. Use at most {max(0, limit - length)} new tokens, or a "
            "shorter prompt."
        )
