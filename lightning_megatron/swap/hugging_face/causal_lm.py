"""Hugging Face causal language models, computed by a GPT that is sharded over tp and pp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import broadcast_, gather_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.sequence_order import join_parts, length_multiple
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.models.layer_inputs import laid_out
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.side_calls import run_stage_by_stage
from lightning_megatron.swap.hugging_face.outputs import late_output, output_class
from lightning_megatron.swap.hugging_face.packed_rows import (
    GenerationCache,
    PackedRow,
    cut_by_positions,
    pad_span,
    shifted,
    span_of,
)
from lightning_megatron.swap.hugging_face.replaced_model import (
    IGNORED,
    ReplacedModel,
    pad_batch,
    refuse_arguments,
)

T = TypeVar("T")

#: Arguments of Hugging Face's call that do not change the result, only how it is computed. A
#: replaced model ignores them.
_IRRELEVANT = frozenset({"cache_position", "max_length_k", "cu_seq_lens_k"})
_ABILITIES = "It returns only loss and logits, and fills no cache but that of generate."


class LabelledGPT(GPT):
    """GPT that returns the losses and this rank's logits, sequence first.

    If losses are computed in chunks, the model returns the output of the last norm instead of the
    logits.
    """

    @override
    def forward(
        self,
        tokens: Tensor | None,
        labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        *,
        span: AttentionSpan | None = None,
        embeddings: Tensor | None = None,
        sums: bool = False,
    ) -> Any:
        return self._run(tokens, labels, label_smoothing, ignore_index, span, embeddings, sums)

    @override
    def _of_logits(self, logits: Tensor, targets: Targets | None, order: TokenOrder | None) -> Any:
        if targets is None:
            return None, logits
        return super()._of_logits(logits, targets, order), logits

    @override
    def _in_chunks(self, hidden: Tensor, targets: Targets, chunk: int) -> Any:
        return super()._in_chunks(hidden, targets, chunk), hidden

    @override
    def _placeholder(self, shape: torch.Size, has_losses: bool, sums: bool) -> Any:
        losses = super()._placeholder(shape, True, sums) if has_losses else None
        return losses, super()._placeholder(shape, False, False).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Inputs of a call: tokens or vectors, labels of the next tokens, and the attention span."""

    tokens: Tensor | None
    embeddings: Tensor | None
    labels: Tensor | None
    span: AttentionSpan | None


