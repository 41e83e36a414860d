"""What a step passes between pipeline stages: how often it calls the model, and which values cross each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class StepPlan:
    """Say how often a step calls the model, and what crosses each boundary; the same on all ranks and for all batches.

    Args:
        num_calls: Calls of the model in one step.
        inputs: Which leaves of the arguments of the first block of a virtual stage come from the stage before, by call
            (from 1) and virtual stage; empty for a model whose stages pass one hidden.
        extras: Names of further values that a virtual stage receives after those.
    """

    num_calls: int = 1
    inputs: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    extras: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def travellers(self) -> frozenset[str]:
        """Return the names of all further values that cross a boundary."""
        return frozenset(name for names in self.extras.values() for name in names)


class Made(NamedTuple):
    """Say where and when a step makes a value that can travel.

    Args:
        stage: The virtual stage that computes it.
        call: Calls of the model that had begun.
        turn: The block whose turn it was.
        line: The user's line that made it.
    """

    stage: int
    call: int
    turn: int
    line: str


@dataclass
class Found:
    """Collect what a probe of a step finds out.

    Args:
        inputs: As in StepPlan.
        made: The values that can travel, by name.
        needs: Virtual stages, and the names of the values of earlier ones that they read.
        bound: By virtual stage, the tensors that it receives as inputs of its first block.
        seen: Virtual stages, and tensors of which is known what they need.
    """

    inputs: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    needs: set[tuple[int, str]] = field(default_factory=set)
    bound: dict[int, dict[int, object]] = field(default_factory=dict)
    seen: dict[tuple[int, int], object] = field(default_factory=dict)


def wrong_calls(expected: int, found: object) -> str:
    """Return the message for a step that calls the model another number of times than expected."""
    return (
        "with more than one pipeline stage, every step must call the pipelined model, and equally often: "
        f"{found} calls were made, {expected} expected. The calls are counted once, in the first step, up to a "
        "place that needs the values of a result, such as .item() or an if: other stages do not have them. Make "
        "the same calls in every step, all before such a place, or use pp=1."
    )
