"""Base class of models that are cut into stages, the cursor of a stage, and plans of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.gradient_slot import set_slot
from lightning_megatron.models.shape_inference import ShapeInference


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


class StageDone(BaseException):
    """Signal that ends the user's step on a stage that does not compute the loss.

    The pipeline executor catches it. It is not an ``Exception``, so that an ``except Exception`` in
    the user's step does not catch it.
    """


@dataclass
class StageCursor:
    """Selection of the virtual stage that a pipelined module runs, and the state of this run.

    Below, a "staged module" is a module whose blocks the user's code calls.

    Args:
        chunk: Index of this rank's chunk to run.
        received: Tensors from the previous virtual stage, ordered by call; empty on the first.
        probe: Whether to run without values, only to find the tensors that this stage will receive.
        plan: Plan of the step. None means that a probe finds the plan, and continues after the
            first call.
        sent: Tensors for the next virtual stage; set by the module.
        tensor_specs: Shapes and dtypes of the tensors that this stage receives; set by the module
            in a probe.
        calls: Number of model calls that have begun; counted by the module.
        next_block: Index of the block that must be called next; counted by a staged module.
        known: Values that have arrived from other stages or will be sent there, by name; set by a
            staged module.
        has_arrived: Whether values of other stages have arrived.
        may_stop: Whether a probe may end when the step needs a value, because all boundaries have
            been crossed.
        findings: Results of a probe without a plan.
        uses: Number of calls of each module outside of the blocks; counted by a staged module.
    """

    chunk: int
    received: Sequence[Tensor] = ()
    probe: bool = False
    plan: StepPlan | None = field(default_factory=StepPlan)
    sent: list[Tensor] = field(default_factory=list)
    tensor_specs: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    calls: int = 0
    next_block: int = 0
    known: dict[str, Tensor] = field(default_factory=dict)
    has_arrived: bool = False
    may_stop: bool = False
    findings: ProbeFindings = field(default_factory=ProbeFindings)
    uses: Counter[str] = field(default_factory=Counter)

    def use_of(self, name: str) -> str:
        """Count a call of a module outside of the blocks, and return the name of its result."""
        self.uses[name] += 1
        return f"{name}#{self.uses[name]}:out"

    def stop_probe(self) -> None:
        """Raise ``StageDone`` in a probe that has passed all boundaries: the step needs a value."""
        if self.probe and self.plan is None and self.may_stop:
            raise StageDone

    def begin_call(self) -> None:
        """Count a call of the model, and refuse more calls than the plan has."""
        self.calls += 1
        if self.plan is not None and self.calls > self.plan.num_calls:
            raise UnsupportedError(wrong_calls(self.plan.num_calls, f"at least {self.calls}"))
        self.may_stop = False

    @property
    def is_last_call(self) -> bool:
        """Return whether this is the last call of the model in the step."""
        return self.plan is not None and self.calls == self.plan.num_calls


def _nothing() -> None:
    """Do nothing, because all parameters are complete."""


class PipelinedModule(nn.Module):
    """Module that runs as a whole, or one virtual stage at a time if a cursor is set.

    A subclass has the layers of this rank's virtual stages. Its ``forward`` ends with a call of
    ``run_stage``, or reads the cursor directly.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.num_chunks: int = mesh.layout.vpp
        self.cursor: StageCursor | None = None
        #: Side calls of the running step; None outside of steps.
        self.side_calls: Any = None
        #: Function that waits until all parameters are complete, for training that gathers them
        #: asynchronously after each step.
        self.wait_for_parameters: Callable[[], None] = _nothing
        self.shape_inference = ShapeInference()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """Return a copy with the attributes of parameters, which torch does not copy."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__ = deepcopy(self.__dict__, memo)
        for parameter, twin in zip(self.parameters(), result.parameters(), strict=True):
            vars(twin).update(vars(parameter))
            # The copy is not trained. Its gradients must not be added to the original's slots.
            set_slot(twin, None)
        return result

    def gather_groups(self) -> list[nn.Module]:
        """Return modules that partition the parameters; each reads only its parameters.

        A module may also read parameters that an earlier module has read in the same forward pass.
        """
        groups: list[nn.Module] = []
        for child in self.children():
            groups += (
                child.children() if isinstance(child, (nn.ModuleDict, nn.ModuleList)) else [child]
            )
        return groups

    def chunk_of(self, name: str) -> int | None:
        """Return the chunk of this stage that reads a parameter; None if several may read it."""
        return 0 if self.num_chunks == 1 else None

    def stage_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that no other stage has."""
        return self.parameters()

    def is_first_stage(self, chunk: int = 0) -> bool:
        """Return whether a chunk of this rank is the first virtual stage, with the embedding."""
        return self.mesh.pp.is_first and chunk == 0

    def is_last_stage(self, chunk: int | None = None) -> bool:
        """Return whether a chunk (None: the last one) is the last virtual stage, with the head."""
        return self.mesh.has_loss and chunk in (None, self.num_chunks - 1)

    def run_stage(
        self,
        run: Callable[[int, Tensor | None], Any],
        boundary: Callable[[], tuple[torch.Size, torch.dtype]],
        unknown: Callable[[], Any],
    ) -> Any:
        """Run the whole model, or the virtual stage that the cursor selects.

        Args:
            run: Function that runs a chunk on the hidden states of the previous virtual stage, or
                on the inputs of the model if they are None. It returns hidden states, or on the
                last virtual stage the result.
            boundary: Function that returns the shape and dtype of hidden states between stages.
            unknown: Function that returns the result with placeholders instead of tensors.

        Returns:
            Result on the last virtual stage. On other stages, the return value of ``unknown`` if
            the step will call the model again.

        Raises:
            StageDone: At the last call of a step, in probes and on all stages except the last.
        """
        cursor = self.cursor
        if cursor is None:
            hidden = None
            for chunk in range(self.num_chunks):
                hidden = run(chunk, hidden)
            return hidden
        cursor.begin_call()
        if cursor.probe:
            cursor.tensor_specs.append(boundary())
        else:
            is_first = self.is_first_stage(cursor.chunk)
            hidden = run(cursor.chunk, None if is_first else cursor.received[cursor.calls - 1])
            if self.is_last_stage(cursor.chunk):
                return hidden
            cursor.sent.append(hidden)
        if cursor.is_last_call:
            raise StageDone
        cursor.may_stop = True
        return unknown()

    @contextmanager
    def without_other_stages(self) -> Iterator[None]:
        """Skip computation outside of the blocks that belongs to other virtual stages.

        In a probe, all computation is skipped.
        """
        yield

    def plan_of(self, cursor: StageCursor, result: Any) -> StepPlan:
        """Return the plan that follows from a probe; no result means that the step did not end."""
        return StepPlan(cursor.calls)

    def note_use(self, tensor: Tensor) -> None:
        """Record, in a probe, that the last stage needs the values of a tensor."""

    def check_has_all_stages(self) -> None:
        """Raise if the whole model is called and this rank has only some of its stages."""
        if self.cursor is None and self.mesh.pp.size > 1:
            raise UnsupportedError(
                f"a model cut into {self.mesh.pp.size} pipeline stages cannot be called outside of "
                "steps, because this rank holds one stage. Call it inside training_step, "
                "validation_step, test_step or predict_step."
            )


