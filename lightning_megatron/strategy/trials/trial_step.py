"""Trial run of a step without gradients, with seeded generators, undone afterwards."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.stage import named_layers
from lightning_megatron.pipeline.microbatch import Microbatch, copy_batch
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.merge import Weight, token_counts_in
from lightning_megatron.strategy.modules.module_state import ModuleState
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states
from lightning_megatron.strategy.trials.part_draws import ConstantRandomValues, DrawRecord, UserDraw
from lightning_megatron.user_code import is_compiled


@contextmanager
def _fixed_orders() -> Iterator[None]:
    """Rotate by one place, without a draw, where Python or NumPy would shuffle in the block."""
    before = random.shuffle, np.random.shuffle, np.random.permutation
    random.shuffle = _shuffle  # type: ignore[assignment]
    np.random.shuffle = _shuffle  # type: ignore[assignment]
    np.random.permutation = _permutation  # type: ignore[assignment]
    try:
        yield
    finally:
        random.shuffle, np.random.shuffle, np.random.permutation = before


def _state_of_generators() -> int:
    """Return a hash of the states of Python's and NumPy's generators."""
    _, keys, *rest = np.random.get_state()
    return hash((random.getstate(), np.asarray(keys).tobytes(), *rest))


def _shuffle(values: Any) -> None:
    # Rows of an array are views into it, so they must be copied before they are overwritten.
    before = values.copy() if isinstance(values, np.ndarray) else list(values)
    for place in range(len(before)):
        values[place] = before[place - 1]


def _permutation(values: Any) -> Any:
    array = np.arange(values) if np.ndim(values) == 0 else np.asarray(values)
    return np.roll(array, 1, axis=0)


#: Function that runs the step on parts of a batch, and calls its last argument before each part. On
#: the last stage it returns the output of each part.
Run = Callable[[Sequence[Microbatch], Recorder, Callable[[], None]], list[Any]]

#: Relative tolerances for rounding: (largest machine epsilon in use, tolerance).
_TOLERANCES = ((1e-15, 1e-9), (1e-6, 1e-5), (2e-3, 5e-3), (math.inf, 2e-2))


@dataclass
class StepResults:
    """Results of a step for some samples.

    Args:
        values: Value and weight by name; the weight is None for values that are summed.
    """

    values: dict[str, tuple[float, float | None]] = field(default_factory=dict)


@dataclass
class TrialStep:
    """Trial runs of a step on parts of a batch.

    Args:
        name: Name of the step, such as ``training_step``.
        state: State of the module before the trial, which is restored after each run.
        spacing: Machine epsilon of the least precise floating-point result so far.
        ends: Distinct states of Python's and NumPy's generators after parts.
        draws: Random functions that user code called in the last run.
    """

    mesh: ParallelMesh
    name: str
    run: Run
    state: ModuleState
    spacing: float = 0.0
    ends: frozenset[int] = frozenset()
    draws: list[UserDraw] = field(default_factory=list)

    @property
    def is_training(self) -> bool:
        """Return whether this is a training step."""
        return self.name == "training_step"

    @property
    def has_other_draws(self) -> bool:
        """Return whether parts differ in their draws from Python's or NumPy's generators."""
        return len(self.ends) > 1

    def read(self, parts: Sequence[Microbatch], seed: int) -> list[StepResults]:
        """Return the step's results for every part, on the last stage.

        Communication: that of the forward passes.
        """
        recorder = Recorder(outputs=None)
        try:
            outputs = self._outputs(
                parts, recorder, seed, torch.no_grad() if self.is_training else nullcontext()
            )
        except RuntimeError as error:
            if self.mesh.pp.size > 1 or not self.is_training or "grad" not in str(error):
                raise
            # The step computes derivatives itself, so it needs a graph.
            self.state.restore()
            recorder = Recorder(outputs=None)
            outputs = self._outputs(parts, recorder, seed, torch.enable_grad())
        return _results(outputs, parts, recorder, self.is_training)

    def any_rank(self, is_true: bool) -> bool:
        """Return whether something is true on any rank; an all-reduce over the world on the CPU."""
        return is_true_anywhere(is_true, self.mesh.world_cpu)

    def tolerance(self) -> float:
        """Return the relative tolerance for rounding, by the least precise dtype in use.

        Communication: one all-reduce of a number over the world, on the CPU.
        """
        own = torch.tensor(self.spacing, dtype=torch.float64)
        spacing = all_reduce_(own, self.mesh.world_cpu, "max").item()
        return next(size for limit, size in _TOLERANCES if spacing <= limit)

    def _outputs(
        self,
        parts: Sequence[Microbatch],
        recorder: Recorder,
        seed: int,
        gradients: AbstractContextManager[Any],
    ) -> list[Any]:
        constant_values = ConstantRandomValues()
        record = DrawRecord(constant_values)
        self.draws = record.draws
        # A step that draws equally often for one sample and for two draws once per batch, such as a
        # mixing ratio. One that draws more often for two samples draws once per sample, and cannot
        # see the same numbers in both cases.
        states: list[int] = []

        def begin_part() -> None:
            states.append(_state_of_generators())
            random.seed(seed)
            np.random.seed(seed)

        try:
            with gradients, constant_values, record, _fixed_orders():
                # The same batch runs several times, and a step may change it.
                copies = [Microbatch(copy_batch(part.data), part.num_samples) for part in parts]
                outputs = self.run(copies, recorder, begin_part)
                states.append(_state_of_generators())
                return outputs
        finally:
            self.spacing = max(self.spacing, constant_values.spacing)
            self.ends |= frozenset(states[1:])


@contextmanager
def undo_changes(module: LightningModule, mesh: ParallelMesh) -> Iterator[ModuleState]:
    """Restore the module's state outside its parameters, and random streams, after the block.

    Yields:
        The snapshot of the module, for restoring it inside the block.
    """
    state = ModuleState(module)
    random_before = random_states(mesh.device)
    position = mesh.random.position
    try:
        yield state
    finally:
        state.restore()
        restore_random_states(random_before, mesh.device)
        mesh.random.seek(position.layer, position)


def without_compilation(module: LightningModule) -> AbstractContextManager[object]:
    """Return a context in which compiled modules run eagerly, if there are any.

    Trials run under dispatch modes. ``torch.compile`` never compiles a function again whose first
    call was under one.
    """
    has_compiled = any(is_compiled(part) for _, part in named_layers(module))
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()


def combined(values: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Return the weighted mean of values, or their sum without weights."""
    weights = [weight for _, weight in values if weight is not None]
    if not weights:
        return sum(value for value, _ in values), None
    total = sum(weights)
    summed = sum(value * weight for value, weight in values if weight is not None and weight)
    return summed / total if total else 0.0, total


