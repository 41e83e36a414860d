"""Actions: the computations of which the rows of a schedule consist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""F forward, B backward, or the halves of B: I input gradient, W weight gradient."""


@dataclass(frozen=True, order=True)
class PipelineUnit:
    """One microbatch in one chunk of a stage, whose forward and backward pass form a unit."""

    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"microbatch {self.microbatch} in chunk {self.chunk}"


class Action(NamedTuple):
    """Computation of one microbatch in one chunk of a stage."""

    kind: Kind
    chunk: int
    microbatch: int

    @property
    def unit(self) -> PipelineUnit:
        """Return the chunk and the microbatch."""
        return PipelineUnit(self.chunk, self.microbatch)

    @property
    def actions(self) -> list[Action]:
        """Return this action alone, the counterpart of :attr:`PassPair.actions`."""
        return [self]

    def __str__(self) -> str:
        return f"{self.kind} of {self.unit}"


@dataclass(frozen=True)
class PassPair:
    """Forward of one microbatch and backward of another, between which a stage switches."""

    forward: Action
    backward: Action

    @property
    def actions(self) -> list[Action]:
        """Return both actions."""
        return [self.forward, self.backward]


class RowBuilder:
    """Row of one stage in which each kind of action takes the microbatches of a chunk in order.

    Weight halves are due after their input halves, and run in the order in which they became due.
    """

    def __init__(self) -> None:
        self._row: list[Action] = []
        self._started: dict[tuple[str, int], int] = {}
        self._due: list[Action] = []

    @property
    def row(self) -> tuple[Action, ...]:
        """Return the actions so far."""
        return tuple(self._row)

    @property
    def num_due(self) -> int:
        """Return the number of weight halves that are due."""
        return len(self._due)

    def forward(self, chunk: int = 0) -> None:
        """Add the forward of the chunk's next microbatch."""
        self._row.append(Action("F", chunk, self._next("F", chunk)))

    def backward(self, chunk: int = 0) -> None:
        """Add the whole backward of the chunk's next microbatch."""
        self._row.append(Action("B", chunk, self._next("B", chunk)))

    def input_half(self, chunk: int = 0) -> None:
        """Add the input half of the chunk's next backward; its weight half is then due."""
        microbatch = self._next("B", chunk)
        self._row.append(Action("I", chunk, microbatch))
        self._due.append(Action("W", chunk, microbatch))

    def weight_half(self, chunk: int | None = None) -> None:
        """Add the weight half that has been due longest, if any, of one chunk or of all chunks."""
        for action in self._due:
            if chunk is None or action.chunk == chunk:
                self._due.remove(action)
                self._row.append(action)
                return

    def split_backward(self, chunk: int = 0) -> None:
        """Add both halves of the chunk's next backward, if no earlier weight half is due."""
        self.input_half(chunk)
        self.weight_half(chunk)

    def _next(self, kind: str, chunk: int) -> int:
        microbatch = self._started.get((kind, chunk), 0)
        self._started[kind, chunk] = microbatch + 1
        return microbatch
