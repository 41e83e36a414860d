"""How a model that is cut into pipeline stages runs one piece of itself at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import set_slot
from lightning_megatron.models.absent import AbsentTensor
from lightning_megatron.models.forms import Forms
from lightning_megatron.models.step_plan import Found, StepPlan, wrong_calls


class StageDone(BaseException):
    """End the user's step on a stage that does not compute the loss; the pipeline executor catches it.

    Not an Exception, so that a user's ``except Exception`` around the model lets it pass.
    """


@dataclass
class StageCursor:
    """Tell a pipelined module which virtual stage to run, and take what it gives to the next.

    Args:
        chunk: The chunk of this stage to run.
        received: What the previous virtual stage sent, call after call; nothing on the first.
        probe: Whether to compute nothing, and report what this stage will receive.
        plan: How often the step calls the model, and what it passes on; None finds that out, in a probe that goes
            on behind the first call.
        sent: Set by the module: what the next virtual stage receives.
        forms: Set by the module when probed: shapes and types of what this stage receives.
        calls: Counted by the module: calls that have begun.
        turn: Counted by a module whose blocks are called by other code: the block that comes next.
        known: Set by such a module: values that have come from other stages, or will go there, by name.
        has_arrived: Whether any value of another stage is here.
        may_stop: Whether a probe may end where the step needs a value, because all boundaries have been crossed.
        found: What a probe without a plan finds out.
        uses: Counted by such a module: how often each module beside the blocks has been called.
    """

    chunk: int
    received: Sequence[Tensor] = ()
    probe: bool = False
    plan: StepPlan | None = field(default_factory=StepPlan)
    sent: list[Tensor] = field(default_factory=list)
    forms: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    calls: int = 0
    turn: int = 0
    known: dict[str, Tensor] = field(default_factory=dict)
    has_arrived: bool = False
    may_stop: bool = False
    found: Found = field(default_factory=Found)
    uses: Counter[str] = field(default_factory=Counter)

    def use_of(self, name: str) -> str:
        """Count a call of a module beside the blocks, and return the name of its result."""
        self.uses[name] += 1
        return f"{name}#{self.uses[name]}:out"

    def stop_probe(self) -> None:
        """End a probe that has seen enough, where the step needs a value.

        Raises:
            StageDone: If so.
        """
        if self.probe and self.plan is None and self.may_stop:
            raise StageDone

    def begin_call(self) -> None:
        """Count a call of the model.

        Raises:
            UnsupportedError: If the step has made all the calls that were expected.
        """
        self.calls += 1
        if self.plan is not None and self.calls > self.plan.num_calls:
            raise UnsupportedError(wrong_calls(self.plan.num_calls, f"at least {self.calls}"))
        self.may_stop = False

    @property
    def is_last_call(self) -> bool:
        """Return whether the step will not call the model again."""
        return self.plan is not None and self.calls == self.plan.num_calls


def _value(leaf: Any) -> Any:
    return leaf.settle("the step returns it") if isinstance(leaf, AbsentTensor) else leaf


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
        self.forms = Forms()

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
        unknown: Callable[[], Any],
    ) -> Any:
        """Run the whole model, or the virtual stage that the cursor names.

        Args:
            enter: Computes the hidden from the inputs; called on the first virtual stage.
            middle: Runs the layers of a chunk.
            leave: Computes the result from the hidden; called on the last virtual stage.
            boundary: Returns shape and dtype of the hidden between stages.
            unknown: Returns the result with tensors that have no values.

        Returns:
            The result of ``leave`` on the last virtual stage; that of ``unknown`` on others, where the step will
            call the model again.

        Raises:
            StageDone: On every other virtual stage, and when probed, at the last call of a step.
            UnsupportedError: If a model that is cut into stages is called without a cursor, or too often.
        """
        cursor = self.cursor
        if cursor is None:
            return leave(self._all_chunks(enter(), middle))
        cursor.begin_call()
        if cursor.probe:
            cursor.forms.append(boundary())
        else:
            hidden = enter() if self.is_first_stage(cursor.chunk) else cursor.received[cursor.calls - 1]
            hidden = middle(hidden, cursor.chunk)
            if self.is_last_stage(cursor.chunk):
                return leave(hidden)
            cursor.sent.append(hidden)
        if cursor.is_last_call:
            raise StageDone
        cursor.may_stop = True
        return unknown()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let nothing beside the blocks compute that is of another virtual stage, and nothing at all in a probe."""
        yield

    def plan_of(self, cursor: StageCursor, result: Any) -> StepPlan:
        """Return what a probe has found out.

        Args:
            cursor: That of the probe.
            result: What the step returned; None if it came to no end.
        """
        return StepPlan(cursor.calls)

    def note_use(self, tensor: AbsentTensor) -> None:
        """Note, in a probe, that the last stage needs the values of a tensor."""

    def settled(self, result: Any) -> Any:
        """Return what a step returned, with values for all tensors in it.

        Raises:
            UnsupportedError: If one is on another stage.
        """
        if not any(isinstance(leaf, AbsentTensor) for leaf in pytree.tree_leaves(result)):
            return result
        return pytree.tree_map(_value, result)

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
