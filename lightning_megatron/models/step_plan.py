"""Plans of the values that a step sends between pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class StepPlan:
    """Number of model calls in a step, and the values that cross each boundary between stages.

    A plan is the same on all ranks and for all batches.

    Args:
        inputs: Indices of the argument leaves of a virtual stage's first block that come from the
            previous stage, by call (from 1) and virtual stage. Empty for a model that sends one
            tensor of hidden states.
        extras: Names of the additional values that each virtual stage receives after the inputs.
    """

    num_calls: int = 1
    inputs: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    extras: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def extra_names(self) -> frozenset[str]:
        """Return the names of all additional values that cross a boundary."""
        return frozenset(name for names in self.extras.values() for name in names)


class ValueOrigin(NamedTuple):
    """Origin of a value that can be sent between stages.

    Args:
        stage: Virtual stage that computes the value.
        call: Number of model calls that had begun.
        next_block: Index of the block that was to be called next.
        line: Line of the user's code that computed the value.
    """

    stage: int
    call: int
    next_block: int
    line: str


@dataclass
class ProbeFindings:
    """Findings of a probe of a step.

    Args:
        inputs: Inputs of virtual stages, as in :class:`StepPlan`.
        origins: Origins of the values that can be sent between stages, by name.
        needs: Pairs of a virtual stage and the name of a value of an earlier stage that it reads.
        bound: Inputs of the first block of each virtual stage, by identity.
        recorded_uses: Values whose uses have been recorded, by virtual stage and identity.
    """

    inputs: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    needs: set[tuple[int, str]] = field(default_factory=set)
    bound: dict[int, dict[int, object]] = field(default_factory=dict)
    recorded_uses: dict[tuple[int, int], object] = field(default_factory=dict)


def wrong_calls(expected: int, count: object) -> str:
    """Return the message for a step with an unexpected number of model calls."""
    return (
        "with pp above 1 every step must call the pipelined model the same number of times, at "
        f"least once: {count} calls were made, {expected} expected. The first step counts the "
        "calls before the first line that reads a value of a result, such as .item() or an if, "
        "because other stages do not have this value. Make the same calls in every step, all "
        "before such a line, or use pp=1."
    )
