"""Outputs of replaced models, with the interface of Hugging Face's outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_megatron.layers.key_value_cache import KeyValueCache


class _Output:
    """Output that is read by name or position, without the entries that are None."""

    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None

    def keys(self) -> tuple[str, ...]:
        """List the names of the entries that are not None."""
        raise NotImplementedError

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry by name, or a default if the entry is None.

        Args:
            key: Name of the entry.
            default: Value to return instead of None.
        """
        names = self.keys()
        return getattr(self, key) if key in names else default

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the entries that are not None, in Hugging Face's order."""
        return tuple(getattr(self, key) for key in self.keys())

    def __contains__(self, key: object) -> bool:
        """Return whether an entry is not None, by its name."""
        return key in self.keys()

    def __getitem__(self, key: int | slice | str) -> Any:
        """Return an entry by name or position."""
        if isinstance(key, str):
            if key not in self.keys():
                raise KeyError(key)
            return getattr(self, key)
        names = self.keys()[key]
        return (
            getattr(self, names)
            if isinstance(names, str)
            else tuple(getattr(self, name) for name in names)
        )


class CausalLMOutput(_Output):
    """Output of a causal language model: the loss, and logits gathered on access.

    Equal to Hugging Face's CausalLMOutputWithPast: attributes, keys and positions, without entries
    that are None.

    Args:
        loss: Mean over the labels; None without labels.
        gather: Function that returns the logits ``(B, S, V)``; called at the first access, on all
            tensor-parallel ranks or none.
        hidden_states: Input of every layer and output of the last norm, each ``(B, S, D)``; None if
            not requested.
    """

    #: Cache that stored the tokens; None means none.
    cache: KeyValueCache | None = None
    #: The name of the cache before transformers 5.24.
    past_key_values: KeyValueCache | None = None

    def __init__(
        self,
        loss: Tensor | None,
        gather: Callable[[], Tensor],
        hidden_states: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.loss = loss
        self._gather: Callable[[], Tensor] | None = gather
        self.hidden_states = hidden_states
        self._logits: Tensor | None = None
        if loss is not None and loss.requires_grad:
            # The backward pass of a fused loss writes the gradient over this rank's logits. The
            # loss must not refer to the output, or the logits of every microbatch would stay in
            # memory until a garbage collection.
            loss.register_hook(partial(_release_graph, weakref.ref(self)))

    @property
    def logits(self) -> Tensor:
        """Return the logits of the true vocabulary.

        Raises:
            RuntimeError: If the first read is after the backward pass.
        """
        if self._logits is None:
            if self._gather is None:
                raise RuntimeError(
                    "logits must be read before the backward pass of the loss, which uses their "
                    "memory for the gradient. Read output.logits in training_step."
                )
            self._logits = self._gather()
        return self._logits

    def spend(self) -> None:
        """Free the logits, and refuse further reads of them."""
        self._gather = None

    @override
    def keys(self) -> tuple[str, ...]:
        names = ("logits",) if self.loss is None else ("loss", "logits")
        further = ("cache", "past_key_values", "hidden_states")
        return (*names, *(name for name in further if getattr(self, name) is not None))


def _release_graph(output: weakref.ref[CausalLMOutput], _: Tensor) -> None:
    released = output()
    if released is not None:
        released.spend()


class MaskedLMOutput(CausalLMOutput):
    """Output of a masked language model: the loss, and logits gathered on access.

    Equal to Hugging Face's MaskedLMOutput: attributes, keys and positions, without entries that are
    None.
    """


class SpanOutput(_Output):
    """Output of a model that finds the start and the end of an answer.

    Equal to Hugging Face's QuestionAnsweringModelOutput: attributes, keys and positions, without
    entries that are None.

    Args:
        loss: Mean of the losses of starts and of ends; None without positions.
        start_logits: Logits of every token as the start ``(B, S)``.
        end_logits: Logits of every token as the end ``(B, S)``.
    """

    def __init__(self, loss: Tensor | None, start_logits: Tensor, end_logits: Tensor) -> None:
        self.loss = loss
        self.start_logits = start_logits
        self.end_logits = end_logits

    @override
    def keys(self) -> tuple[str, ...]:
        names = ("start_logits", "end_logits")
        return names if self.loss is None else ("loss", *names)


class EncoderOutput(_Output):
    """Output of an encoder, a sequence classifier or a multiple-choice model.

    Equal to Hugging Face's BaseModelOutputWithPoolingAndCrossAttentions, SequenceClassifierOutput
    and MultipleChoiceModelOutput: attributes, keys and positions, without entries that are None.

    Args:
        loss: Mean over the labels.
        logits: Logits of the classes ``(B, num_labels)``, or of the answers ``(B, choices)``.
        last_hidden_state: Output of the last layer ``(B, S, D)``.
        pooler_output: Output of the pooler ``(B, D)``.
    """

    cache: None = None
    past_key_values: None = None
    cross_attentions: None = None

    def __init__(
        self,
        loss: Tensor | None = None,
        logits: Tensor | None = None,
        last_hidden_state: Tensor | None = None,
        pooler_output: Tensor | None = None,
    ) -> None:
        self.loss = loss
        self.logits = logits
        self.last_hidden_state = last_hidden_state
        self.pooler_output = pooler_output

    @override
    def keys(self) -> tuple[str, ...]:
        names = ("loss", "logits", "last_hidden_state", "pooler_output")
        return tuple(name for name in names if getattr(self, name) is not None)
