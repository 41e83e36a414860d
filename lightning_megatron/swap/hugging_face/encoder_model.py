"""Hugging Face encoders, computed by an Encoder that is sharded over tp and pp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.layers.context_parallel.sequence_order import length_multiple
from lightning_megatron.models.encoder import Encoder, EncoderInput, EncoderResult
from lightning_megatron.swap.hugging_face.outputs import EncoderOutput, MaskedLMOutput
from lightning_megatron.swap.hugging_face.replaced_model import IGNORED, ReplacedModel, pad_batch

#: Arguments of Hugging Face's call that do not change the result.
_IRRELEVANT = frozenset({"use_cache", "return_dict"})


class HuggingFaceEncoder(ReplacedModel):
    """Hugging Face encoder, with or without a head, computed by an Encoder's layers.

    Outputs, loss and gradients equal those of the replaced model. A masked language model without
    any counted label has the loss 0; Hugging Face's model returns NaN. Losses of half-precision
    models are computed in float32.
    """

    #: Hugging Face's configuration.
    config: Any

    @property
    def layers(self) -> Encoder:
        """Return the layers and the head that compute."""
        found = self.body
        assert isinstance(found, Encoder), "an encoder is replaced by an Encoder"
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **others: Any,
    ) -> EncoderOutput | MaskedLMOutput | tuple[Any, ...]:
        """Return Hugging Face's output: ``loss`` and ``logits``, or the hidden states.

        Shapes: input_ids, attention_mask, token_type_ids and position_ids ``(B, S)``; inputs_embeds
        ``(B, S, D)``; labels ``(B, S)`` of tokens, or ``(B)`` or ``(B, num_labels)`` of classes.

        Args:
            input_ids: Token ids; alternatively ``inputs_embeds``.
            attention_mask: 1 for tokens, 0 for padding, on either side.
            token_type_ids: Type of every token; 0 by default.
            position_ids: Position of every token; by default the positions that Hugging Face uses.
            inputs_embeds: Vectors instead of token ids.
            labels: Targets of a head, or -100 where no loss is computed.
            others: Further arguments, none of which may change the result; ``return_dict=False``
                returns a tuple.

        Raises:
            UnsupportedError: For unsupported arguments.
            StageDone: On pipeline stages that do not compute the result.
        """
        head = self.layers.config.head
        _refuse({**others, **({} if head in ("masked_lm", "classifier") else {"labels": labels})})
        rows = EncoderInput(input_ids, inputs_embeds, None, position_ids, token_type_ids)
        shape = rows.given.shape[:2]
        valid = _valid(attention_mask, shape, self.mesh.host_values)
        if position_ids is not None:
            position_ids = position_ids.expand(shape)
        if token_type_ids is not None:
            token_type_ids = token_type_ids.expand(shape)
        rows = EncoderInput(input_ids, inputs_embeds, valid, position_ids, token_type_ids)
        extra = -shape[1] % length_multiple(self.layers.mesh)
        targets = labels if head == "masked_lm" else None
        if extra:
            rows = self._padded(rows, extra)
            targets = None if targets is None else F.pad(targets, (0, extra), value=IGNORED)
        result = self.layers(rows, targets, IGNORED)
        output = (
            self._masked(result, targets, shape[1])
            if head == "masked_lm"
            else self._output(result, labels, shape[1])
        )
        return output.to_tuple() if others.get("return_dict") is False else output

    def _padded(self, rows: EncoderInput, extra: int) -> EncoderInput:
        """Append padding positions that no position attends to."""
        given = rows.given
        valid = (
            torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
            if rows.valid is None
            else rows.valid
        )
        config = self.layers.config
        positions = rows.positions
        if positions is None and (config.positions == "row" or rows.tokens is None):
            first = config.first_position
            length = given.shape[1]
            positions = torch.arange(first, first + length, device=given.device).expand(
                given.shape[:2]
            )
        return EncoderInput(
            pad_batch(rows.tokens, extra, config.padding_id or 0),
            None if rows.vectors is None else F.pad(rows.vectors, (0, 0, 0, extra)),
            F.pad(valid, (0, extra), value=False),
            pad_batch(positions, extra, 0),
            pad_batch(rows.token_types, extra, 0),
        )

    def _masked(self, result: EncoderResult, labels: Tensor | None, length: int) -> MaskedLMOutput:
        logits = result.logits
        loss = None
        assert logits is not None, "a masked language model computes logits"
        if result.losses is not None and labels is not None:
            loss = result.losses.sum() / (labels != IGNORED).sum().clamp(min=1)
        return MaskedLMOutput(loss, lambda: self.layers.whole_logits(logits)[:, :length])

    def _output(self, result: EncoderResult, labels: Tensor | None, length: int) -> EncoderOutput:
        if result.logits is not None:
            loss = None if labels is None else self._class_loss(result.logits, labels)
            return EncoderOutput(loss=loss, logits=result.logits)
        assert result.hidden is not None, "an encoder without a head returns hidden states"
        hidden = self.layers.whole(result.hidden)[:, :length]
        return EncoderOutput(last_hidden_state=hidden, pooler_output=result.pooled)

    def _class_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type
        count = self.layers.config.num_labels
        if problem is None and count == 1:
            problem = "regression"
        elif problem is None:
            is_single = labels.dtype in (torch.long, torch.int)
            problem = "single_label_classification" if is_single else "multi_label_classification"
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if problem == "single_label_classification":
            return F.cross_entropy(logits.view(-1, count), labels.view(-1))
        labels = labels.to(logits.dtype)
        if problem == "regression":
            return (
                F.mse_loss(logits.squeeze(), labels.squeeze())
                if count == 1
                else F.mse_loss(logits, labels)
            )
        return F.binary_cross_entropy_with_logits(logits, labels)


def _valid(attention_mask: Tensor | None, shape: torch.Size, host: HostValues) -> Tensor | None:
    """Return the mask of real tokens; None if all are."""
    if attention_mask is None:
        return None
    if attention_mask.shape != shape:
        raise UnsupportedError(
            f"attention_mask must have a number for each token {tuple(shape)}: its shape is "
            f"{tuple(attention_mask.shape)}. Masks with an entry for each pair of tokens are not "
            "supported. Mark padding with 0 in a mask of that shape."
        )
    return None if bool(host.read(attention_mask).all()) else attention_mask.to(torch.bool)


def _refuse(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False and name not in _IRRELEVANT:
            raise UnsupportedError(
                f"a replaced encoder of this class takes no {name}: {type(value).__name__} was "
                "given. It has no cache and no cross attention, and returns only the results of "
                f"its last layer. Leave {name} out."
            )
