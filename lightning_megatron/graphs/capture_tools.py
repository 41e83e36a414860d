"""Objects that all captures of one model share, and what is captured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.chunk_parts import ChunkPart
from lightning_megatron.graphs.effects import EffectObservers
from lightning_megatron.graphs.observation import Observation
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue

#: Memory for copies of gradients, by position, shape and dtype; see ``OutputGradients``.
GradientCopies = dict[tuple[int, torch.Size, torch.dtype], Tensor]


@dataclass
class CaptureNotes:
    """Outcome of the captures of one model.

    Args:
        failures: What could not be captured, and why.
        seconds: Time of all captures (seconds).
    """

    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class CaptureTools:
    """Objects that all captures of one model share.

    Args:
        backend: Backend that captures and replays.
        observers: Recorder of the effects outside of tensors.
        queue: Queue of the weight gradients of split backward passes.
        gradient_copies: Memory for gradients that eager code computes.
        notes: Outcome of the captures.
    """

    backend: CaptureBackend
    observers: EffectObservers
    random: RandomStreams
    queue: WeightGradientQueue
    gradient_copies: GradientCopies = field(default_factory=dict)
    notes: CaptureNotes = field(default_factory=CaptureNotes)

    @property
    def failure(self) -> str | None:
        """Return what could not be captured first, and why; None if nothing has failed."""
        return self.notes.failures[0] if self.notes.failures else None

    def note_failure(self, label: str, error: Exception) -> None:
        """Note that a capture has failed, after which everything runs eagerly."""
        self.notes.failures.append(f"{label}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class CapturedPart:
    """Part of a chunk, with what its capture needs.

    Args:
        observation: What an eager pass of the same mode has shown.
        redraws: Whether the backward pass recomputes activations with random draws.
    """

    part: ChunkPart
    observation: Observation
    wait_for: Callable[[Collection[nn.Parameter]], None] = lambda parameters: None
    redraws: bool = False
    has_backward: bool = True
