"""Hugging Face encoders, computed by an Encoder that is sharded over tp and pp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.layers.context_parallel.sequence_order import length_multiple
from lightning_megatron.models.encoder import Encoder, EncoderInput, EncoderResult
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.swap.hugging_face.outputs import late_output, output_class
from lightning_megatron.swap.hugging_face.packed_rows import check_mask
from lightning_megatron.swap.hugging_face.replaced_model import (
    IGNORED,
    ReplacedModel,
    pad_batch,
    refuse_arguments,
)

#: Arguments of Hugging Face's call that do not change the result.
_IRRELEVANT = frozenset({"use_cache", "return_dict"})
_ABILITIES = (
    "It has no cache and no cross attention, and returns only the results of its last layer."
)


class HuggingFaceEncoder(ReplacedModel):
    """Hugging Face encoder, with or without a head, computed by an Encoder's layers.

    Outputs, loss and gradients equal those of the replaced model. If all labels of a masked
    language model are ignored, the loss is 0; Hugging Face's model returns NaN. Losses of
    half-precision models are computed in float32.
    """

    #: Hugging Face's configuration.
    config: Any

    @property
    def layers(self) -> Encoder:
        """Return the layers and the head that compute."""
        encoder = self.body
        assert isinstance(encoder, Encoder), "an encoder is replaced by an Encoder"
        return encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return Hugging Face's output: ``loss`` and ``logits``, or the hidden states.

        Shapes: input_ids, attention_mask, token_type_ids and position_ids ``(B, S)``; inputs_embeds
        ``(B, S, D)``; labels ``(B, S)`` of tokens, or ``(B)`` or ``(B, num_labels)`` of classes, or
        ``(B)`` of answers. For multiple choice the inputs have the shapes ``(B, choices, S)`` and
        ``(B, choices, S, D)``.

        Args:
            position_ids: Position of every token; by default the positions that Hugging Face uses.
            start_positions: First token of each answer ``(B)``; a position outside of the row has
                no loss.
            end_positions: Last token of each answer ``(B)``, with the same rule.
            others: Further arguments, none of which may change the result; ``return_dict=False``
                returns a tuple.

        Raises:
            StageDone: On pipeline stages that do not compute the result.
        """
        head = self.layers.config.head
        unused = _without_loss(head, labels, start_positions, end_positions)
        refuse_arguments({**others, **unused}, _IRRELEVANT, "encoder of this class", _ABILITIES)
        inputs = input_ids, inputs_embeds, attention_mask, position_ids, token_type_ids
        choices = None
        if self.family.architecture.endswith("ForMultipleChoice"):
            # Each choice becomes a row.
            choices = _num_choices(inputs)
        rows = self._rows(*(_as_rows(value, choices) for value in inputs))
        length = rows.tokens_or_vectors.shape[1]
        extra = -length % length_multiple(self.layers.mesh)
        targets = labels if head == "masked_lm" else None
        if extra:
            rows = self._padded(rows, extra)
            targets = None if targets is None else F.pad(targets, (0, extra), value=IGNORED)
        result = self.layers(rows, targets, IGNORED)
        output: Any
        if head == "masked_lm":
            output = self._masked(result, targets, length)
        elif head == "span":
            output = self._spans(result, start_positions, end_positions, length)
        else:
            output = self._output(result, labels, length, choices)
        return self._returned(output, others.get("return_dict"))

    def _rows(
        self,
        tokens: Tensor | None,
        vectors: Tensor | None,
        attention_mask: Tensor | None,
        positions: Tensor | None,
        token_types: Tensor | None,
    ) -> EncoderInput:
        shape = EncoderInput(tokens, vectors, None, positions, token_types).tokens_or_vectors.shape[
            :2
        ]
        valid, lengths = _padding(attention_mask, shape, self.mesh.host_values)
        if positions is not None:
            positions = positions.expand(shape)
        if token_types is not None:
            token_types = token_types.expand(shape)
        return EncoderInput(tokens, vectors, valid, positions, token_types, lengths)

    def _padded(self, rows: EncoderInput, extra: int) -> EncoderInput:
        """Append padding positions, to which no token attends."""
        inputs = rows.tokens_or_vectors
        valid = rows.valid
        lengths = rows.lengths
        if valid is not None:
            valid = F.pad(valid, (0, extra), value=False)
        elif lengths is None:
            lengths = torch.full(inputs.shape[:1], inputs.shape[1], device=inputs.device)
        config = self.layers.config
        positions = rows.positions
        if positions is None and (config.positions == "row" or rows.tokens is None):
            first = config.first_position
            length = inputs.shape[1]
            positions = torch.arange(first, first + length, device=inputs.device).expand(
                inputs.shape[:2]
            )
        return EncoderInput(
            pad_batch(rows.tokens, extra, config.padding_id or 0),
            None if rows.vectors is None else F.pad(rows.vectors, (0, 0, 0, extra)),
            valid,
            pad_batch(positions, extra, 0),
            pad_batch(rows.token_types, extra, 0),
            lengths,
        )

    def _masked(self, result: EncoderResult, labels: Tensor | None, length: int) -> Any:
        logits = result.logits
        loss = None
        assert logits is not None, "a masked language model computes logits"
        if result.losses is not None and labels is not None:
            loss = result.losses.sum() / (labels != IGNORED).sum().clamp(min=1)
        return late_output(
            output_class(self), loss, lambda: self.layers.gather_logits(logits)[:, :length]
        )

    def _spans(
        self, result: EncoderResult, starts: Tensor | None, ends: Tensor | None, length: int
    ) -> Any:
        logits = result.logits
        assert logits is not None, "a head of spans computes logits"
        if isinstance(logits, RemoteTensor):
            shape = logits.shape[0], length
            starts_logits, ends_logits = (
                self.layers.absent(shape, logits.dtype, "the logits") for _ in range(2)
            )
        else:
            starts_logits, ends_logits = (
                part.contiguous() for part in logits[:, :length].unbind(-1)
            )
        loss = None
        if starts is not None and ends is not None:
            loss = (_place_loss(starts_logits, starts) + _place_loss(ends_logits, ends)) / 2
        return output_class(self)(loss=loss, start_logits=starts_logits, end_logits=ends_logits)

    def _output(
        self, result: EncoderResult, labels: Tensor | None, length: int, choices: int | None
    ) -> Any:
        logits = result.logits
        if logits is None:
            assert result.hidden is not None, "an encoder without a head returns hidden states"
            hidden = self.layers.gather_hidden(result.hidden)[:, :length]
            return output_class(self)(last_hidden_state=hidden, pooler_output=result.pooled)
        if choices is not None:
            shape = logits.shape[0] // choices, choices
            if isinstance(logits, RemoteTensor):
                logits = self.layers.absent(shape, logits.dtype, "the logits")
            else:
                logits = logits.view(shape)
        compute = _cross_entropy if choices is not None else self._class_loss
        loss = None if labels is None else compute(logits, labels)
        return output_class(self)(loss=loss, logits=logits)

    def _class_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type
        count = self.layers.config.num_labels
        if problem is None and count == 1:
            problem = "regression"
        elif problem is None:
            is_single = labels.dtype in (torch.long, torch.int)
            problem = "single_label_classification" if is_single else "multi_label_classification"
        if problem == "single_label_classification":
            return _cross_entropy(logits.view(-1, count), labels)
        logits = _widened(logits)
        labels = labels.to(logits.dtype)
        if problem == "regression":
            return (
                F.mse_loss(logits.squeeze(), labels.squeeze())
                if count == 1
                else F.mse_loss(logits, labels)
            )
        return F.binary_cross_entropy_with_logits(logits, labels)


