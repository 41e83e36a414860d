"""What a step passes on: its call, its backward passes, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatron.experts.routing.statistics import StepStatistics
from lightning_megatron.graphs.graph_keys import TRAINING
from lightning_megatron.graphs.step_graph import RanStep
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.step.microbatch_losses import MicrobatchLosses


@dataclass(frozen=True)
class TrainingPasses:
    """Backward passes of a batch, and what happens to the gradients before and after them.

    Args:
        clear_gradients: Function that clears the previous step's gradients, unless they accumulate.
            It runs between the first forward and the first backward pass, like Lightning's hooks.
            With several stages it runs before all passes, because the hooks may communicate. None
            if it has run already.
        hide_gradients: Function that removes gradients from ``parameter.grad``, where hooks could
            read them; each backward pass also does this.
        adds: Whether gradients of earlier batches are kept and added to; the same on all ranks.
        will_step: Whether the optimizer steps after these passes; the same on all ranks.
        states: State that layers accumulate during a step that ends with these passes; None if the
            optimizer does not step after them, or if there is no such state. None on all ranks or
            on no rank.
    """

    backward: BackwardPasses
    clear_gradients: Callable[[], None] | None
    hide_gradients: Callable[[], None]
    adds: bool
    will_step: bool
    states: LayerStates | None

    def clear(self) -> None:
        """Clear the previous step's gradients, unless this was done before all passes."""
        if self.clear_gradients is not None:
            self.clear_gradients()

    def cleared(self) -> TrainingPasses:
        """Clear and hide the previous step's gradients now; return settings that do not do so."""
        self.clear()
        self.hide_gradients()
        return replace(self, clear_gradients=None)


@dataclass(frozen=True)
class StepCall:
    """Call of a user's step for one batch, and how its microbatches run.

    Args:
        key: Name of the step, and index of the dataloader if there are several.
        index: Index of the batch, which selects the random streams; for a training step in the
            whole fit (batches).
        passes: Backward passes; None computes no gradients.
        may_replay: Whether a graph of the whole step may run the call.
        factor: Loss scale of a training step. A scalar in float64 may change between the replays of
            a graph.
        divisor: Batches whose gradients are accumulated (batches).
        token_scale: Divisor of token counts, as :class:`MicrobatchLosses` describes (tokens).
    """

    key: tuple[Any, ...]
    microbatches: Sequence[Microbatch]
    args: tuple[Any, ...]
    index: int
    passes: TrainingPasses | None = None
    may_replay: bool = True
    factor: float | Tensor = 1.0
    divisor: int = 1
    token_scale: int = 1

    @property
    def name(self) -> str:
        """Return the name of the step, such as ``training_step``."""
        return str(self.key[0])

    @property
    def is_training(self) -> bool:
        """Return whether the step is ``training_step``, with or without backward passes."""
        return self.name == TRAINING


@dataclass(frozen=True)
class MicrobatchOutputs:
    """Outputs and log calls of a step's microbatches on this rank.

    Args:
        outputs: Outputs of the step, one for each microbatch; empty before the last stage.
        statistics: Token counts of the routers, by layer index, if the step of the routers ended
            with the microbatches; else None.
    """

    outputs: list[Any]
    recorder: Recorder
    losses: MicrobatchLosses | None = None
    statistics: Mapping[int, StepStatistics] | None = None


#: Function that runs the microbatches of a step.
RunCall = Callable[[StepCall], RanStep[MicrobatchOutputs]]


@dataclass(frozen=True)
class StepResult:
    """Output of ``training_step`` for a whole batch, the same on all ranks.

    Args:
        output: The mean loss, or a mapping with other outputs; None if the step returned no loss.
            The mean is over tokens if the step counts them, else over samples and divided by the
            number of accumulated batches. Other outputs are included on the last stage, and on all
            stages if a hook receives them.
        loss: The mean loss in float64.
        num_tokens: Token count of the batch, a float64 scalar on a scale common to all ranks.
            Gradients are then sums, to be divided by the tokens of all ranks and accumulated
            batches. None means that gradients are means.
    """

    output: Any
    loss: Tensor
    num_tokens: Tensor | None


def step_outputs(ran: RanStep[MicrobatchOutputs]) -> list[Any]:
    """Return the outputs of a step; copies if the next replay of a graph would overwrite them."""
    outputs = ran.result.outputs
    return outputs if ran.graph is None else apply_to_collection(outputs, Tensor, torch.clone)
