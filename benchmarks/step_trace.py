"""Digests of every step of a training, and the first difference between two trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.optimizer.flat_buffer import MainSlice

#: Integer types by the size of the floating-point type whose bits they view (bytes).
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd multiplier with well mixed bits: 2^64 divided by the golden ratio, as a signed number.
_MIX = -7046029254386353131
_MOST_NAMES = 3


@dataclass(frozen=True)
class Trace:
    """Digests of the values that one rank computed in each step.

    Shapes: digests and magnitudes ``(steps, parameters)``.

    Args:
        losses: Losses of the steps.
        names: Names of parameters of which this rank trains a part, in the order of the backward
            pass.
        gradients: Digests of the gradients' bits, after the sums over the ranks.
        magnitudes: Sums of the gradients' absolute values.
        updated: Digests of the main parameters' bits after the update.
    """

    losses: list[float]
    names: tuple[str, ...]
    gradients: Tensor
    magnitudes: Tensor
    updated: Tensor


@dataclass(frozen=True)
class Difference:
    """First difference between two trainings.

    Args:
        step: Number of the step, from 1 on.
        stage: ``loss``, ``gradients`` or ``parameters``, in the order in which a step computes
            them.
        rank: First rank with a difference.
        names: Names of differing tensors, in the order of the backward pass; empty for a loss.
        num_tensors: Number of tensors of the rank.
        gaps: Relative difference of the gradients' sums of absolute values, for each name. For a
            loss, the difference of the losses.
    """

    step: int
    stage: str
    rank: int
    names: tuple[str, ...]
    num_tensors: int
    gaps: tuple[float, ...]

    def __str__(self) -> str:
        where = f"step {self.step}, {self.stage} of rank {self.rank}"
        if not self.names:
            return f"{where} ({self.gaps[0]:+.1e})"
        pairs = zip(self.names, self.gaps, strict=True)
        shown = [f"{name} ({gap:.1e})" for name, gap in pairs][:_MOST_NAMES]
        more = ", ..." if len(self.names) > _MOST_NAMES else ""
        return f"{where}: {len(self.names)} of {self.num_tensors}: {', '.join(shown)}{more}"


def first_difference(first: Sequence[Trace], second: Sequence[Trace]) -> Difference | None:
    """Return the first difference between two trainings of all ranks; None if all bits are equal.

    Args:
        first: Traces of the first training by rank.
        second: Traces of the second training by rank, of equal layout and number of steps.
    """
    for step in range(len(first[0].losses)):
        for stage in ("loss", "gradients", "parameters"):
            for rank, (left, right) in enumerate(zip(first, second, strict=True)):
                assert left.names == right.names, "both train the same parts of parameters"
                difference = _difference(left, right, step, stage)
                if difference is not None:
                    names, gaps = difference
                    return Difference(step + 1, stage, rank, names, len(left.names), gaps)
    return None


def largest_gap(first: Sequence[Trace], second: Sequence[Trace]) -> float:
    """Return the largest absolute difference between losses of the same step."""
    losses = zip(first[0].losses, second[0].losses, strict=True)
    return max(abs(left - right) for left, right in losses)


def _difference(
    left: Trace, right: Trace, step: int, stage: str
) -> tuple[tuple[str, ...], tuple[float, ...]] | None:
    if stage == "loss":
        gap = right.losses[step] - left.losses[step]
        # The gap of a NaN is not 0, so a NaN differs from every loss.
        return None if gap == 0 else ((), (gap,))
    before, after = (
        (left.gradients, right.gradients) if stage == "gradients" else (left.updated, right.updated)
    )
    places = (before[step] != after[step]).nonzero().flatten()
    if not len(places):
        return None
    sums, gaps = left.magnitudes[step], (right.magnitudes - left.magnitudes)[step].abs()
    relative = (gaps / sums.clamp(min=torch.finfo(sums.dtype).tiny))[places]
    return tuple(left.names[place] for place in places), tuple(relative.tolist())


class Tracer(Callback):
    """Callback that records the trace of a training, and gathers all ranks' traces at its end.

    Args:
        waits: Whether the host waits for the device after each step.
    """

    #: The callback does not read ``parameter.grad``; it digests the sums in the flat buffers.
    reads_gradients = False

    def __init__(self, waits: bool = True) -> None:
        #: Traces of all ranks, once the training has ended.
        self.traces: list[Trace] = []
        #: Number of graphs of this rank at the end.
        self.num_graphs = 0
        #: Names of the transports of tokens to experts.
        self.transports: tuple[str, ...] = ()
        self._waits = waits
        self._losses: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._magnitudes: list[Tensor] = []
        self._updated: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Record digests of the gradients."""
        slices = [part for _, part in own_slices(trainer)]
        self._gradients.append(torch.stack([digest(part.gradient) for part in slices]))
        sums = [part.gradient.abs().sum(dtype=torch.float64) for part in slices]
        self._magnitudes.append(torch.stack(sums))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Record digests of the updated parameters, and the loss."""
        self._losses.append(outputs["loss"].detach().double())
        updated = [digest(part.main.detach()) for _, part in own_slices(trainer)]
        self._updated.append(torch.stack(updated))
        if self._waits and updated[0].is_cuda:
            torch.cuda.synchronize()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the traces of all ranks."""
        strategy = strategy_of(trainer)
        trace = Trace(
            torch.stack(self._losses).tolist(),
            tuple(name for name, _ in own_slices(trainer)),
            torch.stack(self._gradients).cpu(),
            torch.stack(self._magnitudes).cpu(),
            torch.stack(self._updated).cpu(),
        )
        self.traces = all_gather_objects(trace, strategy.mesh.world_cpu)
        graphs = strategy.run.graphs
        self.num_graphs = 0 if graphs is None else graphs.num_graphs
        mixtures = [
            module for module in pl_module.modules() if isinstance(module, MixtureOfExperts)
        ]
        transports = (mixture.transport_choice.transport for mixture in mixtures)
        self.transports = tuple(dict.fromkeys(transports))


def strategy_of(trainer: Trainer) -> MegatronStrategy:
    """Return the strategy of a trainer, which has the mesh."""
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def own_slices(trainer: Trainer) -> list[tuple[str, MainSlice]]:
    """Return this rank's slices of parameters, with names, in the order of the backward pass."""
    main = strategy_of(trainer).run.state.main
    return [(name, main.slices[name]) for name in reversed(main.names) if name in main.slices]


def digest(tensor: Tensor) -> Tensor:
    """Return a number on the device that depends on the bits of all elements."""
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    bits = bits.to(torch.int64, copy=True).mul_(_MIX)
    # A plain sum of bits would miss two changes that cancel each other.
    return bits.bitwise_xor_(bits >> 29).mul_(_MIX).sum()
