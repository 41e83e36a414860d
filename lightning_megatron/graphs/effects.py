"""Effects of a captured computation outside of its tensors, recorded once and repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.groups.journal import Journal, RecordedCall
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.recorded_draws import DrawRecorder, RecordedDraws
from lightning_megatron.layers.parameters.gradient_slot import mark_filled
from lightning_megatron.optimizer.gradient_buckets import RecordedGradients
from lightning_megatron.optimizer.parameter_gather import ParameterGather, RecordedGather
from lightning_megatron.optimizer.reduction import GradientReducer


@dataclass(frozen=True)
class Effects:
    """Effects of one captured computation, equal at each of its replays.

    Args:
        label: Description of the replay, such as ``replay of layers 3..4, backward, 6
            collectives``.
        gradients: Gradients that the computation adds.
        collectives: Collectives that it starts.
        draws: Random streams that it draws from.
        gathers: Whether it all-gathers the updated parameters of other ranks.
        parts: Parts of it that the device counts, as ``Journal.begin_part`` describes.
    """

    label: str
    gradients: RecordedGradients
    collectives: tuple[RecordedCall, ...]
    draws: RecordedDraws
    gathers: bool = False
    parts: tuple[str, ...] = ()


class EffectRecorder:
    """Collector of the effects of one computation, while and after it runs.

    Args:
        label: Description of the computation.
        gradients: Gradients so far; None without any.
        collectives: Collectives so far.
        draws: Recorder of the random draws.
        gather: What is recorded of updated parameters; None if none are gathered.
        parts: Descriptions of the parts that the device counts, so far.
    """

    def __init__(
        self,
        label: str,
        gradients: RecordedGradients | None,
        collectives: list[RecordedCall],
        draws: DrawRecorder,
        gather: RecordedGather | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self._label = label
        self._gradients = gradients
        self._collectives = collectives
        self._draws = draws
        self._gather = gather
        self._parts = parts

    @property
    def effects(self) -> Effects:
        """Return the effects, once the computation has run.

        Raises:
        """
        number = len(self._collectives)
        plural = "" if number == 1 else "s"
        return Effects(
            f"replay of {self._label}, {number} collective{plural}",
            self._gradients or RecordedGradients(),
            tuple(self._collectives),
            self._draws.recorded,
            self._gather is not None and self._gather.gathers,
            tuple(self._parts),
        )


class EffectObservers:
    """Objects of one rank that a computation changes in Python while it runs.

    A replay of a captured computation runs no Python. The code that replays it therefore records
    the effects at the capture, and repeats them around every replay:

    * Gradients: the slots that the computation wrote are marked as filled. Each gradient that
      arrived is reported again, so that sums over the ranks start when they are complete.
    * Collectives: they are counted again, so that a hang report compares true counts. The parts
      that the device counts inside the replay are named, so that the report says which part the
      device has reached.
    * Random draws: each stream has a generator of its own, which is seeded by the position of the
      replay.
    * Updated parameters: those of other ranks that the computation has gathered are complete.

    Args:
        journal: Counter of collectives.
        reducer: Owner of the gradient slots; None if the computations add no gradients.
        gather: Owner of the gathers of updated parameters; None if they are always complete.
    """

    def __init__(
        self,
        random: RandomStreams,
        journal: Journal,
        reducer: GradientReducer | None = None,
        gather: ParameterGather | None = None,
    ) -> None:
        self._random = random
        self._journal = journal
        self._reducer = reducer
        self._gather = gather

    @contextmanager
    def recording(
        self,
        label: str,
        generators: GeneratorPool,
        state: Literal["empty", "filled"] | None = None,
        holds_sums: bool = False,
    ) -> Iterator[EffectRecorder]:
        """Record the effects of the computation inside the block, which have no other effect.

        When the block ends, gradient slots, gathers of parameters, counts of collectives and
        torch's default generators are restored. Random streams move as they do without a recording,
        so that the captures of a chunk can follow one another. ``RandomStreams.preserve_position``
        around all of them restores the streams.

        Args:
            label: Description of the computation, such as ``layers 3..4, backward``.
            generators: Pool from which each random stream gets its generator.
            state: State of all gradient slots at the start of the block: a backward pass that finds
                its slots ``empty`` overwrites them, and one that finds them ``filled`` adds to
                them. None leaves the states that they have.

            holds_sums: Whether the computation also reduces gradients over the ranks; it must end
                with ``GradientReducer.sum_up``.

        Returns:
            Object whose ``effects`` is the result when the block has ended.

        Raises:
            RuntimeError: If a recording is active already.
        """
        with ExitStack() as stack:
            gradients = None
            if self._reducer is not None:
                gradients = stack.enter_context(self._reducer.recording(state, holds_sums))
            gather = None
            if self._gather is not None:
                gather = stack.enter_context(self._gather.recording())
            collectives = stack.enter_context(self._journal.recording(label))
            parts = self._journal.parts
            draws = stack.enter_context(self._random.recording(generators))
            yield EffectRecorder(label, gradients, collectives, draws, gather, parts)

    @contextmanager
    def repeat(
        self, effects: Effects, position: StreamPosition | None = None
    ) -> Iterator[StreamPosition]:
        """Repeat recorded effects around the replay inside the block.

        Collectives are counted and generators seeded before the replay. Gradients are reported
        after it, if the block ends without an error.

        Args:
            effects: Effects of the computation.
            position: Step and microbatch of the replay; None means those at which the random
                streams are. A backward pass needs what this method gave for its forward pass.

        Returns:
            The position to pass for the backward pass of the same computation.

        Raises:
            RuntimeError: If the computation overwrites gradient sums that are not empty, or adds to
                sums that are. Also if activations are recomputed and no position is given, or if
                parameters of other ranks are out of date and the computation does not gather them.

        Communication: that of ``GradientReducer.mark_arrived``, after the replay.
        """
        gradients = effects.gradients
        self._check(effects)
        self._journal.repeat(effects.collectives, effects.label, effects.parts)
        yield self._random.seed_generators(effects.draws, position)
        mark_filled(gradients.slots, gradients.rows)
        if effects.gathers and self._gather is not None:
            self._gather.mark_gathered()
        if self._reducer is not None:
            for names in gradients.groups:
                self._reducer.mark_arrived(names)
            self._reducer.mark_summed(gradients)

    def _check(self, effects: Effects) -> None:
        gradients = effects.gradients
        num_filled = sum(not slot.is_empty for slot in gradients.overwritten)
        num_empty = sum(slot.is_empty for slot in gradients.added)
        if num_filled or num_empty:
            raise RuntimeError(
                f"a replay must find its gradient sums as its capture did: the {effects.label}, "
                f"overwrites {len(gradients.overwritten)} sums, of which {num_filled} are filled, "
                f"and adds to {len(gradients.added)} sums, of which {num_empty} are empty. "
                "Gradients would be lost or wrong."
            )
        if self._gather is not None and self._gather.is_deferred != effects.gathers:
            does = "gathers" if effects.gathers else "does not gather"
            are = "complete" if effects.gathers else "out of date"
            raise RuntimeError(
                f"a replay must find updated parameters as its capture did: the {effects.label}, "
                f"{does} them, and those of other ranks are {are}. It would compute with old "
                "values, or gather alone. Choose the graph by ParameterGather.is_deferred."
            )
