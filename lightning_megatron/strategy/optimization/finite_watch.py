"""Detection of losses, gradients and weights that are not finite, at logging steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_megatron.errors import NonFiniteError
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private.loops import searches_learning_rate

#: Kinds of values in the order in which one spreads to the next within a step: a message names the
#: first.
KINDS = ("weight", "loss", "gradient", "gradient norm")
#: Number of values that are kept between two checks. Older values are replaced by their sums.
_MAX_KEPT = 1024
_NUM_SHOWN = 5


@dataclass(frozen=True)
class NonFiniteValue:
    """A value that is not finite: its name, rank and step.

    Args:
        step: Number of the training batch (batches).
        kind: One of ``KINDS``.
        rank: Global rank on which the value occurred.
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
    """Values of one step on the device, with their names.

    Shapes: values ``(names,)``, or a scalar for a single value.

    Args:
        step: Number of the training batch (batches).
        kind: One of ``KINDS``.
        names: Names of the parameters; one empty name for a loss or a gradient norm.
        values: The values, which may still be computed on the device.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    values: Tensor


def checks_of(chosen: bool | None, scales_loss: bool, trainer: Trainer) -> bool | None:
    """Return whether gradients are checked at every step; None means at logging steps.

    Args:
        chosen: The strategy's ``check_gradients`` option; None is its default.
        scales_loss: Whether the precision scales losses. Gradients then overflow from time to time,
            and the loss scaler skips these steps.
        trainer: The Trainer. A learning rate search continues until losses explode, so that the
            default is no check.
    """
    return False if chosen is None and (scales_loss or searches_learning_rate(trainer)) else chosen


class FiniteWatch:
    """Values of a training that must be finite, collected on the device and read occasionally.

    The loss of every step is recorded, and the gradient norm if gradients are clipped. Both are
    computed anyway and stay on the device until :meth:`check` reads them. At steps that are
    checked, the largest magnitude of every weight and gradient of this rank is recorded, too.
    Gradients are recorded before their reduction spreads them to other ranks.

    Args:
        mesh: The groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._recorded: list[_StepValues] = []
        #: Whether weights and gradients of this step are recorded.
        self.looks = False
        self._step = 0

    def begin(self, step: int, looks: bool) -> None:
        """Start a step, and record whether its weights and gradients are checked.

        Args:
            step: Number of the training batch (batches).
            looks: Whether weights and gradients of this step are recorded.
        """
        self._step = step
        self.looks = looks

    def note(self, kind: str, value: Tensor) -> None:
        """Record a scalar of this step, without a host synchronisation.

        Args:
            kind: One of ``KINDS``.
            value: The scalar.
        """
        if len(self._recorded) > _MAX_KEPT:
            self._recorded = _summed(self._recorded)
        self._recorded.append(_StepValues(self._step, kind, ("",), value.detach()))

    def look(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Record the largest magnitudes of tensors, without a host synchronisation.

        Args:
            kind: One of ``KINDS``.
            tensors: Weights or gradients by parameter name; integer, empty and meta tensors are
                skipped.
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

        Raises:
            NonFiniteError: On every rank, naming ranks and parameters, if a value of any rank is
                not finite.

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
        raise NonFiniteError(describe(nonfinite))


def _summed(steps: Sequence[_StepValues]) -> list[_StepValues]:
    """Sum the values of each kind: a sum is not finite if one of its values is not."""
    kinds = dict.fromkeys(entry.kind for entry in steps if entry.names == ("",))
    groups = {
        kind: [entry for entry in steps if entry.kind == kind and entry.names == ("",)]
        for kind in kinds
    }
    sums = [
        _StepValues(
            entries[0].step,
            kind,
            ("",),
            torch.stack([entry.values.double() for entry in entries]).sum(),
        )
        for kind, entries in groups.items()
    ]
    return sums + [entry for entry in steps if entry.names != ("",)]


def describe(findings: Sequence[NonFiniteValue]) -> str:
    """Describe the values that are not finite: the first one, its origin and how many follow.

    Args:
        findings: Findings of all ranks, at least one.
    """
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
        "gradient_clip_val, or a precision with a wider range. check_gradients=True looks at every "
        "step, check_gradients=False at none."
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
