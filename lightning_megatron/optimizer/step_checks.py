"""Checks of the values of training steps: finite numbers, and equal values on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
#: Number of values that are kept between two checks. Older values are replaced by their sums.
_MAX_KEPT = 1024
#: Number of values that a message names.
_NUM_SHOWN = 5


class StepChecks:
    """Checks of losses, gradients and weights in the training steps of one fit.

    Args:
        checks_gradients: Whether every step checks gradients for values that are not finite; None
            checks gradients, weights and losses at logging steps.
        replica_check_interval: Optimizer steps between later comparisons of replicas; 0 means none.

    Communication: one gather of names over tp at construction.
    """

    def __init__(
        self,
        module: nn.Module,
        main: MainParameters,
        reducer: GradientReducer,
        checks_gradients: bool | None,
        replica_check_interval: int,
        inform: Callable[[str], None],
    ) -> None:
        self._module = module
        self._main = main
        self._reducer = reducer
        #: Whether gradients are checked at every step, before their sum over the ranks.
        self.checks_gradients = bool(checks_gradients)
        self._finite = FiniteWatch(main.mesh) if checks_gradients is None else None
        self._replicas = ReplicaCheck(module, main, reducer, replica_check_interval, inform)
        self._step = 0

    @property
    def inspector(self) -> Callable[[Any, bool], None] | None:
        """Return the inspector of graphs if the next step compares replicas, else None."""
        return self._replicas.inspector

    def begin_step(self, step: int, is_logged: bool) -> None:
        """Start a training step, whose values loggers receive if ``is_logged``."""
        self._step = step
        finite = self._finite
        if finite is not None:
            looks = is_logged or self._replicas.inspector is not None
            finite.begin(step, looks)
            self._reducer.before_reduction = partial(finite.look, "gradient") if looks else None

    def note(self, kind: str, value: Float[Tensor, "..."] | None) -> None:
        """Record a loss or a gradient norm for a later check."""
        if kind == "loss":
            self._replicas.loss = value
        if self._finite is not None and value is not None:
            self._finite.note(kind, value)

    def check_values(self, *, at_end: bool = False) -> None:
        """Refuse values that are not finite, at checked steps and at the end of the fit.

        Communication: that of :meth:`FiniteWatch.check`.
        """
        if self._finite is not None and (at_end or self._finite.looks):
            self._finite.check()

    def before_sums(self, names: frozenset[str]) -> bool:
        """Check gradients before their sum over the ranks; return whether replicas are compared.

        Communication: that of :func:`check_finite` and of :meth:`ReplicaCheck.before_sums`.
        """
        if self.checks_gradients:
            check_finite(self._reducer.unreduced_gradients(names), self._main.mesh, self._step)
        if self._finite is not None and self._finite.looks:
            self._main.wait()
            # Weights in 8 bits have recorded their largest magnitudes, which are checked instead.
            noted = self._main.eight_bits.magnitudes()
            self._finite.look("weight", {**dict(self._module.named_parameters()), **noted})
        return self._replicas.before_sums(names)

    def after_sums(self, names: frozenset[str], are_finite: bool) -> None:
        """Compare replicas, in a step for which :meth:`before_sums` has returned True.

        Communication: that of :meth:`check_values` and of :meth:`ReplicaCheck.after_sums`.
        """
        self.check_values()
        self._replicas.after_sums(names, are_finite=are_finite)


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


@dataclass(frozen=True)
class _StepValues:
    """Values of one step, which may still be computed on the device.

    A loss or a gradient norm has one empty name.

    Shapes: values ``(names,)``, or a scalar for a single value.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    values: Tensor


class FiniteWatch:
    """Values of a training that must be finite, collected on the device and read occasionally.

    The loss of every step is recorded, and the gradient norm if gradients are clipped. Both are
    computed anyway and stay on the device until :meth:`check` reads them. At steps that are
    checked, the largest magnitude of every weight and gradient of this rank is recorded, too.
    Gradients are recorded before their reduction spreads them to other ranks.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._recorded: list[_StepValues] = []
        #: Whether weights and gradients of this step are recorded.
        self.looks = False
        self._step = 0

    def begin(self, step: int, looks: bool) -> None:
        """Start a step, and record whether its weights and gradients are checked."""
        self._step = step
        self.looks = looks

    def note(self, kind: str, value: Float[Tensor, "..."]) -> None:
        """Record a scalar of one of the ``KINDS``, without a host synchronisation."""
        if len(self._recorded) > _MAX_KEPT:
            self._recorded = _summed(self._recorded)
        self._recorded.append(_StepValues(self._step, kind, ("",), value.detach()))

    def look(self, kind: str, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Record the largest magnitudes of weights or gradients, without a host synchronisation.

        Integer, empty and meta tensors are skipped.
        """
        recorded = {
            name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()
        }
        recorded = {
            name: tensor
            for name, tensor in recorded.items()
            if tensor.numel() and not tensor.is_meta
        }
        if recorded:
            # The largest magnitude is not finite if any element is not.
            largest = torch._foreach_norm(list(recorded.values()), float("inf"))
            self._recorded.append(
                _StepValues(
                    self._step,
                    kind,
                    tuple(recorded),
                    torch.stack([magnitude.double() for magnitude in largest]),
                )
            )

    def check(self) -> None:
        """Check all values recorded since the last check.

        Communication: one all-reduce of a flag over the world on the CPU; a gather of names on
        failure. The host waits for the device.
        """
        recorded = self._recorded
        self._recorded = []
        parts = [
            entry.values.to(self._mesh.device, torch.float64).reshape(-1) for entry in recorded
        ]
        values = torch.cat(parts).cpu() if parts else torch.zeros(0)
        flag = torch.tensor(int(not values.isfinite().all()))
        if not all_reduce_(flag, self._mesh.world_cpu, "max").item():
            return
        names = [(entry.step, entry.kind, name) for entry in recorded for name in entry.names]
        local_findings = [
            NonFiniteValue(step, kind, self._mesh.rank, name, str(value))
            for (step, kind, name), value in zip(names, values.tolist(), strict=True)
            if not -float("inf") < value < float("inf")
        ]
        nonfinite = [
            finding
            for rank_findings in all_gather_objects(local_findings, self._mesh.world_cpu)
            for finding in rank_findings
        ]
        raise NonFiniteError(describe_values(nonfinite))


