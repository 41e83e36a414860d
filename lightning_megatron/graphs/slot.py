"""Slot of a chunk: its graphs, and the microbatch that occupies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from typing_extensions import override

from lightning_megatron.graphs.capture_tools import CapturedPart, CaptureTools
from lightning_megatron.graphs.graph_keys import ChunkKey
from lightning_megatron.graphs.recording import Recording
from lightning_megatron.graphs.slot_memory import SharedMemory, SlotMemory, Tenant
from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.plan.actions import PipelineUnit


class Slot:
    """Graphs of a chunk for one microbatch, from its forward pass to the end of its backward pass.

    The slot has a set of graphs for each key of the chunk's calls. The first backward pass of a
    step overwrites the gradient sums, and all others add to them, so that the slot that runs the
    first one has two sets for each key. All sets share memory, since one microbatch at a time
    occupies the slot.

    Args:
        label: Description of the slot, such as ``slot 1``.
        memory: Memory of the graphs; None creates memory for one microbatch at a time.
    """

    def __init__(self, label: str, tools: CaptureTools, memory: SlotMemory | None = None) -> None:
        self.label = label
        self._tools = tools
        self._memory = memory or SlotMemory(tools.backend)
        self._sets: dict[tuple[ChunkKey, bool], dict[int, Recording]] = {}
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

    def leave(self, unit: PipelineUnit) -> None:
        """Free the slot, after the backward pass of a microbatch."""
        self._memory.leave(unit)

    def free(self) -> None:
        """Free the slot of all microbatches."""
        self._memory.clear()

    def keep(self, transfers: PendingTransfers) -> None:
        """Wait for transfers from the slot's memory before the slot is occupied again."""
        self._transfers.append(transfers)

    def graphs(
        self, key: ChunkKey, is_first: bool, parts: Callable[[], Mapping[int, CapturedPart]]
    ) -> dict[int, Recording]:
        """Return the graphs of a key's parts by number.

        Args:
            key: Key of the call.
            is_first: Whether the backward pass overwrites the gradient sums.
            parts: Function that returns the parts of the chunk by number, for the mode of the key.
        """
        if (key, is_first) not in self._sets:
            for earlier in self._sets.values():
                _give_up(earlier)
            self._sets[key, is_first] = {
                number: Recording(part, self._memory, self._tools, self.label, is_first)
                for number, part in parts().items()
            }
        return self._sets[key, is_first]

    @property
    def keys(self) -> set[ChunkKey]:
        """Return the keys that have graphs."""
        return {key for (key, _), graphs in self._sets.items() if _num_graphs(graphs)}

    def num_graphs(self, has_backward: bool | None = None) -> int:
        """Return the number of captured graphs.

        Args:
            has_backward: Whether to count the graphs of passes with a backward pass, or those
                without one; None counts all.
        """
        return sum(
            _num_graphs(graphs)
            for (key, _), graphs in self._sets.items()
            if has_backward is None or key.mode.has_backward == has_backward
        )

    def release(self) -> None:
        """Free all graphs."""
        for graphs in self._sets.values():
            for recording in graphs.values():
                recording.release()
        self._sets.clear()
        self.free()


class SharedSlot(Slot):
    """Graphs of a chunk's layers that keep only their inputs, for all of its microbatches.

    Args:
        label: Description of the slot, such as ``shared slot``.
    """

    def __init__(self, label: str, tools: CaptureTools) -> None:
        super().__init__(label, tools, SharedMemory(tools.backend))

    @override
    def occupy(self, unit: PipelineUnit) -> None:
        """Let a microbatch use the slot, before its forward pass."""
        cast(SharedMemory, self._memory).enter(Tenant(unit))


def _num_graphs(graphs: Mapping[int, Recording]) -> int:
    return sum(recording.num_graphs for recording in graphs.values())


def _give_up(graphs: Mapping[int, Recording]) -> None:
    """Let later captures use the memory of a set of graphs.

    A set whose captures have not ended keeps its memory: what is still to be captured reads it.
    """
    if all(recording.is_complete for recording in graphs.values()):
        for recording in graphs.values():
            recording.give_up()
