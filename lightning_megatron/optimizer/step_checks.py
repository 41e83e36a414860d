"""Checks of the values of training steps: finite numbers, and equal values on all replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_megatron.errors import NonFiniteError, NonFiniteGradientError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.optimizer.replicas import ReplicaCheck
from lightning_megatron.shapes import Float, Shaped

#: Kinds of values in the order in which one spreads to the next within a step: a message names the
#: first.
KINDS = ("weight", "loss", "gradient", "gradient norm")
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
        #: Comparison of replicas, which examines the graphs of the steps that it compares.
        self.replicas = ReplicaCheck(module, main, reducer, replica_check_interval, inform)

    def begin_step(self, step: int, is_logged: bool) -> None:
        """Start a training step, whose values loggers receive if ``is_logged``."""
        finite = self._finite
        if finite is not None:
            is_compared = self.replicas.inspector is not None
            looks = self._checks_every_step or is_logged or is_compared
            finite.begin(step, looks)
            self._reducer.before_reduction = partial(finite.look, "gradient") if looks else None

    def note(self, kind: str, value: Float[Tensor, "..."] | None) -> None:
        """Record a loss or a gradient norm for a later check."""
        if kind == "loss":
            self.replicas.loss = value
        if self._finite is not None and value is not None:
            self._finite.note(kind, value)

    def check_values(self, *, at_end: bool = False) -> None:
        """Refuse values that are not finite, at checked steps and at the end of the fit.

        Communication: that of :meth:`FiniteWatch.check`.
        """
        if self._finite is not None and (at_end or self._finite.looks):
            self._finite.check()

    def before_sums(self, names: frozenset[str]) -> bool:
        """Look at weights before gradients are summed; return whether replicas are compared.

        Communication: that of :meth:`ReplicaCheck.before_sums`.
        """
        if self._finite is not None and self._finite.looks:
            self._main.wait()
            weights: dict[str, Tensor] = dict(self._module.named_parameters())
            # Weights in 8 bits have recorded their largest magnitudes, which are checked instead.
            for buffer in self._main.eight_bit_buffers:
                weights |= buffer.magnitudes()
            self._finite.look("weight", weights)
        return self.replicas.before_sums(names)

    def after_sums(self, names: frozenset[str], *, compares: bool, are_finite: bool) -> None:
        """Check values, and compare replicas if :meth:`before_sums` has returned True.

        Communication: that of :meth:`check_values` and of :meth:`ReplicaCheck.after_sums`.
        """
        if compares or self._checks_every_step:
            self.check_values()
        if compares:
            self.replicas.after_sums(names, are_finite=are_finite)


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
        flag = torch.tensor(len(local_findings))
        if not all_reduce_(flag, self._mesh.world_cpu, "max").item():
            return
        findings_by_rank = all_gather_objects(local_findings, self._mesh.world_cpu)
        findings = [finding for of_rank in findings_by_rank for finding in of_rank]
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
    spread = f" At batch {later[-1].step} followed {_listed(later)}." if later else ""
    return (
        f"losses, weights and gradients must be finite: at training batch {earliest[0].step} "
        f"{_listed(earliest)} {'was' if len(earliest) == 1 else 'were'} not, before any other "
        f"value.{spread} Further training would have no meaning. Look at the batch that "
        f"rank {', '.join(map(str, ranks))} had read, use a lower learning rate, a longer warm-up "
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
