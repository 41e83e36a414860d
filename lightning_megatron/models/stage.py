"""How a model that is cut into pipeline stages runs one piece of itself at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import set_slot


class StageDone(BaseException):
    """End the user's step on a stage that does not compute the loss; the pipeline executor catches it.

    Not an Exception, so that a user's ``except Exception`` around the model lets it pass.
    """


@dataclass
class StageCursor:
    """Tell a pipelined module which piece to run, and take its result.

    Args:
        chunk: The chunk of this stage to run.
        hidden: Input from the previous virtual stage; None on the first.
        output: Set by the module: the hidden for the next virtual stage.
        probe: Whether to report ``boundary`` and ``dtype`` and compute nothing.
        boundary: Set by the module when probed: shape of the hidden between stages for these inputs.
        dtype: Set by the module when probed: its dtype.
        turn: Counted by a module whose blocks are called by other code: the block that comes next.
    """

    chunk: int
    hidden: Tensor | None
    output: Tensor | None = None
    probe: bool = False
    boundary: torch.Size | None = None
    dtype: torch.dtype | None = None
    turn: int = 0


def _nothing() -> None:
    """Do nothing: parameters are whole."""


class PipelinedModule(nn.Module):
    """Run as a whole, or one virtual stage at a time when a cursor is set.

    A subclass holds the layers of this rank's virtual stages and ends its forward with ``run_stage``, or follows the
    cursor by itself.

    Args:
        mesh: The groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.num_chunks: int = mesh.layout.vpp
        self.cursor: StageCursor | None = None
        #: Waits until all parameters are whole, where a training gathers them behind its steps.
        self.wait_for_parameters: Callable[[], None] = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """Return a copy whose parameters know how they are cut, too; torch copies their values alone."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__ = deepcopy(self.__dict__, memo)
        for parameter, twin in zip(self.parameters(), result.parameters(), strict=True):
            vars(twin).update(vars(parameter))
            # The copy does not take part in a training that may be running.
            set_slot(twin, None)
        return result

    def units(self) -> list[nn.Module]:
        """List the modules that together read all parameters, in parts that each read only their own.

        A unit may also read what an earlier one of the same forward pass has read.
        """
        units: list[nn.Module] = []
        for child in self.children():
            units += child.children() if isinstance(child, (nn.ModuleDict, nn.ModuleList)) else [child]
        return units

    def chunk_of(self, name: str) -> int | None:
        """Return the chunk of this stage that reads a parameter; None if several may.

        Args:
            name: The parameter's name in this module.
        """
        return 0 if self.num_chunks == 1 else None

    def stage_parameters(self) -> Iterator[nn.Parameter]:
        """List the parameters that belong to this stage alone."""
        return self.parameters()

    def is_first_stage(self, chunk: int = 0) -> bool:
        """Tell whether ``chunk`` of this rank is the first virtual stage, which holds the embedding."""
        return self.mesh.pp.is_first and chunk == 0

    def is_last_stage(self, chunk: int | None = None) -> bool:
        """Tell whether ``chunk`` of this rank (None: its last one) is the last virtual stage, which holds the head."""
        return self.mesh.pp.is_last and chunk in (None, self.num_chunks - 1)

    def run_stage(
        self,
        enter: Callable[[], Tensor],
        middle: Callable[[Tensor, int], Tensor],
        leave: Callable[[Tensor], Any],
        boundary: Callable[[], tuple[torch.Size, torch.dtype]],
    ) -> Any:
        """Run the whole model, or the virtual stage that the cursor names.

        Args:
            enter: Computes the hidden from the inputs; called on the first virtual stage.
            middle: Runs the layers of a chunk.
            leave: Computes the result from the hidden; called on the last virtual stage.
            boundary: Returns shape and dtype of the hidden between stages.

        Returns:
            The result of ``leave``; only the last virtual stage returns.

        Raises:
            StageDone: On every other virtual stage, and when probed.
            UnsupportedError: If a model that is cut into stages is called without a cursor.
        """
        cursor = self.cursor
        if cursor is None:
            return leave(self._all_chunks(enter(), middle))
        if cursor.probe:
            cursor.boundary, cursor.dtype = boundary()
            raise StageDone
        hidden = enter() if self.is_first_stage(cursor.chunk) else cursor.hidden
        assert hidden is not None, "a virtual stage after the first needs the hidden of the one before"
        hidden = middle(hidden, cursor.chunk)
        if self.is_last_stage(cursor.chunk):
            return leave(hidden)
        cursor.output = hidden
        raise StageDone

    def _all_chunks(self, hidden: Tensor, middle: Callable[[Tensor, int], Tensor]) -> Tensor:
        for chunk in range(self.num_chunks):
            hidden = middle(hidden, chunk)
        return hidden

    def check_callable_whole(self) -> None:
        """Refuse a call of the whole model where this rank holds only some of its stages.

        Raises:
            UnsupportedError: If the model is cut over pp and no cursor is set.
        """
        if self.cursor is None and self.mesh.pp.size > 1:
            raise UnsupportedError(
                f"a model cut into {self.mesh.pp.size} pipeline stages cannot be called by itself, because this rank "
                "holds one stage. Call it inside training_step, validation_step, test_step or predict_step."
            )


#: Attribute of a module that computes with a pipelined module which is not among its children.
_COMPUTED_BY = "computed_by"


def pipelined_modules(root: nn.Module) -> Iterator[tuple[str, PipelinedModule]]:
    """List the pipelined modules inside a module, with the name of each or of the module that computes with it.

    A model that has taken over another's tree of modules and names keeps its own layers out of that tree.

    Args:
        root: Where to look.
    """
    for name, part in root.named_modules():
        if isinstance(part, PipelinedModule):
            yield name, part
        elif (found := computed_by(part)) is not None:
            yield name, found


def named_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List all modules inside a module, those of pipelined modules outside of its tree included, by name.

    Args:
        root: Where to look.
    """
    yield from root.named_modules()
    for name, model in pipelined_modules(root):
        if isinstance(root.get_submodule(name), PipelinedModule):
            continue
        yield from model.named_modules(prefix=name)


def computed_by(module: nn.Module) -> PipelinedModule | None:
    """Return the pipelined module that a module computes with and does not hold among its children, if any."""
    found = vars(module).get(_COMPUTED_BY)
    return found if isinstance(found, PipelinedModule) else None


def set_computed_by(module: nn.Module, model: PipelinedModule) -> None:
    """Say that a module computes with a pipelined module whose parameters it has under names of its own."""
    vars(module)[_COMPUTED_BY] = model
