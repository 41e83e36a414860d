"""Checks of the values of training steps: finite numbers, and equal values on all replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import NonFiniteError, NonFiniteGradientError
from lightning_megatron.groups.collectives import all_gather_objects, gather_some
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.replicas import (
    PartialGradientSearch,
    check_data_replicas,
    check_frozen_copies,
    check_loss_replicas,
    check_tensor_replicas,
    replicated_over_tp,
)
from lightning_megatron.shapes import Float, Shaped

#: Kinds of values in the order in which one spreads to the next within a step: a message names the
#: first.
KINDS = ("weight", "loss", "gradient", "gradient norm")
#: Number of steps at the start of a fit whose replicas are always compared: the first step shows
#: errors of the forward and backward pass, the second those of the update.
_NUM_FIRST_STEPS = 2
#: Number of parameters that the message about gradients summed over tp names.
_NUM_SUMMED_SHOWN = 8
#: Number of records that stay on the device between two checks.
_MAX_KEPT = 1024
#: Number of values that a message names.
_NUM_SHOWN = 5


class StepChecks:
    """Checks of losses, gradients and weights in the training steps of one fit.

    Args:
        checks_values: Whether every step checks its values before the optimizer uses its gradients;
            None checks logging steps after their update, False checks none.
        replica_check_interval: Optimizer steps between later comparisons of replicas; 0 means none.

    Communication: one gather of names over tp at construction.
    """

    def __init__(
        self,
        module: nn.Module,
        main: MainParameters,
        reducer: GradientReducer,
        checks_values: bool | None,
        replica_check_interval: int,
        inform: Callable[[str], None],
    ) -> None:
        self._module = module
        self._main = main
        self._reducer = reducer
        self._checks_every_step = bool(checks_values)
        self._finite = None if checks_values is False else FiniteWatch(main.mesh)
        self._interval = replica_check_interval
        self._inform = inform
        self._replicated = replicated_over_tp(main)
        self._search = PartialGradientSearch(module, main.mesh, self._replicated)
        # Number of steps by trained parameters, because optimizers may alternate.
        self._num_steps: Counter[frozenset[str]] = Counter()
        # Loss of the last backward pass; None if user code runs the backward pass.
        self._loss: Tensor | None = None

    @property
    def inspector(self) -> Callable[[Any, bool], None] | None:
        """Return the inspector of graphs if the next step compares replicas, else None."""
        is_due = self._compares_at(min(self._num_steps.values(), default=0))
        return self._search.inspect if is_due else None

    def begin_step(self, step: int, is_logged: bool) -> None:
        """Start a training step, whose values loggers receive if ``is_logged``."""
        finite = self._finite
        if finite is not None:
            is_compared = self.inspector is not None
            looks = self._checks_every_step or is_logged or is_compared
            finite.begin(step, looks)
            self._reducer.before_reduction = partial(finite.look, "gradient") if looks else None

    def note(self, kind: str, value: Float[Tensor, "..."] | None) -> None:
        """Record a loss or a gradient norm for a later check."""
        if kind == "loss":
            self._loss = value
        if self._finite is not None and value is not None:
            self._finite.note(kind, value)

    def check_values(self, *, at_end: bool = False) -> None:
        """Refuse values that are not finite, at checked steps and at the end of the fit.

        Communication: that of :meth:`FiniteWatch.check`.
        """
        if self._finite is not None and (at_end or self._finite.looks):
            self._finite.check()

    def before_sums(self, names: frozenset[str]) -> bool:
        """Look at weights and graphs before gradients are summed over the ranks.

        The result says whether :meth:`after_sums` must compare replicas.

        Communication: one gather of names over tp, if replicas are compared.
        """
        if self._finite is not None and self._finite.looks:
            self._main.wait()
            weights: dict[str, Tensor] = dict(self._module.named_parameters())
            # Weights in 8 bits have recorded their largest magnitudes, which are checked instead.
            for buffer in self._main.eight_bit_buffers:
                weights |= buffer.magnitudes()
            self._finite.look("weight", weights)
        if not self._compares_at(self._num_steps[names]):
            self._num_steps[names] += 1
            return False
        partial_names = sorted(self._search.partial_names)
        names_by_rank = all_gather_objects(partial_names, self._main.mesh.tp)
        new = sorted(set().union(*names_by_rank) - self._reducer.used_on_parts)
        if new:
            self._reducer.used_on_parts.update(new)
            more = ", ..." if len(new) > _NUM_SUMMED_SHOWN else ""
            shown = ", ".join(new[:_NUM_SUMMED_SHOWN]) + more
            self._inform(
                f"{len(new)} parameter(s) are used on a part of the features by each rank of tp, "
                f"so their gradients are summed over tp: {shown}."
            )
        return True

    def after_sums(self, names: frozenset[str], *, compares: bool, are_finite: bool) -> None:
        """Check values, and compare loss, parameters and finished gradients of replicas.

        After an overflow the comparison is deferred to the next step.

        Communication: that of :meth:`check_values` and of the comparisons.
        """
        if compares or self._checks_every_step:
            self.check_values()
        if compares and are_finite:
            self._num_steps[names] += 1
            self._main.wait()
            if self._loss is not None and self._main.mesh.tp.size > 1:
                check_loss_replicas(self._main, self._loss)
            check_data_replicas(self._main)
            check_tensor_replicas(self._main, self._replicated, names)
            check_frozen_copies(self._main)

    def _compares_at(self, num_steps: int) -> bool:
        mesh = self._main.mesh
        has_copies = mesh.world.size > mesh.pp.size or bool(self._main.on_several_stages)
        is_regular = self._interval > 0 and num_steps % self._interval == 0
        return has_copies and (num_steps < _NUM_FIRST_STEPS or is_regular)


@dataclass(frozen=True)
class NonFiniteValue:
    """A value that is not finite: its name, rank and step.

    Args:
        kind: One of ``KINDS``.
        name: Name of the parameter; empty for losses and gradient norms.
        value: The value as text, such as ``nan``; the largest magnitude of a weight or gradient.
    """

    step: int
    kind: str
    rank: int
    name: str
    value: str


class FiniteWatch:
    """Values of a training that must be finite, collected on the device and read occasionally.

    The loss of every step is recorded, and the gradient norm if gradients are clipped. Both are
    computed anyway and stay on the device until :meth:`check` reads them. At steps that are
    checked, the largest magnitude of every weight and gradient of this rank is recorded, too.
    Gradients are recorded before their reduction spreads them to other ranks.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        # Step, kind, names and values; a loss or a gradient norm has one empty name.
        self._recorded: list[tuple[int, str, tuple[str, ...], Tensor]] = []
        self._findings: list[NonFiniteValue] = []
        #: Whether weights and gradients of this step are recorded.
        self.looks = False
        self._step = 0

    def begin(self, step: int, looks: bool) -> None:
        """Start a step, and record whether its weights and gradients are checked."""
        self._step = step
        self.looks = looks

    def note(self, kind: str, value: Float[Tensor, "..."]) -> None:
        """Record a scalar of one of the ``KINDS``; the host seldom waits for the device."""
        if len(self._recorded) >= _MAX_KEPT:
            self._read()
        self._recorded.append((self._step, kind, ("",), value.detach()))

    def look(self, kind: str, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Record the largest magnitudes of weights or gradients, without a host synchronisation.

        Integer, empty and meta tensors are skipped.
        """
        recorded = {
            name: tensor.detach()
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta
        }
        if recorded:
            # The largest magnitude is not finite if any element is not.
            largest = torch._foreach_norm(list(recorded.values()), float("inf"))
            magnitudes = torch.stack([magnitude.double() for magnitude in largest])
            self._recorded.append((self._step, kind, tuple(recorded), magnitudes))

    def check(self) -> None:
        """Check all values recorded since the last check.

        Communication: one all-reduce of a flag over the world on the CPU; a gather of names on
        failure. The host waits for the device.
        """
        self._read()
        local_findings = self._findings
        self._findings = []
        found = gather_some(local_findings or None, self._mesh.world_cpu)
        findings = [finding for of_rank in found.values() for finding in of_rank]
        if not findings:
            return
        earliest = earliest_of(findings)
        has_gradient = earliest[0].kind == "gradient"
        error = NonFiniteGradientError if has_gradient else NonFiniteError
        raise error(describe_values(findings))

    def _read(self) -> None:
        """Read the recorded values, and keep those that are not finite."""
        recorded = self._recorded
        self._recorded = []
        values = [value.to(self._mesh.device, torch.float64).reshape(-1) for *_, value in recorded]
        numbers = torch.cat(values).tolist() if values else []
        places = [(step, kind, name) for step, kind, names, _ in recorded for name in names]
        self._findings += [
            NonFiniteValue(step, kind, self._mesh.rank, name, str(number))
            for (step, kind, name), number in zip(places, numbers, strict=True)
            if not math.isfinite(number)
        ]


def earliest_of(findings: Sequence[NonFiniteValue]) -> list[NonFiniteValue]:
    """Return the values of the first step and, of its kinds, of the one that comes first."""
    first = min((finding.step, KINDS.index(finding.kind)) for finding in findings)
    return [finding for finding in findings if (finding.step, KINDS.index(finding.kind)) == first]


def describe_values(findings: Sequence[NonFiniteValue]) -> str:
    """Describe the values that are not finite: the first one, its origin and how many follow."""
    earliest = earliest_of(findings)
    later = [finding for finding in findings if finding not in earliest and finding.name]
    ranks = sorted({finding.rank for finding in earliest})
    readers = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    spread = f" At batch {later[-1].step} followed {_listed(later)}." if later else ""
    return (
        f"losses, weights and gradients must be finite: at training batch {earliest[0].step} "
        f"{_listed(earliest)} {'was' if len(earliest) == 1 else 'were'} not, before any other "
        f"value.{spread} Further training would have no meaning. Look at the batch that "
        f"{readers} had read, use a lower learning rate, a longer warm-up "
        "or gradient_clip_val, or a precision with a wider range. job.check_gradients=True looks "
        "at every step, job.check_gradients=False at none."
    )


def _listed(findings: Sequence[NonFiniteValue]) -> str:
    shown = [
        f"the {finding.kind}{f' {finding.name}' if finding.name else ''} of rank {finding.rank} "
        f"({finding.value})"
        for finding in findings
    ]
    more = f" and {len(findings) - _NUM_SHOWN} more" if len(findings) > _NUM_SHOWN else ""
    return ", ".join(shown[:_NUM_SHOWN]) + more
