"""Random draws of a captured computation: the stream and the position of each generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_megatron.groups.generators import GeneratorPool, MaskKeys, StreamName, StreamPosition
from lightning_megatron.shapes import Int

#: Kinds of moves of the random streams: ``stay`` at the position where the recording began,
#: ``begin`` a microbatch, ``enter`` a layer, ``replay`` a layer whose activations are recomputed,
#: or ``return`` from that replay.
MoveKind = Literal["stay", "begin", "enter", "replay", "return"]


@dataclass(frozen=True)
class Draw:
    """Random stream that a computation draws from at one position, once or several times.

    The stream is ``default`` for draws of the step itself, outside of layers.
    """

    stream: StreamName | Literal["default"]
    purpose: str
    generator: torch.Generator


@dataclass(frozen=True)
class MaskDraw:
    """Key of a dropout mask that a computation takes at one position."""

    purpose: str
    num_rows: int


@dataclass(frozen=True)
class Move:
    """Move of the random streams, and the draws until the next one.

    Args:
        position: Position after the move, at the capture.
        is_own: Whether the microbatch of the position began inside the recording. Otherwise the
            position at a replay has the microbatch of that replay.
    """

    kind: MoveKind
    position: StreamPosition
    is_own: bool = False
    in_backward: bool = False
    draws: tuple[Draw, ...] = ()
    masks: tuple[MaskDraw, ...] = ()


@dataclass(frozen=True)
class RecordedDraws:
    """Moves and draws of a recorded computation, for ``RandomStreams.seed_generators``."""

    moves: tuple[Move, ...] = ()
    keys: MaskKeys | None = None

    @property
    def draws(self) -> list[tuple[Draw, StreamPosition]]:
        """List the streams that are drawn from, each with its position at the capture."""
        return [(draw, move.position) for move in self.moves for draw in move.draws]

    @property
    def recomputes(self) -> bool:
        """Return whether draws of an earlier forward pass are repeated."""
        return any(move.kind == "replay" for move in self.moves)


class DrawRecorder:
    """Collector of the moves and draws of the random streams while a recording is active."""

    def __init__(self, pool: GeneratorPool, position: StreamPosition) -> None:
        self.pool = pool
        self._moves = [Move("stay", position)]
        self._draws: list[list[Draw]] = [[]]
        self._masks: list[list[MaskDraw]] = [[]]
        self._here: dict[tuple[StreamName, str], torch.Generator] = {}

    def move(self, kind: MoveKind, position: StreamPosition, in_backward: bool) -> None:
        """Record a move of all streams."""
        is_own = kind == "begin" or self._moves[-1].is_own
        self._moves.append(Move(kind, position, is_own, in_backward))
        self._draws.append([])
        self._masks.append([])
        self._here.clear()

    def generator_of(self, name: StreamName, purpose: str) -> tuple[torch.Generator, bool]:
        """Return the generator of a stream at this position, and whether it is new."""
        existing = self._here.get((name, purpose))
        if existing is not None:
            return existing, False
        self._here[name, purpose] = generator = self.new_generator(name, purpose)
        return generator, True

    def new_generator(
        self, name: StreamName | Literal["default"], purpose: str = ""
    ) -> torch.Generator:
        """Record a draw, and return the generator from which it is drawn."""
        generator = self.pool.take()
        self._draws[-1].append(Draw(name, purpose, generator))
        return generator

    def mask_key(self, draw: MaskDraw, values: Sequence[int]) -> Int[torch.Tensor, "4"]:
        """Record a dropout mask, and return the key that each replay reads."""
        self._masks[-1].append(draw)
        return self.pool.keys.take(None if self.pool.is_capturing else values)

    @property
    def recorded(self) -> RecordedDraws:
        """Return the recorded moves and draws, which may be empty."""
        moves = []
        for move, draws, masks in zip(self._moves, self._draws, self._masks, strict=True):
            used = [draw for draw in draws if not self.pool.is_idle(draw.generator)]
            moves.append(replace(move, draws=tuple(used), masks=tuple(masks)))
        if not (moves[0].draws or moves[0].masks):
            del moves[0]
        return RecordedDraws(tuple(moves), self.pool.keys if self.pool.keys.num_taken else None)
