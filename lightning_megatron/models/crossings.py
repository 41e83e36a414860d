"""Which values of a step cross the boundaries between pipeline stages, for a list of blocks that other code calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.absent import AbsentTensor, line_of_user, refuse
from lightning_megatron.models.beside_blocks import called_twice
from lightning_megatron.models.stage import StageCursor, StageDone
from lightning_megatron.models.step_plan import Made, StepPlan


class Crossings:
    """Find, name and take the values that cross boundaries.

    Args:
        starts: The first block of every virtual stage, in order.
        num_blocks: Blocks of all stages.
    """

    def __init__(self, starts: Sequence[int], num_blocks: int) -> None:
        self.starts, self.num_blocks = tuple(starts), num_blocks

    @property
    def last(self) -> int:
        """Return the last virtual stage."""
        return len(self.starts) - 1

    def stage_of(self, index: int) -> int:
        """Return the virtual stage that holds a block."""
        return bisect_right(self.starts, index) - 1

    def open(self, cursor: StageCursor, here: int) -> None:
        """Take what has come beside the inputs of blocks, once in a step."""
        if cursor.probe or cursor.plan is None or cursor.has_arrived or not cursor.received:
            return
        names = cursor.plan.extras.get(here, ())
        if names:
            cursor.known |= dict(zip(names, cursor.received[-len(names) :], strict=True))
            cursor.has_arrived = True

    def make(
        self, cursor: StageCursor, point: str, tensor: AbsentTensor, stage: int, *, at_start: bool = False
    ) -> None:
        """Note, in a probe, that a virtual stage makes a value, now or before the step."""
        if cursor.probe:
            cursor.known[point] = tensor
            if cursor.plan is None:
                cursor.found.made[point] = Made(
                    stage, *((0, 0) if at_start else (cursor.calls, cursor.turn)), line_of_user()
                )

    def enter(
        self, cursor: StageCursor, here: int, prefix: str, leaves: Sequence[Any], stage: int, starts: bool
    ) -> None:
        """Note, in a probe, what a block takes.

        Args:
            cursor: That of the probe.
            here: The virtual stage that is probed.
            prefix: Name of the inputs of the block.
            leaves: The leaves of its arguments.
            stage: The virtual stage of the block.
            starts: Whether it is the first block of a stage that is not the first.

        Raises:
            StageDone: If it is the first block of the virtual stage that is probed, in the last call.
        """
        numbers = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, AbsentTensor))
        if cursor.plan is None:
            for n in numbers:
                self.need(cursor, leaves[n], stage - 1 if starts else stage)
            if starts:
                cursor.found.inputs[cursor.calls, stage] = numbers
                cursor.found.bound.setdefault(stage, {}).update({id(leaves[n]): leaves[n] for n in numbers})
        for n in numbers:
            if leaves[n].point is None:
                leaves[n].point = f"{prefix}:{n}"
                self.make(cursor, leaves[n].point, leaves[n], stage)
        if starts and stage == here and cursor.plan is not None:
            taken = cursor.plan.inputs.get((cursor.calls, stage))
            if taken != numbers:
                raise UnsupportedError(
                    f"the blocks must take the same tensors in every step where pp is above 1: {prefix} has {numbers} "
                    f"of earlier stages, where it had {taken} in the first step. Use pp=1."
                )
            cursor.forms += [(leaves[n].shape, leaves[n].dtype) for n in numbers]
            if cursor.is_last_call:
                extras = [cursor.known[point] for point in cursor.plan.extras.get(here, ())]
                cursor.forms += [(extra.shape, extra.dtype) for extra in extras]
                raise StageDone

    def arrive(self, cursor: StageCursor, prefix: str, leaves: Sequence[Any], stage: int) -> list[Any]:
        """Return the leaves of the arguments of a stage's first block, with those that have been received."""
        assert cursor.plan is not None, "only a probe has no plan"
        inputs, found = cursor.plan.inputs, list(leaves)
        before = sum(len(inputs[call, stage]) for call in range(1, cursor.calls))
        for place, n in enumerate(inputs[cursor.calls, stage], before):
            leaf, value = leaves[n], cursor.received[place]
            if isinstance(leaf, AbsentTensor):
                leaf.value = value
            cursor.known[f"{prefix}:{n}"] = found[n] = value
        cursor.has_arrived = True
        return found

    def keep(self, cursor: StageCursor, prefix: str, leaves: Sequence[Any]) -> None:
        """Keep those leaves that later stages will read."""
        if cursor.plan is None or not cursor.plan.extras:
            return
        for n, leaf in enumerate(leaves):
            point = f"{prefix}:{n}"
            if isinstance(leaf, AbsentTensor):
                leaf.point = leaf.point or point
            elif isinstance(leaf, Tensor) and point in cursor.plan.travellers:
                cursor.known[point] = leaf

    def need(self, cursor: StageCursor, leaf: Any, stage: int) -> None:
        """Note, in a probe without a plan, that a virtual stage reads a value.

        Raises:
            UnsupportedError: If the value cannot travel there.
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
            refuse(leaf, "this value has no way to travel")
        else:
            if leaf.recipe.is_random:
                self._refuse_random(cursor, leaf, stage)
            for source in leaf.recipe.sources:
                self.need(cursor, source, stage)

    def _refuse_later(self, leaf: AbsentTensor) -> None:
        """Refuse what an earlier stage reads of a later one; a weight can be moved."""
        kind, _, name = (leaf.point or "").partition(":")
        if kind != "parameter":
            refuse(leaf, "an earlier stage reads it")
        plan = dict(getattr(leaf.owner, "plan", {})) | {name.rpartition(".")[0]: "first"}
        raise UnsupportedError(
            f"{leaf.title} is read before the blocks, but the last stage holds it, because of where it was defined: "
            f"{line_of_user()}. Use the pipeline_plan {plan}."
        )

    def _refuse_random(self, cursor: StageCursor, leaf: AbsentTensor, stage: int) -> None:
        """Refuse to draw numbers on two stages; one alone may."""
        makers = {cursor.found.made[p].stage for p in _points(leaf) if p in cursor.found.made}
        bound = cursor.found.bound.get(stage, {})
        if not makers <= {stage} and not any(id(source) in bound for source in _sources(leaf)):
            refuse(leaf, "random numbers are drawn for it, which a later stage reads, too")

    def plan(self, cursor: StageCursor, result: Sequence[Any], in_force: Mapping[str, str]) -> StepPlan:
        """Return what a probe has found out.

        Args:
            cursor: That of the probe.
            result: Leaves of what the step returned.
            in_force: The pipeline_plan that is in force.

        Raises:
            UnsupportedError: If a stage needs what an earlier one has not computed when it passes on.
        """
        for leaf in result:
            self.need(cursor, leaf, self.last)
        found, extras = cursor.found, dict[int, list[str]]()
        for stage, point in sorted(found.needs):
            made = found.made[point]
            border = self.starts[made.stage + 1]
            if made.call == cursor.calls and made.turn > border:
                module, _, use = point.partition("#")
                if use and not use.startswith("1:"):
                    raise called_twice(module, next(iter(in_force), "blocks"))
                raise UnsupportedError(
                    f"{cursor.known[point].title} is made after the blocks of the stage that makes it: {made.line}. "  # type: ignore[attr-defined]
                    "That stage has passed on by then. Use the pipeline_plan "
                    f"{dict(in_force) | {point.partition('#')[0]: 'last'}}, or pp=1."
                )
            for boundary in range(made.stage + 1, stage + 1):
                names = extras.setdefault(boundary, [])
                if point not in names:
                    names.append(point)
        return StepPlan(cursor.calls, found.inputs, {stage: tuple(sorted(names)) for stage, names in extras.items()})


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
