"""Times of passes of parts of a model, summed over the operators that were traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.forecast.chip_speeds import ChipSpeeds, Link
from lightning_megatron.forecast.operator_trace import Operator
from lightning_megatron.forecast.traced_parts import PASSES, StageTrace

#: Times by name (s), which are sums over layers: "forward", "forward host", "forward exposed tp".
Times = Mapping[str, float]
#: Collectives whose tensors are parts of what all ranks have.
_PARTS = {"reduce_scatter"}


@dataclass(frozen=True)
class LinkedChip:
    """Chip of a rank, and the groups in which it communicates.

    Args:
        links: Group of each axis.
        eager: Whether the host launches each operator; otherwise graphs hold them.
    """

    speeds: ChipSpeeds
    links: Mapping[str, Link]
    eager: bool

    def collective(self, operator: Operator) -> float:
        """Return the time of a collective (s)."""
        link = self.links[operator.axis]
        parts = link.ranks if operator.name in _PARTS else 1
        return self.speeds.collective(operator.name, operator.num_bytes * parts, link)

    def times_of(
        self, passes: Sequence[tuple[Operator, ...]], prefix: str = ""
    ) -> defaultdict[str, float]:
        """Return the times of the passes of a microbatch."""
        times = defaultdict[str, float](float)
        for name, operators in zip(PASSES, passes, strict=True):
            times |= _queued(operators, self, name, prefix + name)
        return times

    def times_of_stage(self, trace: StageTrace) -> defaultdict[str, float]:
        """Return the times of a stage, and its numbers of parameters by their kind."""
        times = self.times_of(trace.later) | self.times_of(trace.first, "first ")
        return times | dict(trace.parameters)


def _queued(
    operators: Sequence[Operator], chip: LinkedChip, of_pass: str, name: str
) -> defaultdict[str, float]:
    """Return the times of operators that a device runs one after the other.

    A collective with a number runs beside the operators up to its wait, which it slows down. What
    the device waits for is exposed.
    """
    times = defaultdict[str, float](float)
    device = 0.0
    channel = 0.0
    flights: dict[int, tuple[float, float, float]] = {}
    for operator in operators:
        if operator.kind == "free":
            continue
        if operator.kind != "collective":
            device += chip.speeds.seconds_of(operator)
            continue
        before = device
        if operator.name == "wait":
            start, end, price = flights.pop(operator.number)
            hidden = max(0.0, min(device, end) - start)
            device = max(device, end) + price * hidden
        elif operator.number:
            start = max(channel, device)
            channel = start + chip.collective(operator)
            crosses = chip.links[operator.axis].crosses_nodes
            flights[operator.number] = start, channel, chip.speeds.price(operator.name, crosses)
        else:
            device = max(channel, device) + chip.collective(operator)
        times[f"{name} exposed {operator.axis}"] += device - before
    times[name] = device
    if chip.eager:
        times[f"{name} host"] = len(operators) * chip.speeds.host[of_pass]
    return times


def combined(parts: Iterable[tuple[int, Times]]) -> defaultdict[str, float]:
    """Return the sum of times, each so many times."""
    total = defaultdict[str, float](float)
    for count, times in parts:
        for name, seconds in times.items():
            total[name] += count * seconds
    return total


def added(parts: Iterable[Times]) -> defaultdict[str, float]:
    """Return the sum of times."""
    return combined((1, times) for times in parts)


def passes_of(times: Times) -> list[float]:
    """Return the time of each pass of a microbatch on the device (s)."""
    return [times.get(name, 0.0) for name in PASSES]


def host_of(times: Times) -> float:
    """Return what the host needs to launch the passes of a microbatch (s)."""
    return sum(times.get(f"{name} host", 0.0) for name in PASSES)
