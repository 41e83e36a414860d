"""Trial step that compares loss and logs of microbatches with those of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, gather_some, is_true_anywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.pipeline.microbatch import (
    Microbatch,
    count_ignored,
    is_cut,
    join_parts,
    tensors_in,
)
from lightning_megatron.strategy.modules.buffers import BatchStatistics
from lightning_megatron.strategy.modules.module_state import ModuleState
from lightning_megatron.strategy.trials.trial_step import (
    Run,
    StepResults,
    TrialStep,
    combined,
    is_close,
    undo_changes,
    without_compilation,
)
from lightning_megatron.strategy.trials.weight_writes import refuse_weight_writes

log = logging.getLogger(__name__)

#: Maximum number of microbatches of a batch that a trial runs.
_MAX_MICROBATCHES = 16
#: Tolerance above which a mean over unequal token counts may pass as a mean over samples.
_COARSE_TOLERANCE = 1e-4
#: Factor of the tolerance in later trials.
_LATER_TOLERANCE = 5
_REMEDY = (
    "Return num_tokens beside the loss if it is a mean over tokens, keep the batch whole by "
    "microbatch_size='batch', cut it in a collate function that returns a list of Microbatch, or "
    "use job.check_microbatches=False if the difference is intended."
)


class MicrobatchTrials:
    """Comparison of separate with combined microbatches, for each kind of step.

    The first batch is tried, and later ones that are the first with unequally many labels of -100,
    or zeros of a mask, in their microbatches. Training steps are also tried at intervals, because
    code may depend on the step.

    A trial computes no gradients. It restores random states, buffers and attributes of the module.
    Constants replace torch's random values, and dropout is off, so a trial cannot detect samples
    that only a random number couples. The generators of Python and NumPy start every microbatch
    with the same seed, and random orders are replaced by fixed ones. What the step prints and
    its calls of loggers are dropped; other side effects outside the module, such as files, occur
    again.

    Args:
        interval: Batches between the later trials of training steps, next to one in each epoch; 0
            means only one in each epoch (batches).
        suspend: Function that makes the rest of the running step run without graphs.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        wait: Callable[[], None],
        interval: int,
        suspend: Callable[[], None],
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._wait = wait
        self._interval = interval
        self._suspend = suspend
        self._num_batches = 0
        self._epoch = module.current_epoch
        self._statistics = BatchStatistics(module)
        self._tried: set[tuple[Any, ...]] = set()
        # Steps that count their tokens, or that no trial can run: later batches are not tried.
        self._finished: set[tuple[Any, ...]] = set()
        self._uneven = UnevenMasks(mesh)
        layers = [part for model in layered_modules(module) for part in model.modules()]
        # With a capacity factor, the tokens that a full expert drops depend on the microbatch.
        self._drops = any(
            getattr(getattr(layer, "config", None), "capacity_factor", None) for layer in layers
        )

    def check(
        self, key: tuple[Any, ...], batch: Any, microbatches: Sequence[Microbatch], run: Run
    ) -> None:
        """Refuse batch norms if a batch is cut, and try the batches that may differ from others.

        Args:
            key: Name of the step, followed by the index of its dataloader if there are several.
            run: Function that runs the step on microbatches.

        Communication: at a batch that is tried, the communication of several forward passes, and
        gathers of objects over the world on the CPU; that of :meth:`UnevenMasks.is_new` otherwise.
        """
        self._statistics.check(len(microbatches))
        # Microbatches that the user has cut have no known rule for joining them.
        if is_cut(batch):
            return
        is_due = self._is_due(key)
        is_whole_trial = self._is_tried_now(key, batch, microbatches)
        if not (is_due or is_whole_trial):
            return
        parts = list(microbatches[:_MAX_MICROBATCHES])
        groups = _groups(len(parts))
        joined = join_parts(batch, parts, groups)
        # Layers differ between stages, and batches between data ranks, but a trial is collective:
        # either all ranks run it or none.
        if is_true_anywhere(not groups or self._drops, self._mesh.world_cpu):
            if is_whole_trial:
                self._finished.add(key)
            return
        self._suspend()
        # Weights that still arrive from other ranks would look like weights that a step writes.
        self._wait()
        with undo_changes(self._module, self._mesh) as state, without_compilation(self._module):
            num_samples = sum(part.num_samples for part in microbatches)
            trial = _MicrobatchTrial(
                self._mesh, key[0], run, state, module=self._module, num_samples=num_samples
            )
            with refuse_weight_writes(self._module, key[0]):
                if trial.compare(joined, groups, parts, is_later=not is_whole_trial):
                    self._finished.add(key)

    def _is_due(self, key: tuple[Any, ...]) -> bool:
        """Return whether a training step is tried again because of its place in the fit."""
        if key[0] != "training_step":
            return False
        is_new_epoch = self._module.current_epoch != self._epoch
        self._epoch = self._module.current_epoch
        self._num_batches += 1
        return is_new_epoch or (self._interval > 0 and self._num_batches % self._interval == 0)

    def _is_tried_now(
        self, key: tuple[Any, ...], batch: Any, microbatches: Sequence[Microbatch]
    ) -> bool:
        """Return whether this batch is tried because of its values, the same on all ranks."""
        parts = microbatches[:_MAX_MICROBATCHES]
        if key not in self._tried:
            self._tried.add(key)
            self._uneven.begin(key, batch, parts)
            return True
        if key in self._finished:
            return False
        # Data ranks may have different numbers of batches in an evaluation.
        may_gather = key[0] == "training_step" or self._mesh.data.size == 1
        return may_gather and self._uneven.is_new(key, batch, parts)