class HuggingFaceLM(ReplacedModel):
    """Hugging Face causal language model, computed by the layers of a GPT.

    Loss, logits and gradients equal those of the replaced model. Labels are token ids, which the
    forward pass shifts. The loss of a batch in which all labels are ignored is 0; Hugging Face's
    model returns NaN.
    """

    @property
    def gpt(self) -> LabelledGPT:
        """Return the layers that compute."""
        gpt = self.body
        assert isinstance(gpt, LabelledGPT), "a language model is replaced by a GPT"
        return gpt

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return Hugging Face's output: ``logits``, and ``loss`` and ``hidden_states`` on request.

        Shapes: input_ids, attention_mask, position_ids and labels ``(B, S)``; inputs_embeds
            ``(B, S, D)``; logits ``(B, S, V)``.

        Args:
            position_ids: Position of every token, which may separate packed sequences; see
                :func:`cut_by_positions`.
            past_key_values: The name of ``cache`` before transformers 5.24.
            use_cache: Whether Hugging Face's model fills a cache; only ``generate`` fills one here.
            num_items_in_batch: Divisor of the summed loss; None counts labels (tokens).
            output_hidden_states: Whether to return the states of all layers; requires pp=1.
            cache: Cache of ``generate`` with earlier keys and values; None without one.
            return_dict: False returns a tuple; None means the setting of the configuration.

        Raises:
            StageDone: On pipeline stages that do not compute the result, inside a step.

        Communication: that of the layers. Outside of a step and without gradients, the pipeline
        stages run in turn and the last one broadcasts the result, so all ranks must make the call.
        """
        caches = {"past_key_values": past_key_values, "cache": cache}
        past = {name: one for name, one in caches.items() if isinstance(one, GenerationCache)}
        arguments = {**others, **caches, **dict.fromkeys(past)}
        refuse_arguments(arguments, _IRRELEVANT, "language model", _ABILITIES)
        inputs = _one_input(input_ids, inputs_embeds)
        pack = PackedRow(cu_seq_lens_q, max_length_q, self._cut_by_positions(use_cache))
        rows = self._rows(
            input_ids, inputs_embeds, attention_mask, position_ids, pack, labels, shift_labels, past
        )
        run = partial(self._run, rows, num_items_in_batch)
        output = self._output(rows, run, inputs.shape[:2], logits_to_keep, output_hidden_states)
        return self._returned(_with_caches(output, past, inputs.shape[1]), return_dict)

    def _output(
        self,
        rows: _Rows,
        run: Callable[[], tuple[Tensor | None, Tensor]],
        shape: torch.Size,
        logits_to_keep: int | Tensor,
        has_states: bool | None,
    ) -> Any:
        """Run the layers on rows; the shape is that of the caller's tokens, without padding."""
        has_hidden = self._is_chunked(rows.labels)
        gather: Any = partial(self._gather, logits_to_keep, shape, has_hidden, rows.span)
        states = {}
        if self.gpt.mesh.pp.size > 1 and self.gpt.cursor is None and not torch.is_grad_enabled():
            selected = _selected(torch.empty(*shape, 1), logits_to_keep).shape[:-1]
            loss, gather = self._from_last_stage(run, gather, selected, rows.labels is not None)
        elif has_states:
            (loss, shard), found = self._with_states(run, rows.span)
            states["hidden_states"] = tuple(state[: shape[0], : shape[1]] for state in found)
            gather = partial(gather, shard)
        else:
            loss, shard = run()
            gather = partial(gather, shard)
        return late_output(output_class(self), loss, gather, **states)

    def _run(self, rows: _Rows, num_items: Tensor | int | None) -> tuple[Tensor | None, Tensor]:
        """Return the mean loss, if there are labels, and this rank's logits."""
        settings = {"span": rows.span, "embeddings": rows.embeddings}
        total, shard = self.gpt(
            rows.tokens, rows.labels, ignore_index=IGNORED, sums=True, **settings
        )
        return None if total is None else _mean(total, rows.labels, num_items), shard

    def _cut_by_positions(self, use_cache: bool | None) -> Literal["steps", "minimum"] | None:
        if self.gpt.config.position == "alibi":
            # Hugging Face's classes ignore positions, and do not support packed sequences.
            return "steps" if use_cache is False else None
        return cut_by_positions(self.config, use_cache, self._fills_no_cache())

    def _rows(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        packed: PackedRow,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        caches: Mapping[str, GenerationCache],
    ) -> _Rows:
        """Return the arguments of a call, padded to the form that the layout needs."""
        inputs = _one_input(input_ids, inputs_embeds)
        cache = next(iter(caches.values()), None)
        # With a cache, the mask also covers earlier tokens, and the cache reads it.
        is_continued = cache is not None and cache.length > 0
        own_mask = None if is_continued else attention_mask
        own_positions = None if is_continued else position_ids
        # The host has the labels of the batch, but not the shifted labels that are computed on the
        # device.
        shifts = shift_labels is None
        span = span_of(
            own_mask,
            own_positions,
            packed,
            inputs.shape[:2],
            labels if shifts else shift_labels,
            self.mesh.host_values,
            shifts=shifts,
        )
        labels = shifted(labels) if shifts else shift_labels
        multiple = length_multiple(self.gpt.mesh, is_cut=not is_continued)
        rows, extra = self._padding(len(inputs), inputs.shape[1], multiple)
        if rows or extra:
            # Appended positions do not affect earlier ones, and their results are dropped.
            input_ids = pad_batch(input_ids, extra, 0, rows)
            labels = pad_batch(labels, extra, IGNORED, rows)
            if inputs_embeds is not None:
                inputs_embeds = F.pad(inputs_embeds, (0, 0, 0, extra, 0, rows))
            span = pad_span(span, extra, rows)
        if cache is not None:
            self.gpt.config.check_seq_length(cache.length_after(inputs.shape[1]))
            span = cache.span_of(
                span, inputs, attention_mask, position_ids, extra=extra, num_rows=rows
            )
        padded = _one_input(input_ids, inputs_embeds)
        span = laid_out(span, padded, self.gpt.mesh, self.gpt.context)
        return _Rows(input_ids, inputs_embeds, labels, span)

    def _with_states(
        self, run: Callable[[], T], span: AttentionSpan | None
    ) -> tuple[T, tuple[Tensor, ...]]:
        """Run the model; return its result and the hidden states of all layers."""
        gpt = self.gpt
        if gpt.mesh.pp.size > 1:
            raise UnsupportedError(
                f"output_hidden_states cannot be used with pp ({gpt.mesh.pp.size}) above 1, "
                "because each stage has only the states of its own layers. Leave it out, or use "
                "pp=1."
            )
        gpt.hidden_states = states = list[Tensor]()
        try:
            result = run()
        finally:
            gpt.hidden_states = None
        cut = None if span is None else span.order
        return result, tuple(gather_sequences(state, gpt.mesh, cut) for state in states)

    def _from_last_stage(
        self,
        run: Callable[[], tuple[Tensor | None, Tensor]],
        gather: Callable[[Tensor], Tensor],
        shape: torch.Size,
        has_labels: bool,
    ) -> tuple[Tensor | None, Callable[[], Tensor]]:
        """Run the pipeline stages in turn, and broadcast the result to all ranks."""
        pp = self.gpt.mesh.pp
        options = dict[str, Any](device=self.device, dtype=self.dtype)
        output = run_stage_by_stage(self.gpt, run)
        logits = torch.empty(*shape, self.gpt.config.vocab_size, **options)
        loss = torch.empty(
            (), device=self.device, dtype=torch.promote_types(self.dtype, torch.float32)
        )
        if output is not None:
            logits.copy_(gather(output[1]))
            if output[0] is not None:
                loss.copy_(output[0])
        loss_stage = self.gpt.mesh.layout.loss_stage
        broadcast_(logits, pp, loss_stage)
        if has_labels:
            broadcast_(loss, pp, loss_stage)
        return loss if has_labels else None, lambda: logits

    def _padding(self, num_sequences: int, length: int, multiple: int) -> tuple[int, int]:
        """Return the numbers of rows and positions to append."""
        return 0, -length % multiple

    def _is_chunked(self, labels: Tensor | None) -> bool:
        """Return whether the losses of padded labels are computed without storing logits."""
        if labels is None:
            return False
        return self.gpt.tokens_at_once(labels.numel() // self.gpt.mesh.cp.size) is not None

    def _gather(
        self,
        kept: int | Tensor,
        shape: torch.Size,
        from_hidden: bool,
        span: AttentionSpan | None,
        shard: Tensor,
    ) -> Tensor:
        rows, length = shape
        if isinstance(shard, RemoteTensor):
            # An absent tensor has no values to gather, and already has the full shape.
            return _selected(shard[:length, :rows].transpose(0, 1), kept)
        mesh = self.gpt.mesh
        if from_hidden:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"loss_chunk ({self.gpt.loss_chunk!r}) stores no logits, and those of a call "
                    "with labels have no gradient: output.logits was read with gradients enabled. "
                    "Read them under torch.no_grad(), which recomputes them, leave labels out of "
                    "the call, or use loss_chunk=None."
                )
            shard = self.gpt.logits(shard)
        cut = None if span is None else span.order
        local = join_parts(shard, mesh.cp, cut=cut)[:length, :rows]
        selected = _selected(local.transpose(0, 1), kept)
        full = gather_from_axis(selected, mesh.tp, dim=-1)
        return full[..., : self.gpt.config.vocab_size]


