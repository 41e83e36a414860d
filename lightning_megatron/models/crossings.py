"""Values that cross boundaries between pipeline stages, for blocks that the user's code calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.absent import AbsentTensor, line_of_user, refuse
from lightning_megatron.models.around_blocks import called_twice
from lightning_megatron.models.stage import StageCursor, StageDone
from lightning_megatron.models.step_plan import Made, StepPlan


class Crossings:
    """Record, in probes, the values that cross boundaries, and receive them in runs.

    Args:
        starts: Index of the first block of each virtual stage, in order.
        num_blocks: Number of blocks of all stages.
    """

    def __init__(self, starts: Sequence[int], num_blocks: int) -> None:
        self.starts = tuple(starts)
        self.num_blocks = num_blocks

    @property
    def last(self) -> int:
        """Return the index of the last virtual stage."""
        return len(self.starts) - 1

    def stage_of(self, index: int) -> int:
        """Return the index of the virtual stage of a block."""
        return bisect_right(self.starts, index) - 1

    def open(self, cursor: StageCursor, here: int) -> None:
        """Register the received values that are not inputs of blocks, once in a step."""
        if cursor.probe or cursor.plan is None or cursor.has_arrived or not cursor.received:
            return
        names = cursor.plan.extras.get(here, ())
        if names:
            cursor.known |= dict(zip(names, cursor.received[-len(names) :], strict=True))
            cursor.has_arrived = True

    def make(
        self,
        cursor: StageCursor,
        point: str,
        tensor: AbsentTensor,
        stage: int,
        *,
        at_start: bool = False,
    ) -> None:
        """Record, in a probe, that a virtual stage computes a value, now or before the step."""
        if cursor.probe:
            cursor.known[point] = tensor
            if cursor.plan is None:
                call = 0 if at_start else cursor.calls
                turn = 0 if at_start else cursor.turn
                cursor.found.made[point] = Made(stage, call, turn, line_of_user())

    def enter(
        self,
        cursor: StageCursor,
        here: int,
        prefix: str,
        leaves: Sequence[Any],
        stage: int,
        starts: bool,
    ) -> None:
        """Record, in a probe, the inputs of a block.

        Args:
            cursor: Cursor of the probe.
            here: Virtual stage that is probed.
            prefix: Name of the block's inputs.
            leaves: Leaves of the block's arguments.
            stage: Virtual stage of the block.
            starts: Whether the block is the first of a virtual stage other than the first one.

        Raises:
            StageDone: If the block is the first of the probed virtual stage, in the last call.
            UnsupportedError: If the block reads values that the first step did not read.
        """
        numbers = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, AbsentTensor))
        if cursor.plan is None:
            # The previous stage sends the inputs of a stage's first block, so it must have their
            # values.
            for n in numbers:
                self.need(cursor, leaves[n], stage - 1 if starts else stage)
            if starts:
                cursor.found.inputs[cursor.calls, stage] = numbers
                cursor.found.bound.setdefault(stage, {}).update(
                    {id(leaves[n]): leaves[n] for n in numbers}
                )
        for n in numbers:
            if leaves[n].point is None:
                leaves[n].point = f"{prefix}:{n}"
                self.make(cursor, leaves[n].point, leaves[n], stage)
        if starts and stage == here and cursor.plan is not None:
            taken = cursor.plan.inputs.get((cursor.calls, stage))
            if taken != numbers:
                raise UnsupportedError(
                    "the blocks must take the same tensors in every step where pp is above 1: "
                    f"{prefix} has {numbers} of earlier stages, where it had {taken} in the first "
                    "step. Use pp=1."
                )
            cursor.forms += [(leaves[n].shape, leaves[n].dtype) for n in numbers]
            if cursor.is_last_call:
                extras = [cursor.known[point] for point in cursor.plan.extras.get(here, ())]
                cursor.forms += [(extra.shape, extra.dtype) for extra in extras]
                raise StageDone

    def arrive(
        self, cursor: StageCursor, prefix: str, leaves: Sequence[Any], stage: int
    ) -> list[Any]:
        """Return the argument leaves of a stage's first block, with received tensors filled in."""
        assert cursor.plan is not None, "only a probe has no plan"
        inputs = cursor.plan.inputs
        found = list(leaves)
        before = sum(len(inputs[call, stage]) for call in range(1, cursor.calls))
        for position, n in enumerate(inputs[cursor.calls, stage], before):
            leaf = leaves[n]
            value = cursor.received[position]
            if isinstance(leaf, AbsentTensor):
                leaf.value = value
            cursor.known[f"{prefix}:{n}"] = found[n] = value
        cursor.has_arrived = True
        return found

    def keep(self, cursor: StageCursor, prefix: str, leaves: Sequence[Any]) -> None:
        """Keep the leaves that later stages will read."""
        if cursor.plan is None or not cursor.plan.extras:
            return
        for n, leaf in enumerate(leaves):
            point = f"{prefix}:{n}"
            if isinstance(leaf, AbsentTensor):
                leaf.point = leaf.point or point
            elif isinstance(leaf, Tensor) and point in cursor.plan.travellers:
                cursor.known[point] = leaf

    def need(self, cursor: StageCursor, leaf: Any, stage: int) -> None:
        """Record, in a probe without a plan, that a virtual stage reads a value.

        A value that has no name is recomputed on the stage that reads it, from values that have
        one.

        Raises:
            UnsupportedError: If the value can neither be sent to the stage nor recomputed there.
        """
        found = cursor.found
        if not isinstance(leaf, AbsentTensor) or id(leaf) in found.bound.get(stage, {}):
            return
        if (stage, id(leaf)) in found.seen:
            return
        found.seen[stage, id(leaf)] = leaf
        if leaf.point in found.made:
            made = found.made[leaf.point]
            if made.stage > stage:
                self._refuse_later(leaf)
            if made.stage < stage:
                found.needs.add((stage, leaf.point))
        elif leaf.recipe is None:
            refuse(leaf, "this value cannot be sent to other stages")
        else:
            if leaf.recipe.is_random:
                self._refuse_random(cursor, leaf, stage)
            for source in leaf.recipe.sources:
                self.need(cursor, source, stage)

    def _refuse_later(self, leaf: AbsentTensor) -> None:
        """Raise an error for a value of a later stage; for a weight, it names a plan that works."""
        kind, _, name = (leaf.point or "").partition(":")
        if kind != "parameter":
            refuse(leaf, "an earlier stage reads it")
        plan = dict(getattr(leaf.owner, "plan", {})) | {name.rpartition(".")[0]: "first"}
        raise UnsupportedError(
            f"{leaf.title} is read before the blocks, but the last stage holds it, because of "
            f"where it was defined: {line_of_user()}. Use the pipeline_plan {plan}."
        )

    def _refuse_random(self, cursor: StageCursor, leaf: AbsentTensor, stage: int) -> None:
        """Raise if random numbers for a value would be drawn on more than one stage."""
        makers = {cursor.found.made[p].stage for p in _points(leaf) if p in cursor.found.made}
        bound = cursor.found.bound.get(stage, {})
        if not makers <= {stage} and not any(id(source) in bound for source in _sources(leaf)):
            refuse(leaf, "random numbers are drawn for it, which a later stage reads, too")

    def plan(
        self, cursor: StageCursor, result: Sequence[Any], in_force: Mapping[str, str]
    ) -> StepPlan:
        """Return the plan that follows from a probe.

        Args:
            cursor: Cursor of the probe.
            result: Leaves of the step's result.
            in_force: The current ``pipeline_plan``.

        Raises:
            UnsupportedError: If a stage reads a value that an earlier one computes after its sends.
        """
        for leaf in result:
            self.need(cursor, leaf, self.last)
        found = cursor.found
        extras: dict[int, list[str]] = {}
        for stage, point in sorted(found.needs):
            made = found.made[point]
            border = self.starts[made.stage + 1]
            # A stage sends its values when the first block of the next stage is reached in the last
            # call.
            if made.call == cursor.calls and made.turn > border:
                module, _, use = point.partition("#")
                if use and not use.startswith("1:"):
                    raise called_twice(module, next(iter(in_force), "blocks"))
                title = cursor.known[point].title  # type: ignore[attr-defined]
                raise UnsupportedError(
                    f"{title} is made after the blocks of the stage that makes it: {made.line}. "
                    "That stage has sent its values to the next one by then. Use the pipeline_plan "
                    f"{dict(in_force) | {point.partition('#')[0]: 'last'}}, or pp=1."
                )
            # Stages send to the next one only, so every stage in between receives the value and
            # sends it on.
            for boundary in range(made.stage + 1, stage + 1):
                names = extras.setdefault(boundary, [])
                if point not in names:
                    names.append(point)
        return StepPlan(
            cursor.calls,
            found.inputs,
            {stage: tuple(sorted(names)) for stage, names in extras.items()},
        )


def _sources(leaf: AbsentTensor) -> list[AbsentTensor]:
    seen: dict[int, AbsentTensor] = {id(leaf): leaf}
    waiting = [leaf]
    while waiting:
        one = waiting.pop()
        for source in one.recipe.sources if one.recipe is not None and one.point is None else ():
            if id(source) not in seen:
                seen[id(source)] = source
                waiting.append(source)
    return list(seen.values())


def _points(leaf: AbsentTensor) -> set[str]:
    return {source.point for source in _sources(leaf) if source.point is not None}
