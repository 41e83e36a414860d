"""Record of the gradients of a captured backward pass, which every replay repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.shapes import Int
from lightning_megatron.training.gradient_bucket import GradientBucket


@dataclass(frozen=True)
class RecordedGradients:
    """Gradients that a recorded backward pass added.

    Args:
        groups: Names of the parameters whose gradients arrived together, in the order of arrival. A
            parameter that the model uses twice occurs in two groups.
        additions: Gradient slot of each name of the groups, in their order; the argument of
            ``WeightGradientQueue.put`` for the replay of a weight half.
        slots: Gradient slots to which the pass added, each once.
        sums: Buckets that the pass sums over the ranks.
        unused: Slots in these buckets that get no gradient and are filled with zeros, by the names
            of their parameters.
        is_first: Whether the slots were empty before, so that the pass overwrote them. Otherwise it
            added to them.
        rows: Rows of the gradients, for slots that got gradients of rows only.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    additions: tuple[GradientSlot, ...] = ()
    slots: tuple[GradientSlot, ...] = ()
    is_first: bool = True
    sums: tuple[GradientBucket, ...] = ()
    unused: Mapping[str, GradientSlot] = field(default_factory=dict)
    rows: Mapping[GradientSlot, tuple[Int[Tensor, "rows"], ...]] = field(default_factory=dict)


class GradientRecorder:
    """Collector of the gradients that arrive while a recording is active.

    Args:
        slots: All slots that may get gradients, by the names of their parameters.
        holds_sums: Whether sums over the ranks start during the recording, as a part of it.
    """

    def __init__(self, slots: Mapping[str, GradientSlot], holds_sums: bool = False) -> None:
        #: Whether sums over the ranks start during the recording.
        self.holds_sums = holds_sums
        #: Buckets whose sums have started.
        self.sums: list[GradientBucket] = []
        #: Slots in these buckets for which no gradient has arrived.
        self.unused: dict[str, GradientSlot] = {}
        self._slots = slots
        self._were_empty = {name: slot.is_empty for name, slot in slots.items()}
        self._groups: list[tuple[str, ...]] = []
        self._rows: dict[GradientSlot, tuple[Tensor, ...] | None] = {}

    def note(self, names: Sequence[str]) -> None:
        """Record gradients that have arrived together."""
        self._groups.append(tuple(names))
        for slot in map(self._slots.__getitem__, names):
            self._rows[slot] = slot.rows

    @property
    def recorded(self) -> RecordedGradients:
        """Return the recorded gradients.

        Raises:
            RuntimeError: If some of the slots were empty before and others were not.
        """
        names = [name for group in self._groups for name in group]
        written = dict.fromkeys(names)
        overwritten = [name for name in written if self._were_empty[name]]
        if overwritten and len(overwritten) < len(written):
            added = next(name for name in written if not self._were_empty[name])
            raise RuntimeError(
                "a recorded backward pass must overwrite all its gradient sums, or add to all of "
                f"them: it overwrote {len(overwritten)} of {len(written)}, such as that of "
                f"{overwritten[0]!r}, and added to others, such as that of {added!r}. A replay "
                "would be right only where exactly these sums are empty. Give recording() the "
                "state 'empty' or 'filled'."
            )
        return RecordedGradients(
            tuple(self._groups),
            tuple(self._slots[name] for name in names),
            tuple(self._slots[name] for name in written),
            len(overwritten) == len(written),
            tuple(self.sums),
            dict(self.unused),
            {slot: rows for slot, rows in self._rows.items() if rows is not None},
        )