def _as_rows(tensor: Tensor | None, choices: int | None) -> Tensor | None:
    return tensor if tensor is None or choices is None else tensor.flatten(0, 1)


def _num_choices(inputs: tuple[Tensor | None, ...]) -> int:
    """Return the number of choices of each sample."""
    tokens, vectors = inputs[:2]
    tokens_or_vectors = vectors if tokens is None else tokens
    if tokens_or_vectors is None or tokens_or_vectors.dim() != (4 if tokens is None else 3):
        raise UnsupportedError(
            "a model for multiple choice takes input_ids of the shape (batch, choices, tokens), or "
            "inputs_embeds with one dimension more: "
            f"{None if tokens_or_vectors is None else tuple(tokens_or_vectors.shape)} was given. "
            "Put the answers of a sample into a dimension of their own."
        )
    return tokens_or_vectors.shape[1]


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    return F.cross_entropy(_widened(logits), labels.view(-1), ignore_index=ignored)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _place_loss(logits: Tensor, places: Tensor) -> Tensor:
    """Return the mean loss of positions, without those that are outside of their row."""
    length = logits.shape[1]
    return _cross_entropy(logits, places.view(-1).clamp(0, length), length)


def _padding(
    attention_mask: Tensor | None, shape: torch.Size, host: HostValues
) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask that is False at padding, or the lengths of rows if padding is on the right.

    Both are None without padding.
    """
    if attention_mask is None:
        return None, None
    check_mask(attention_mask, shape)
    known = host.read(attention_mask) != 0
    if bool(known.all()):
        return None, None
    valid = attention_mask.to(torch.bool)
    if bool((known[:, 1:] <= known[:, :-1]).all()):
        return None, valid.sum(1)
    return valid, None


def _without_loss(head: str, labels: Any, starts: Any, ends: Any) -> dict[str, Any]:
    """Return the targets for which the loss of a head has no use."""
    if head == "span":
        return {"labels": labels}
    positions = {"start_positions": starts, "end_positions": ends}
    return positions if head in ("masked_lm", "classifier") else {**positions, "labels": labels}
