"""Effects of a captured computation outside of its tensors, recorded once and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.groups.generators import GeneratorPool, StreamPosition
from lightning_megatron.groups.journal import Journal, RecordedCall
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.recorded_draws import RecordedDraws
from lightning_megatron.layers.parameters.gradient_slot import mark_filled
from lightning_megatron.optimizer.gradient_buckets import RecordedGradients
from lightning_megatron.optimizer.parameter_gather import ParameterGather
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
        reducer: Owner of the gradient slots.
        gather: Owner of the gathers of updated parameters.
    """

    def __init__(
        self,
        random: RandomStreams,
        journal: Journal,
        reducer: GradientReducer,
        gather: ParameterGather,
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
    ) -> Iterator[Callable[[], Effects]]:
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
            Function that returns the effects when the block has ended.

        Raises:
            RuntimeError: If a recording is active already.
        """
        with ExitStack() as stack:
            gradients = stack.enter_context(self._reducer.recording(state, holds_sums))
            gather = stack.enter_context(self._gather.recording())
            collectives = stack.enter_context(self._journal.recording(label))
            parts = self._journal.parts
            draws = stack.enter_context(self._random.recording(generators))

            def effects() -> Effects:
                number = len(collectives)
                return Effects(
                    f"replay of {label}, {number} collective{'' if number == 1 else 's'}",
                    gradients,
                    tuple(collectives),
                    draws.recorded,
                    gather.gathers,
                    tuple(parts),
                )

            yield effects

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
            RuntimeError: If activations are recomputed and no position is given.

        Communication: that of ``GradientReducer.mark_arrived``, after the replay.
        """
        gradients = effects.gradients
        self._journal.repeat(effects.collectives, effects.label, effects.parts)
        yield self._random.seed_generators(effects.draws, position)
        mark_filled(gradients.slots, gradients.rows)
        if effects.gathers:
            self._gather.mark_gathered()
        for names in gradients.groups:
            self._reducer.mark_arrived(names)
        self._reducer.mark_summed(gradients)