@dataclass(kw_only=True)
class _MicrobatchTrial(TrialStep):
    """One trial: runs of a step on parts of a batch, and their comparison.

    Args:
        num_samples: Size of the whole batch (samples).
    """

    module: LightningModule
    num_samples: int

    def compare(
        self,
        joined: Sequence[Microbatch],
        groups: Sequence[range],
        parts: Sequence[Microbatch],
        *,
        is_later: bool,
    ) -> bool:
        """Run the step on single parts and on several combined ones.

        Args:
            groups: Indices of the parts in each combined microbatch.
            is_later: Whether this trial repeats an earlier one. It compares only losses, and allows
                for the larger rounding errors of trained models, whose logits are larger.

        Returns:
            Whether the step counts its tokens.
        """
        joined_results = self._run(joined[:1], seed=0)
        after_joined = ModuleState(self.module)
        self.state.restore()
        joined_results += self._run(joined[1:], seed=0)
        self.state.restore()
        size = len(groups[0])
        single_results = self._run(parts[:size], seed=0)
        tolerance = self.tolerance() * (_LATER_TOLERANCE if is_later else 1)
        different = after_joined.changes(tolerance)
        single_results += self._run(parts[size:], seed=0)
        changed = {} if is_later else self._kinds_of(different, parts[0], tolerance)
        self.state.restore()
        differences = _differences(joined_results, groups, single_results, tolerance)
        if is_later:
            losses = filter(self._is_loss, differences)
            differences = {name: differences[name] for name in losses}
        if self.any_rank(bool(differences)):
            # Values that Python and NumPy draw once per batch were equal in both runs. Values that
            # they draw per sample cannot be: another seed shows which results depend on them.
            # Without such draws the same seed shows results that differ in every run.
            again = self._run(joined, seed=int(self.any_rank(self.has_other_draws)))
            unrepeatable = _unrepeatable(joined_results, again, tolerance)
            if not is_later:
                self._warn_of_unrepeatable(sorted(unrepeatable & differences.keys()))
            differences = {
                name: numbers for name, numbers in differences.items() if name not in unrepeatable
            }
        self._check_differences(differences, changed, parts[0].num_samples)
        is_counted = self.any_rank(
            any("num_tokens" in results.values for results in single_results)
        )
        if (
            single_results
            and not (is_counted or is_later)
            and tolerance > _COARSE_TOLERANCE
            and self.mesh.data.rank == 0
        ):
            self._warn_of_ignored_labels(parts)
        return is_counted

    def _run(self, parts: Sequence[Microbatch], seed: int) -> list[StepResults]:
        """Return the step's results for every part, on the last stage."""
        try:
            return self.read(parts, seed) if parts else []
        except Exception as error:
            error.add_note(
                f"{self.name} was tried on {parts[0].num_samples} of {self.num_samples} samples. "
                "If it runs on the whole batch only, or the first dimension of a tensor in the "
                f"batch does not count samples: {_REMEDY}"
            )
            raise

    def _kinds_of(
        self, different: Mapping[str, str], part: Microbatch, tolerance: float
    ) -> dict[str, str]:
        """Return attributes that differ after microbatches and their combined batch, by kind.

        A repeated call separates attributes that count calls from those that hold results of the
        last call: only the former change.
        """
        if not self.any_rank(bool(different)):
            return {}
        self.state.restore()
        self._run([part], seed=0)
        after_first = ModuleState(self.module)
        self._run([part], seed=0)
        repeated = after_first.changes(tolerance)
        return {
            name: kind if name in repeated else "left by the last call"
            for name, kind in different.items()
        }

    def _check_differences(
        self,
        differences: Mapping[str, tuple[float, float, int]],
        changed: Mapping[str, str],
        size: int,
    ) -> None:
        fatal = {name: differences[name] for name in differences if self._is_loss(name)}
        texts = []
        if fatal:
            texts.append(
                f"{self.name} must give the same values for microbatches and for their batch, "
                f"because it is called on {size} samples at a time and the results are averaged: "
                f"{_listed(fatal)}. The step mixes its samples, or its loss is not their mean."
            )
        counted = sorted(name for name, kind in changed.items() if kind in ("number", "tensor"))
        if counted and self.is_training:
            texts.append(
                f"{self.name} must not depend on the number of its calls, because it is called "
                f"once for each microbatch: {', '.join(counted[:5])} changes at every call. Use "
                "self.global_step, or a hook such as on_train_batch_end."
            )
        refusals = gather_some(" ".join(texts) or None, self.mesh.world_cpu)
        if refusals:
            raise UnsupportedError(f"{next(iter(refusals.values()))} {_REMEDY}")
        found = gather_some(dict(differences) or None, self.mesh.world_cpu)
        if found and self.mesh.rank == 0:
            self._warn_of_logged(next(iter(found.values())), size)
        kept = sorted(changed)
        if kept and self.mesh.dp.rank == 0 and self.mesh.tp.rank == 0 and self.mesh.has_loss:
            log.warning(
                "%s stores values in the module, and is called once for each microbatch: %s will "
                "hold an entry for each microbatch, or the values of the last one.",
                self.name,
                ", ".join(kept[:5]),
            )

    def _is_loss(self, name: str) -> bool:
        """Return whether a value decides about the weights, or is the loss of an evaluation."""
        if self.is_training:
            return name in ("the loss", "num_tokens")
        return "loss" in name or name == "num_tokens"

    def _warn_of_logged(
        self, differences: Mapping[str, tuple[float, float, int]], size: int
    ) -> None:
        """Warn of logged values that are not means over samples."""
        log.warning(
            "%s logs values that depend on how a batch is cut. It is called on %s samples at a "
            "time, and the logged values are averaged, or summed with reduce_fx='sum': %s. Use "
            "self.log(..., reduce_fx='sum') for a count or a sum. For a function of a mean, "
            "such as a perplexity, log the mean, and a metric by epoch. For a mean over "
            "tokens, return num_tokens. microbatch_size='batch' keeps the batch whole.",
            self.name,
            size,
            _listed(differences),
        )

    def _warn_of_ignored_labels(self, parts: Sequence[Microbatch]) -> None:
        """Warn of token means over unequal microbatches, which rounding hides in half precision."""
        counts = [count_ignored(part.data) / part.num_samples for part in parts]
        if len(set(counts)) > 1:
            log.warning(
                "The microbatches of a batch have different numbers of labels of -100. In half "
                "precision this check cannot find out whether the loss of %s is a mean over the "
                "other labels. If it is, return num_tokens beside it; otherwise microbatches with "
                "few labels have too much weight.",
                self.name,
            )

    def _warn_of_unrepeatable(self, names: Sequence[str]) -> None:
        if names:
            log.warning(
                "job.check_microbatches cannot compare %s of %s: its value depends on random "
                "numbers of Python or NumPy, or on the time.",
                ", ".join(names),
                self.name,
            )


