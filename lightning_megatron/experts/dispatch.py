"""How tokens come to the ranks that hold their experts, and what the experts made of them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_megatron.experts.permute import RowMap, map_rows, permute, permute_probabilities, unpermute
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_scatter_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.shards import ShardRange, even_range


@dataclass(frozen=True)
class Dispatched:
    """Hold what the experts of this rank compute on.

    Shapes: rows ``(R, D)``; probabilities ``(R)``; ends ``(E/ep)`` int32 on the device.

    Args:
        rows: Tokens sorted by expert; those past the last end are of no expert.
        probabilities: What every row's output is multiplied by.
        row_map: Where the choices of tokens lie in the rows.
    """

    rows: Tensor
    probabilities: Tensor
    row_map: RowMap

    @property
    def ends(self) -> Tensor:
        """Return one past the last row of every expert here."""
        return self.row_map.ends


class Dispatcher(Protocol):
    """Bring tokens to experts and back; nothing is kept between the two calls but what the first returns."""

    def dispatch(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Dispatched:
        """Bring every token to the experts that it chose.

        Shapes: hidden ``(T, D)``; probabilities and experts ``(T, k)``.

        Args:
            hidden: This rank's tokens.
            probabilities: What the outputs of the chosen experts are multiplied by.
            experts: Numbers of the chosen experts in the whole layer; -1 stands for none.
        """

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring outputs, already times their probabilities, back to the tokens and add them up.

        Shapes: outputs ``(R, D)``, undefined past the last end; result ``(T, D)``.
        """


@dataclass(frozen=True)
class GatherDispatcher:
    """Give every rank of the expert grid the tokens of all, and add up what each made of those that are its own.

    Sizes are static, nothing is read back from the device, and no token is dropped whatever the routing is. Without
    axes, or with axes of one rank, tokens stay where they are.

    The ranks of the axes hold different tokens, equally many. Over etp, whose ranks hold parts of the inner features of
    the same experts, the sum of tokens' parts is the sum that tensor parallelism needs.

    Args:
        here: The experts of this rank.
        axes: Over which tokens are gathered.

    Communication: dispatch all-gathers tokens, probabilities and experts, backward it reduce-scatters the gradients of
        the former two; combine reduce-scatters outputs, backward it all-gathers their gradients.
    """

    here: ShardRange
    axes: tuple[MeshAxis, ...] = ()

    def dispatch(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Dispatched:
        """Gather all tokens and sort those that chose experts of this rank."""
        for axis in self.axes:
            hidden, probabilities, experts = (
                all_gather_sequence(tensor, axis) for tensor in (hidden, probabilities, experts)
            )
        row_map = map_rows(experts, self.here.start, self.here.size)
        return Dispatched(permute(hidden, row_map), permute_probabilities(probabilities, row_map), row_map)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Add up this rank's outputs of every token, then those of all ranks."""
        result = unpermute(outputs, dispatched.row_map)
        for axis in reversed(self.axes):
            result = reduce_scatter_sequence(result, axis)
        return result


@dataclass(frozen=True)
class DispatcherChoice:
    """Name the dispatcher of a layer, and why.

    Args:
        dispatcher: What brings tokens to experts.
        reason: Why this one, for the log.
    """

    dispatcher: Dispatcher
    reason: str


def choose_dispatcher(num_experts: int, mesh: ParallelMesh) -> DispatcherChoice:
    """Choose how tokens come to experts.

    Args:
        num_experts: Experts of the layer.
        mesh: The groups of this rank.

    Raises:
        ParallelPlanError: If the experts do not divide by ep.
    """
    here = even_range(num_experts, mesh.ep.size, mesh.ep.rank, what="num_experts", axis="ep")
    axes = tuple(axis for axis in (mesh.ep, mesh.etp) if axis.size > 1)
    if not axes:
        return DispatcherChoice(GatherDispatcher(here), "ep and etp are 1: this rank holds all experts whole")
    names = " and ".join(f"{axis.name} {axis.size}" for axis in axes)
    return DispatcherChoice(GatherDispatcher(here, axes), f"{names}: all-gather, the exact one of static sizes")