def gather_sequences(hidden: Tensor, mesh: ParallelMesh, cut: TokenOrder | None = None) -> Tensor:
    """Gather the hidden states of complete sequences on every tensor-parallel rank.

    Shapes: hidden ``(S/cp, B, D)`` or, under sequence parallelism, ``(S/(cp tp), B, D)``; output
        ``(B, S, D)``.
    Communication: under sequence parallelism an all-gather over tp forward, none backward; over cp
        an all-gather forward and a reduce-scatter backward.
    """
    full = gather_from_axis(hidden, mesh.tp, dim=0) if mesh.sequence_parallel else hidden
    return join_parts(full, mesh.cp, cut=cut).transpose(0, 1)


def _mean(total: Tensor, labels: Tensor | None, num_items: Tensor | int | None) -> Tensor:
    assert labels is not None, "there are losses where there are labels"
    count = num_items if num_items is not None else (labels != IGNORED).sum().clamp(min=1)
    return total / count


def _with_caches(output: Any, caches: Mapping[str, GenerationCache], count: int) -> Any:
    """Return the output with caches that have advanced by new tokens, under the caller's names."""
    for name, cache in caches.items():
        cache.advance(count)
        output[name] = cache
    return output


def _selected(logits: Tensor, kept: int | Tensor) -> Tensor:
    """Return the logits of some positions, as Hugging Face's ``logits_to_keep`` selects them.

    Shapes: logits ``(B, S, V)``; a tensor kept ``(N)``, ``(B, N)`` or, of booleans, ``(B, S)``; the
        result ``(B, N, V)``, or ``(N, V)`` for booleans ``(B, S)``.
    """
    if not isinstance(kept, Tensor):
        return logits[:, -kept:]
    if kept.dim() == 1:
        return logits[:, kept]
    if kept.dtype == torch.bool:
        return logits[kept]
    return torch.take_along_dim(logits, kept[..., None], 1)


def _one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    inputs = [value for value in (input_ids, inputs_embeds) if value is not None]
    if len(inputs) != 1:
        raise UnsupportedError(
            "a language model takes either input_ids or inputs_embeds: "
            f"{'both' if inputs else 'neither'} were given. Both describe the same input. Pass one "
            "of them."
        )
    return inputs[0]
