"""Slot of a chunk: its graphs, and the microbatch that occupies it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.graphs.captured_piece import (
    CapturedPiece,
    CaptureTools,
    StaticPiece,
)
from lightning_megatron.graphs.piece_memory import PieceMemory, Tenant
from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.plan.actions import PipelineUnit


class Slot:
    """Graphs of a chunk for one microbatch between its forward and the end of its backward pass.

    The first backward pass of a step overwrites the gradient sums, and all others add to them. The
    slot that runs it has two sets of graphs, which share memory, since one microbatch at a time
    occupies the slot.

    Args:
        label: Description of the slot, such as ``chunk 0, slot 1``.
        pieces: Static pieces of the chunk, by number in execution order.
        tools: Tools of the captures.
    """

    def __init__(self, label: str, pieces: Mapping[int, StaticPiece], tools: CaptureTools) -> None:
        self.label = label
        self._pieces = dict(pieces)
        self._tools = tools
        self._memory = PieceMemory(tools.backend)
        self._sets: dict[bool, dict[int, CapturedPiece]] = {}
        self._transfers: list[PendingTransfers] = []

    def occupy(self, unit: PipelineUnit) -> None:
        """Let a microbatch occupy the slot, before its forward pass.

        Raises:
            RuntimeError: If another microbatch occupies it.
        """
        if self._memory.tenant is not None:
            raise RuntimeError(
                f"a slot of CUDA graphs holds one microbatch at a time: {self.label} holds "
                f"{self._memory.tenant.unit}, whose backward pass has not ended, when the forward "
                f"pass of {unit} begins. Its replay would overwrite the activations of the first."
            )
        for transfers in self._transfers:
            transfers.wait()
        self._transfers.clear()
        self._memory.tenant = Tenant(unit)

    def free(self) -> None:
        """Free the slot, after the backward pass."""
        self._memory.tenant = None

    def keep(self, transfers: PendingTransfers) -> None:
        """Wait for transfers from the slot's memory before the slot is occupied again."""
        self._transfers.append(transfers)

    def graphs(self, is_first: bool) -> dict[int, CapturedPiece]:
        """Return the graphs of all pieces by number.

        Args:
            is_first: Whether the backward pass overwrites the gradient sums.
        """
        if is_first not in self._sets:
            # The memory of the earlier set is free for this one.
            for piece in self._captured():
                piece.give_up()
            label = f"{self.label}, {'first' if is_first else 'later'} backward pass"
            self._sets[is_first] = {
                number: CapturedPiece(piece, self._memory, self._tools, label, is_first)
                for number, piece in self._pieces.items()
            }
        return self._sets[is_first]

    @property
    def num_graphs(self) -> int:
        """Return the number of captured graphs."""
        return sum(piece.num_graphs for piece in self._captured())

    def release(self) -> None:
        """Free all graphs."""
        for piece in self._captured():
            piece.release()
        self._sets.clear()
        self.free()

    def _captured(self) -> list[CapturedPiece]:
        return [one for found in self._sets.values() for one in found.values() if one.is_captured]
