"""Progress of one kind of steps from eager execution to replays of graphs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from lightning_megatron.graphs.addresses import Addresses
from lightning_megatron.graphs.agreement import KeyAgreement
from lightning_megatron.graphs.step_kind import StepKind


@dataclass
class CapturePhase:
    """Progress of one kind of steps: first eager steps, then captures, then replays.

    Args:
        kind: Kind of the steps.
        num_eager_left: Eager steps that must still run before the captures (steps).
        num_capturing: Number of steps that together capture every graph, such as those of one
            optimizer step with accumulated gradients (steps).
        keys: Agreement with ranks that read other data; None if no graph contains collectives
            with them.
        num_capturing_left: Number of next steps after which ranks exchange failures of captures
            (steps).
        addresses: Addresses of tensors at the start of the captures; None before.
    """

    kind: StepKind
    num_eager_left: int
    num_capturing: int
    keys: KeyAgreement | None = None
    num_capturing_left: int = 0
    addresses: Addresses | None = field(default=None, repr=False)

    @property
    def has_begun(self) -> bool:
        """Return whether the captures have begun."""
        return self.addresses is not None

    def begin(self, addresses: Addresses) -> None:
        """Begin the captures.

        Args:
            addresses: Addresses that the graphs will use.
        """
        self.addresses = addresses
        self.num_capturing_left = self.num_capturing

    def start_again(self) -> None:
        """Schedule one eager step before new captures; called after the graphs were released."""
        if self.has_begun:
            self.num_eager_left = 1
        self.addresses = None
        self.num_capturing_left = 0

    def may_replay(self, shapes: Hashable, has_changed: bool) -> bool:
        """Return whether this rank may capture and replay in a step.

        Args:
            shapes: Shapes of this rank's batch.
            has_changed: Whether tensors that graphs use have changed on this rank since the
                captures.

        Raises:
            RankMismatchError: If shapes or parameters change with ``fixed_shapes=True``.

        Communication: that of :class:`KeyAgreement`.
        """
        if not self.has_begun:
            return False
        if self.keys is None:
            return not has_changed
        return self.keys.agree([has_changed, shapes]) and not has_changed
