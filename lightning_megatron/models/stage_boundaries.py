"""Values that cross stage boundaries, for blocks that the user's code calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.remote_tensor import RemoteTensor, refuse
from lightning_megatron.models.stage import StageCursor, StageDone, StepPlan, ValueOrigin
from lightning_megatron.user_code import line_of_user


class StageBoundaries:
    """Record the values that cross stage boundaries in probes, and receive them in runs.

    ``starts`` are the first blocks of the virtual stages, in order.
    """

    def __init__(self, starts: Sequence[int], num_blocks: int) -> None:
        self.starts = tuple(starts)
        self.num_blocks = num_blocks

    @property
    def last(self) -> int:
        """Return the index of the last virtual stage."""
        return len(self.starts) - 1

    @property
    def is_last_empty(self) -> bool:
        """Return whether the last of several virtual stages has no blocks."""
        return self.last > 0 and self.starts[-1] == self.num_blocks

    def stage_of(self, index: int) -> int:
        """Return the index of the virtual stage of a block."""
        return bisect_right(self.starts, index) - 1

    def receive_extras(self, cursor: StageCursor, virtual_stage: int) -> None:
        """Register the received values that are not inputs of blocks, once in a step."""
        if cursor.probe or cursor.plan is None or cursor.has_arrived or not cursor.received:
            return
        names = cursor.plan.extras.get(virtual_stage, ())
        if names:
            cursor.known |= dict(zip(names, cursor.received[-len(names) :], strict=True))
            cursor.has_arrived = True

    def record_origin(
        self,
        cursor: StageCursor,
        value_name: str,
        tensor: RemoteTensor,
        stage: int,
        *,
        at_start: bool = False,
    ) -> None:
        """Record, in a probe, that a virtual stage computes a value.

        ``at_start`` means that the value exists before the step, such as a parameter; otherwise it
        is computed at this point of the step.
        """
        if cursor.probe:
            cursor.known[value_name] = tensor
            if cursor.plan is None:
                call = 0 if at_start else cursor.calls
                next_block = 0 if at_start else cursor.next_block
                cursor.findings.origins[value_name] = ValueOrigin(
                    stage, call, next_block, line_of_user()
                )

    def record_inputs(
        self,
        cursor: StageCursor,
        virtual_stage: int,
        prefix: str,
        leaves: Sequence[Any],
        stage: int,
        starts: bool,
    ) -> None:
        """Record, in a probe of ``virtual_stage``, the inputs of a block of ``stage``.

        ``leaves`` are those of the block's arguments, and ``prefix`` names them. ``starts`` tells
        whether the block is the first one of a virtual stage after the first stage.

        Raises:
            StageDone: If the block is the first of the probed virtual stage, in the last call.
        """
        numbers = tuple(
            number for number, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor)
        )
        if cursor.plan is None:
            # The previous stage sends the inputs of a stage's first block, so it must have their
            # values.
            for number in numbers:
                self.record_use(cursor, leaves[number], stage - 1 if starts else stage)
            if starts:
                cursor.findings.inputs[cursor.calls, stage] = numbers
                cursor.findings.bound.setdefault(stage, {}).update(
                    {id(leaves[number]): leaves[number] for number in numbers}
                )
        for number in numbers:
            if leaves[number].value_name is None:
                leaves[number].value_name = f"{prefix}:{number}"
                self.record_origin(cursor, leaves[number].value_name, leaves[number], stage)
        if starts and stage == virtual_stage and cursor.plan is not None:
            taken = cursor.plan.inputs.get((cursor.calls, stage))
            if taken != numbers:
                raise UnsupportedError(
                    "with pp above 1 the blocks must take the same tensors in every step: "
                    f"{prefix} takes the arguments {numbers} from earlier stages, and took {taken} "
                    "in the first step. Pass the same tensors in every step, or use pp=1."
                )
            cursor.tensor_specs += [
                (leaves[number].shape, leaves[number].dtype) for number in numbers
            ]
            if cursor.is_last_call:
                self.report_extras(cursor, cursor.plan.extras.get(virtual_stage, ()))
                raise StageDone

    def report_extras(self, cursor: StageCursor, names: Sequence[str]) -> None:
        """Report, in a probe, the shapes and dtypes of values that arrive by name."""
        extras = [cursor.known[name] for name in names]
        cursor.tensor_specs += [(extra.shape, extra.dtype) for extra in extras]

    def receive_inputs(
        self, cursor: StageCursor, prefix: str, leaves: Sequence[Any], stage: int
    ) -> list[Any]:
        """Return the argument leaves of a stage's first block, with received tensors filled in."""
        assert cursor.plan is not None, "only a probe has no plan"
        inputs = cursor.plan.inputs
        filled = list(leaves)
        before = sum(len(inputs[call, stage]) for call in range(1, cursor.calls))
        for position, number in enumerate(inputs[cursor.calls, stage], before):
            leaf = leaves[number]
            value = cursor.received[position]
            if isinstance(leaf, RemoteTensor):
                leaf.value = value
            cursor.known[f"{prefix}:{number}"] = filled[number] = value
        cursor.has_arrived = True
        return filled

    def keep_values(self, cursor: StageCursor, prefix: str, leaves: Sequence[Any]) -> None:
        """Keep the leaves that later stages will read."""
        if cursor.plan is None or not cursor.plan.extras:
            return
        for number, leaf in enumerate(leaves):
            value_name = f"{prefix}:{number}"
            if isinstance(leaf, RemoteTensor):
                leaf.value_name = leaf.value_name or value_name
            elif isinstance(leaf, Tensor) and value_name in cursor.plan.extra_names:
                cursor.known[value_name] = leaf

    def record_use(self, cursor: StageCursor, leaf: Any, stage: int) -> None:
        """Record, in a probe without a plan, that a virtual stage reads a value.

        A value without a name is recomputed on the stage that reads it, from values with names.
        Values that can neither be sent to the stage nor recomputed there are refused.
        """
        recorded = cursor.findings
        if not isinstance(leaf, RemoteTensor) or id(leaf) in recorded.bound.get(stage, {}):
            return
        if (stage, id(leaf)) in recorded.recorded_uses:
            return
        # The leaf is kept, so that no later tensor gets the same identity.
        recorded.recorded_uses[stage, id(leaf)] = leaf
        if leaf.value_name in recorded.origins:
            origin = recorded.origins[leaf.value_name]
            if origin.stage > stage:
                self._refuse_later_stage(leaf)
            if origin.stage < stage:
                recorded.needs.add((stage, leaf.value_name))
        elif leaf.deferred is None:
            refuse(leaf, "this value cannot be sent to other stages")
        else:
            if leaf.deferred.is_random:
                self._refuse_random(cursor, leaf, stage)
            for source in leaf.deferred.sources:
                self.record_use(cursor, source, stage)

    def _refuse_later_stage(self, leaf: RemoteTensor) -> None:
        """Raise an error for a value of a later stage; for a weight, it names a working plan."""
        kind, _, name = (leaf.value_name or "").partition(":")
        if kind != "parameter":
            refuse(leaf, "an earlier stage reads it")
        plan = dict(getattr(leaf.owner, "plan", {})) | {name.rpartition(".")[0]: "first"}
        raise UnsupportedError(
            f"{leaf.title} is read before the blocks, but the last stage holds it, because it was "
            f"defined after them: {line_of_user()}. Use the pipeline_plan {plan}."
        )

    def _refuse_random(self, cursor: StageCursor, leaf: RemoteTensor, stage: int) -> None:
        """Raise if random numbers for a value would be drawn on more than one stage."""
        origins = cursor.findings.origins
        makers = {origins[name].stage for name in _value_names(leaf) if name in origins}
        bound = cursor.findings.bound.get(stage, {})
        if not makers <= {stage} and not any(id(source) in bound for source in _sources(leaf)):
            refuse(leaf, "it depends on random numbers, and a later stage reads it, too")

    def plan(
        self, cursor: StageCursor, result: Sequence[Any], current_plan: Mapping[str, str]
    ) -> StepPlan:
        """Return the plan that follows from a probe, given the leaves of the step's result.

        A value that an earlier stage computes after it has sent its outputs is refused.
        """
        for leaf in result:
            self.record_use(cursor, leaf, self.last)
        recorded = cursor.findings
        extras: dict[int, list[str]] = {}
        for stage, value_name in sorted(recorded.needs):
            origin = recorded.origins[value_name]
            border = self.starts[origin.stage + 1]
            # A stage sends its values when the first block of the next stage is reached in the last
            # call.
            if origin.call == cursor.calls and origin.next_block > border:
                module, _, use = value_name.partition("#")
                if use and not use.startswith("1:"):
                    raise called_twice(module, next(iter(current_plan), "blocks"))
                title = cursor.known[value_name].title  # type: ignore[attr-defined]
                raise UnsupportedError(
                    f"{title} is computed after the blocks of its stage: {origin.line}. At that "
                    "point the stage has already sent its outputs. Use the pipeline_plan "
                    f"{dict(current_plan) | {value_name.partition('#')[0]: 'last'}}, or pp=1."
                )
            # A stage sends only to the next one, so every stage in between receives the value and
            # forwards it.
            for boundary in range(origin.stage + 1, stage + 1):
                names = extras.setdefault(boundary, [])
                if value_name not in names:
                    names.append(value_name)
        return StepPlan(
            cursor.calls,
            recorded.inputs,
            {stage: tuple(sorted(names)) for stage, names in extras.items()},
        )


def called_twice(name: str, blocks: str) -> UnsupportedError:
    """Return the error for a module that is called on both sides of the blocks."""
    return UnsupportedError(
        f"{name!r} is called before and after the blocks {blocks!r}, but only one pipeline stage "
        "holds it. Use two modules with separate weights, or pp=1."
    )


def _sources(leaf: RemoteTensor) -> list[RemoteTensor]:
    recorded_uses: dict[int, RemoteTensor] = {id(leaf): leaf}
    waiting = [leaf]
    while waiting:
        current = waiting.pop()
        if current.deferred is None or current.value_name is not None:
            continue
        for source in current.deferred.sources:
            if id(source) not in recorded_uses:
                recorded_uses[id(source)] = source
                waiting.append(source)
    return list(recorded_uses.values())


def _value_names(leaf: RemoteTensor) -> set[str]:
    return {source.value_name for source in _sources(leaf) if source.value_name is not None}