def _groups(num_parts: int) -> list[range]:
    """Return the microbatches to join: a pair, and triples because a median of two is a mean.

    Each group shares a microbatch with the previous one, so that unequal weights of any two
    microbatches change the value of a group.
    """
    if num_parts == 3:
        return [range(2), range(3)]
    starts = range(1, num_parts - 1, 2)
    groups = [range(start, min(start + 3, num_parts)) for start in starts]
    return [range(2), *groups] if num_parts > 1 else []


def _unrepeatable(
    runs: Sequence[StepResults], repeated: Sequence[StepResults], tolerance: float
) -> set[str]:
    """Return the names whose values differ between two runs on the same microbatches."""
    return {
        name
        for before, after in zip(runs, repeated, strict=True)
        for name in before.values
        if name in after.values
        and not is_close(before.values[name][0], after.values[name][0], tolerance)
    }


def _differences(
    joined: Sequence[StepResults],
    groups: Sequence[range],
    separate: Sequence[StepResults],
    tolerance: float,
) -> dict[str, tuple[float, float, int]]:
    """Return each name's largest difference: combined value, separate value and group size."""
    differences: dict[str, tuple[float, float, int]] = {}
    for results, group in zip(joined, groups, strict=False):
        for name, (value, weight) in results.values.items():
            single = [
                separate[number].values[name] for number in group if name in separate[number].values
            ]
            if (
                len(single) < len(group)
                or weight == 0.0
                or len(group) > differences.get(name, (0.0, 0.0, 3))[2]
            ):
                continue
            average = combined(single)[0]
            worst = differences.get(name, (0.0, 0.0, 0))
            # "not >=" also reports NaN, which "<" would hide.
            if not is_close(value, average, tolerance) and not abs(worst[0] - worst[1]) >= abs(
                value - average
            ):
                differences[name] = value, average, len(group)
    return differences