def _summed(steps: Sequence[_StepValues]) -> list[_StepValues]:
    """Sum the values of each kind: a sum is not finite if one of its values is not."""
    scalars: dict[str, list[_StepValues]] = {}
    for entry in steps:
        if entry.names == ("",):
            scalars.setdefault(entry.kind, []).append(entry)
    sums = []
    for kind, entries in scalars.items():
        total = torch.stack([entry.values.double() for entry in entries]).sum()
        sums.append(_StepValues(entries[0].step, kind, ("",), total))
    return sums + [entry for entry in steps if entry.names != ("",)]


def describe_values(findings: Sequence[NonFiniteValue]) -> str:
    """Describe the values that are not finite: the first one, its origin and how many follow."""
    first_step = min(finding.step for finding in findings)
    kind = min(
        (finding.kind for finding in findings if finding.step == first_step), key=KINDS.index
    )
    earliest = [
        finding for finding in findings if (finding.step, finding.kind) == (first_step, kind)
    ]
    later = [finding for finding in findings if finding not in earliest and finding.name]
    ranks = sorted({finding.rank for finding in earliest})
    spread = ""
    if later:
        verb = "was" if len(later) == 1 else "were"
        spread = f" At batch {later[-1].step} so {verb} {_listed(later)}."
    return (
        f"losses, weights and gradients must be finite: at training batch {first_step} "
        f"{_listed(earliest)} {'was' if len(earliest) == 1 else 'were'} not, before any other "
        f"value.{spread} Further training would have no meaning. Look at the batch that "
        f"{_ranks(ranks)} had read, use a lower learning rate, a longer warm-up or "
        "gradient_clip_val, or a precision with a wider range. job.check_gradients=True looks at "
        "every step, job.check_gradients=False at none."
    )


def _listed(findings: Sequence[NonFiniteValue]) -> str:
    shown = [
        f"the {finding.kind}{f' {finding.name}' if finding.name else ''} of rank {finding.rank} "
        f"({finding.value})"
        for finding in findings
    ]
    more = f" and {len(findings) - _NUM_SHOWN} more" if len(findings) > _NUM_SHOWN else ""
    return ", ".join(shown[:_NUM_SHOWN]) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def check_finite(
    gradients: Mapping[str, Shaped[Tensor, "..."]], mesh: ParallelMesh, step: int
) -> None:
    """Refuse a gradient of any rank, before its reduction, that is infinite or not a number.

    Communication: one all-reduce of a flag over the world, for which the host waits; a gather of
    names on failure.
    """
    flag = torch.zeros((), device=mesh.device)
    if gradients:
        # The largest magnitude is not finite if any element is not.
        largest = torch.stack(
            [norm.float() for norm in torch._foreach_norm(list(gradients.values()), float("inf"))]
        )
        flag = (~torch.isfinite(largest)).any().float()
    if not all_reduce_(flag, mesh.world, "max").item():
        return
    local_reports = [
        (mesh.rank, name, int(gradient.isnan().sum()), int(gradient.isinf().sum()))
        for name, gradient in gradients.items()
        if not gradient.isfinite().all()
    ]
    nonfinite = [
        report
        for rank_reports in all_gather_objects(local_reports, mesh.world_cpu)
        for report in rank_reports
    ]
    raise NonFiniteGradientError(describe_gradients(nonfinite, step))


def describe_gradients(gradients: Sequence[tuple[int, str, int, int]], step: int) -> str:
    """Describe parameters, ranks and step of gradients that are not finite.

    Args:
        gradients: Rank, parameter name, number of NaN elements and number of infinite elements of
            each gradient. The message names the first few gradients.
    """
    places = [
        f"{name} on rank {rank} ({_counts(nans, infinities)})"
        for rank, name, nans, infinities in gradients[:_NUM_SHOWN]
    ]
    more = f"; and {len(gradients) - _NUM_SHOWN} more" if len(gradients) > _NUM_SHOWN else ""
    ranks = sorted({rank for rank, *_ in gradients})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        f"all gradients must be finite: training batch {step} gave {'; '.join(places)}{more}. The "
        f"optimizer would spread them to all weights. Look at the batch that {where} had read, use "
        "a lower learning rate or a longer warm-up, or a precision with a wider range, such as "
        "bf16-mixed."
    )


def _counts(num_nan: int, num_infinite: int) -> str:
    return " and ".join(
        f"{count:,} {kind}"
        for count, kind in ((num_nan, "NaN"), (num_infinite, "infinite"))
        if count
    )