def is_close(first: float, second: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) == math.isnan(second)
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance / 10)


def _results(
    outputs: Sequence[Any], parts: Sequence[Microbatch], recorder: Recorder, is_training: bool
) -> list[StepResults]:
    if not outputs:
        return []
    counts = token_counts_in(outputs)
    results = [StepResults() for _ in outputs]
    for number, (output, part) in enumerate(zip(outputs, parts, strict=True)):
        loss = _scalar_loss(output)
        weight: Weight = part.num_samples if counts is None else counts[number]
        if loss is not None:
            results[number].values["the loss"] = loss.item(), float(weight)
        if counts is not None:
            results[number].values["num_tokens"] = float(counts[number]), None
    for name, call in recorder.calls.items():
        if call.reduction not in ("mean", "sum"):
            continue
        for entry in recorder.values[name]:
            is_mean = call.reduction == "mean"
            weight = entry.weight if counts is None else counts[entry.run]
            values = results[entry.run].values
            before = values.get(f"log {name!r}")
            value = float(entry.value), float(weight) if is_mean else None
            values[f"log {name!r}"] = value if before is None else combined([before, value])
    for name, (_, options) in recorder.metrics.items():
        by_step = options.get("on_step")
        if by_step or (by_step is None and is_training):
            for entry in recorder.metric_values[name]:
                value = float(entry.value), float(entry.weight)
                results[entry.run].values[f"log {name!r} by step"] = value
    return results


def _scalar_loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