def _listed(differences: Mapping[str, tuple[float, float, int]]) -> str:
    return "; ".join(
        f"{name} of {'two' if count == 2 else 'three'} microbatches is {whole:.7g} in one call and "
        f"{parts:.7g} in separate calls"
        for name, (whole, parts, count) in differences.items()
    )


#: Number of first batches that are always examined, and the interval of later ones (batches). The
#: interval applies only if an examination communicates or makes the host wait for a device.
_NUM_FIRST_BATCHES = 8
_INTERVAL = 16
_IGNORED = -100


@dataclass
class _Watch:
    """State of one kind of step.

    Args:
        tried: Tensors of the batch that were uneven in a batch that was tried, by path and value.
        num_batches: Number of batches so far (batches).
    """

    tried: set[tuple[str, int]] = field(default_factory=set)
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    num_batches: int = 0
    is_armed: bool = False


class UnevenMasks:
    """Batches whose microbatches are uneven for the first time.

    A batch is uneven if its microbatches have different shares of labels of -100, which torch's
    losses ignore, or of zeros in a tensor of two dimensions, which may be a mask of tokens. A mean
    over the other tokens is then not the mean of the microbatches' means. The trial of an even
    batch cannot see this.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._watches: dict[tuple[Any, ...], _Watch] = {}

    def begin(self, key: tuple[Any, ...], batch: Any, parts: Sequence[Microbatch]) -> None:
        """Record the tensors that are uneven in a batch that is tried."""
        watch = self._watches.setdefault(key, _Watch())
        watch.tried |= {
            name for name, flag in _uneven(batch, parts, frozenset()).items() if flag.item()
        }

    def is_new(self, key: tuple[Any, ...], batch: Any, parts: Sequence[Microbatch]) -> bool:
        """Return whether this batch must be tried again, the same on all ranks.

        The examination of a batch on a device, or with several data ranks, costs time. It is done
        for the first batches and then periodically, and for every batch as soon as some batch
        since the last examination was uneven.

        Communication: at examined batches, one gather of names over the data axis on the CPU.
        """
        watch = self._watches.setdefault(key, _Watch())
        data = self._mesh.data_cpu
        watch.num_batches += 1
        flags = _uneven(batch, parts, watch.tried)
        is_free = data.size == 1 and all(flag.device.type == "cpu" for flag in flags.values())
        is_due = watch.num_batches < _NUM_FIRST_BATCHES or watch.num_batches % _INTERVAL == 0
        if not (is_free or is_due or watch.is_armed):
            for name, flag in flags.items():
                watch.pending[name] = watch.pending[name] | flag if name in watch.pending else flag
            return False
        now = {name for name, flag in flags.items() if flag.item()}
        before = {name for name, flag in watch.pending.items() if flag.item()}
        watch.pending.clear()
        found_by_rank = all_gather_objects((now, before), data)
        uneven = {name for rank_uneven, _ in found_by_rank for name in rank_uneven}
        watch.is_armed = not uneven and (
            watch.is_armed or any(rank_pending for _, rank_pending in found_by_rank)
        )
        watch.tried |= uneven
        return bool(uneven)


def _uneven(
    batch: Any, parts: Sequence[Microbatch], known: Set[tuple[str, int]]
) -> dict[tuple[str, int], Tensor]:
    """Return a flag on the device for each tensor and value: whether its shares are unequal."""
    total = sum(part.num_samples for part in parts)
    flags = {}
    for path, tensor in tensors_in(batch):
        if not tensor.dim() or len(parts) < 2:
            continue
        tensor = tensor[:total]
        is_label = tensor.dtype in (torch.int32, torch.int64)
        if is_label and (path, _IGNORED) not in known:
            flags[path, _IGNORED] = _is_uneven(tensor == _IGNORED, parts)
        if tensor.dim() == 2 and (path, 0) not in known:
            flags[path, 0] = _is_uneven(tensor == 0, parts)
    return flags


def _is_uneven(marks: Tensor, parts: Sequence[Microbatch]) -> Tensor:
    """Return whether the share of True entries differs between microbatches, as a scalar tensor.

    All microbatches but the last have the same size.
    """
    size = parts[0].num_samples
    last = parts[-1].num_samples
    per_sample = marks.flatten(1).sum(1) if marks.dim() > 1 else marks.long()
    per_microbatch = per_sample[: (len(parts) - 1) * size].view(-1, size).sum(1)
    is_last_different = per_sample[-last:].sum() * size != per_microbatch[0] * last
    return (per_microbatch != per_microbatch[0]).any() | is_last_different