#: Attribute of a module that refers to the pipelined module that computes for it.
_COMPUTED_BY = "computed_by"


def pipelined_modules(root: nn.Module) -> Iterator[tuple[str, PipelinedModule]]:
    """Yield the pipelined modules inside a module, with their names.

    A pipelined module that computes for another module without being its child
    (:func:`set_computed_by`) has the name of that module.
    """
    for name, module in root.named_modules():
        if isinstance(module, PipelinedModule):
            yield name, module
        elif (computing := computed_by(module)) is not None:
            yield name, computing


def named_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules inside a module by name, including those inside its pipelined modules."""
    yield from root.named_modules()
    for name, model in pipelined_modules(root):
        if isinstance(root.get_submodule(name), PipelinedModule):
            continue
        yield from model.named_modules(prefix=name)


def computed_by(module: nn.Module) -> PipelinedModule | None:
    """Return the pipelined module that computes for a module; None without one."""
    computing = vars(module).get(_COMPUTED_BY)
    return computing if isinstance(computing, PipelinedModule) else None


def set_computed_by(module: nn.Module, model: PipelinedModule) -> None:
    """Record that a pipelined module computes for a module, without making it a child.

    The module keeps the names of the parameters with which the other one computes.
    """
    vars(module)[_COMPUTED_BY] = model
